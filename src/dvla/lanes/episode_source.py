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
