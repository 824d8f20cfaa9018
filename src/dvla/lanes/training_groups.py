"""Episodes for training: whole groups as training ranks order them, handed on when all members are done."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dvla.lanes.balance import GroupPace
from dvla.planes.tickets import Ticket, make_tickets
from dvla.planes.transport import Kind, Parcel, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from dvla.lanes.episode_source import BeginningVersions


class GroupMixupError(RuntimeError):
    """Members of one group began from different initial states: the simulator's reset is not reproducible."""


@dataclass(slots=True)
class _OpenGroup:
    """A group whose episodes are under way."""

    order: Parcel
    slots: tuple[int, ...]
    finished: int = 0


class TrainingGroups:
    """An `EpisodeSource` that plays ordered groups, first ordered, first begun, and sends finished ones to who ordered them.

    Args:
        slots: The slot memory.
        free: The slots of this rank, whose number bounds what is in flight.
        seed: Of the run.
        group_size: Episodes of a group.
        learners: To the training ranks.
        sharing: The training ranks that may order groups of this rank.
        versions: Which weights episodes of this rank begin with.
        note_free: Told how many slots are free.
        note_pace: Told how many groups are to be finished, and the seconds one takes.
        note_end: Told the number of a group whose members are all done.
    """

    def __init__(
        self,
        *,
        slots: dict[str, np.ndarray],
        free: Sequence[int],
        seed: int,
        group_size: int,
        learners: Transport,
        sharing: Sequence[int],
        versions: BeginningVersions,
        note_free: Callable[[int], None],
        note_pace: Callable[[int, float], None],
        note_end: Callable[[int], None],
    ) -> None:
        self._slots, self._seed, self._group_size, self._learners = slots, seed, group_size, learners
        self._note_free, self._note_pace, self._note_end = note_free, note_pace, note_end
        self._pace = GroupPace()
        self._own = frozenset(free)
        self._free = deque(free)
        self._orders: deque[Parcel] = deque()
        self._sharing, self._versions = sharing, versions
        self._held: Counter[int] = Counter()  # by training rank: groups begun whose slots have not been freed
        self._tickets: deque[Ticket] = deque()  # begun, waiting for an environment
        self._open: dict[int, _OpenGroup] = {}
        note_free(len(self._free))

    def take(self, parcel: Parcel) -> None:
        """Take in orders, and slots that were freed."""
        if parcel.kind is Kind.order:
            self._orders.append(parcel)
            self._pace.begin(time.monotonic())
            self._note_pace(self._pace.num_open, self._pace.seconds)
        elif parcel.kind is Kind.freed and parcel.slots[0] in self._own:
            self._free.extend(parcel.slots)
            self._held[parcel.peer] -= 1
            self._note_free(len(self._free))

    def next(self) -> tuple[Ticket, int] | None:
        """The next member of a group, beginning one if one is ordered and its slots are free."""
        if not self._tickets and not self._begin():
            return None
        ticket = self._tickets.popleft()
        return ticket, self._open[ticket.group].slots[ticket.member]

    def _begin(self) -> bool:
        # All G slots are taken at once, so that a group that has begun always finishes. In the order of each training
        # rank's orders, so that no group waits for slots which younger ones hold.
        order = next((o for o in self._orders if self._versions.may_begin(o.version) and self._has_room(o.peer)), None)
        if order is None:
            return False
        self._orders.remove(order)
        self._held[order.peer] += 1
        slots = tuple(self._free.popleft() for _ in range(self._group_size))
        self._note_free(len(self._free))
        self._open[order.id] = _OpenGroup(order, slots)
        version = self._versions.begin(order.version)
        self._versions.num_groups += 1
        self._tickets.extend(make_tickets(self._seed, order.id, self._group_size, order.task, version))
        return True

    def _has_room(self, learner: int) -> bool:
        """Whether a group of `learner` may begin: it leaves slots for one of each training rank that has none.

        Training ranks train on a group each at the same time: who has one keeps its slots until all have one.
        """
        without = sum(other != learner and not self._held[other] for other in self._sharing)
        return len(self._free) >= (1 + without) * self._group_size

    def finished(self, ticket: Ticket, slot: int) -> None:
        """Hand the group on with its last member.

        Raises:
            GroupMixupError: Its members did not begin alike.
        """
        group = self._open[ticket.group]
        group.finished += 1
        if group.finished < self._group_size:
            return
        initial = self._slots["initial_state"]
        if any((initial[member] != initial[slot]).any() for member in group.slots):
            raise GroupMixupError(
                f"members of group {ticket.group} (task {ticket.task}, seed {ticket.seed}) began from different initial "
                "states: the environment's reset(task, seed) must be reproducible"
            )
        del self._open[ticket.group]
        self._versions.num_groups -= 1
        self._note_end(ticket.group)
        self._pace.end(time.monotonic())
        self._note_pace(self._pace.num_open, self._pace.seconds)
        order = group.order
        self._learners.send(Parcel(Kind.group, order.peer, group.slots, order.id, order.task, order.version))
