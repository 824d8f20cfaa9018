"""Episodes for training: whole groups, admitted by the staleness rule, handed on when all members are done."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dvla.planes.tickets import Group, Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from dvla.lanes.meeting_points import MeetingPoints
    from dvla.planes.semaphore import Selectable
    from dvla.planes.tickets import TicketBook


class GroupMixupError(RuntimeError):
    """Members of one group began from different initial states: the simulator's reset is not reproducible."""


@dataclass(slots=True)
class _OpenGroup:
    """A group whose episodes are under way."""

    tickets: list[Ticket]
    slots: dict[int, int] = field(default_factory=dict)  # member -> slot
    finished: int = 0


class TrainingGroups:
    """An `EpisodeSource` that begins groups when the book admits them and puts finished ones into `groups`."""

    def __init__(
        self,
        *,
        slots: dict[str, np.ndarray],
        book: TicketBook,
        meet: MeetingPoints,
        group_size: int,
        update_epochs: int,
    ) -> None:
        self._slots, self._book, self._meet = slots, book, meet
        self._group_size, self._update_epochs = group_size, update_epochs
        self._reserved: list[int] = []  # slots taken for the next group
        self._tickets: deque[Ticket] = deque()  # admitted, waiting for an environment
        self._open: dict[int, _OpenGroup] = {}

    def next(self) -> tuple[Ticket, int] | None:
        """The next member of an admitted group, admitting one if the rule lets it and its slots are free."""
        if not self._tickets and not self._admit():
            return None
        ticket = self._tickets.popleft()
        return ticket, self._open[ticket.group].slots[ticket.member]

    def opens_with(self) -> Sequence[Selectable]:
        """Admission, and free slots while they are what is short."""
        is_short = len(self._reserved) < self._group_size  # none was free a moment ago
        return [self._meet.admission, *([self._meet.slots_free.semaphore] if is_short else [])]

    def is_exhausted(self) -> bool:
        """Never: the grpo lane says when a run ends."""
        return False

    def _admit(self) -> bool:
        # All G slots are taken before the group counts as started, so that a started group always finishes.
        while len(self._reserved) < self._group_size:
            slot = self._meet.slots_free.try_get()
            if slot is None:
                return False
            self._reserved.append(slot)
        tickets = self._book.start_group(self._meet.applied_version // self._update_epochs)
        if tickets is None:
            return False
        self._open[tickets[0].group] = _OpenGroup(
            tickets, {ticket.member: slot for ticket, slot in zip(tickets, self._reserved, strict=True)}
        )
        self._reserved = []
        self._tickets.extend(tickets)
        return True

    def finished(self, ticket: Ticket, slot: int) -> None:
        """Hand the group on with its last member.

        Raises:
            GroupMixupError: Its members did not begin alike.
        """
        group = self._open[ticket.group]
        group.finished += 1
        if group.finished < self._group_size:
            return
        members = tuple(group.slots[member] for member in range(self._group_size))
        initial = self._slots["initial_state"]
        if any((initial[member] != initial[slot]).any() for member in members):
            raise GroupMixupError(
                f"members of group {ticket.group} (task {ticket.task}, seed {ticket.seed}) began from different initial "
                "states: the environment's reset(task, seed) must be reproducible"
            )
        del self._open[ticket.group]
        self._meet.groups.put(Group(ticket.group, ticket.task, members))
