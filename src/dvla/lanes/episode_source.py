"""Where the sampling lane gets its episodes from, and where it takes their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dvla.planes.semaphore import Selectable
    from dvla.planes.tickets import Ticket


class EpisodeSource(Protocol):
    """Gives tickets and takes back finished episodes; called by the sampling lane only."""

    def next(self) -> tuple[Ticket, int] | None:
        """The next episode and the slot it is to live in; None while none may start."""

    def finished(self, ticket: Ticket, slot: int) -> None:
        """The episode is over; its results lie in the slot, which is the source's again."""

    def opens_with(self) -> Sequence[Selectable]:
        """What becomes readable when `next` may have something again."""

    def is_exhausted(self) -> bool:
        """Whether `next` will never have anything again."""
