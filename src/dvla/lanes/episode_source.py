"""Where the sampling lane gets its episodes from, and where it takes their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dvla.planes.tickets import Ticket
    from dvla.planes.transport import Parcel


class EpisodeSource(Protocol):
    """Gives tickets and takes back finished episodes; called by the sampling lane only."""

    def take(self, parcel: Parcel) -> None:
        """Hear what a training rank says; every source hears everything, and keeps what concerns it."""

    def next(self) -> tuple[Ticket, int] | None:
        """The next episode and the slot it is to live in; None while none may start."""

    def finished(self, ticket: Ticket, slot: int) -> None:
        """The episode is over; its results lie in the slot, which is the source's again."""


class BeginningVersions:
    """Which weights the episodes of a rank begin with; shared by its sources.

    With `runtime.apply_weights=between_groups` weights are taken over when no group is under way. What begins with newer ones
    must not hold what those groups still need (an environment, its stage, the chunk of a batch simulator): it begins after
    them, and what begins later waits for the same weights.

    Args:
        keeps_groups: Whether this is so; otherwise all may begin at once.
    """

    def __init__(self, *, keeps_groups: bool = False) -> None:
        self._keeps_groups = keeps_groups
        self._newest = 0
        self.num_groups = 0
        """Groups under way."""

    def may_begin(self, version: int) -> bool:
        """Whether an episode that was ordered for `version` may begin now."""
        return not self._keeps_groups or version <= self._newest or self.num_groups == 0

    def begin(self, version: int) -> int:
        """Count such an episode, or group of them, as begun; the version that it waits for."""
        if not self._keeps_groups:
            return version
        self._newest = max(self._newest, version)
        return self._newest
