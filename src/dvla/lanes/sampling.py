"""The sampling lane: keeps every simulator of the rank busy with episodes of admitted groups."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dvla.envs.messages import Kind, Record
from dvla.lanes.lane import Lane
from dvla.planes.semaphore import StopFlag, Stopped, WaitTimeoutError, wait_any
from dvla.planes.tickets import Group, Ticket

if TYPE_CHECKING:
    import numpy as np

    from dvla.envs.pool import Worker, WorkerPool
    from dvla.lanes.meeting_points import MeetingPoints
    from dvla.planes.tickets import TicketBook
    from dvla.telemetry.lane_clock import LaneClock
    from dvla.telemetry.trace import Tracer


class GroupMixupError(RuntimeError):
    """Members of one group began from different initial states: the simulator's reset is not reproducible."""


@dataclass(slots=True)
class _OpenGroup:
    """A group whose episodes are under way."""

    tickets: list[Ticket]
    slots: dict[int, int] = field(default_factory=dict)  # member -> slot
    finished: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """An observation that waits for a decision."""

    env: int
    slot: int
    decision: int


class SamplingLane(Lane):
    """Starts episodes, passes observations on, closes groups.

    Owns: the worker processes and their sockets, tickets, open groups, the idle environments.
    Consumes: free slots (`slots_free`), the word that another group may start (`admission`), workers' messages.
    Produces: observations (`requests`), finished groups (`groups`).
    Blocks on: workers, `admission`, and while environments are idle and slots short on `slots_free`.
    Unblocked by: workers (an observation, an end), grpo (frees slots, drops groups), inference (applies weights).
    """

    name = "sampling"

    def __init__(
        self,
        *,
        pool: WorkerPool,
        slots: dict[str, np.ndarray],
        book: TicketBook,
        meet: MeetingPoints,
        stop: StopFlag,
        num_envs: int,
        group_size: int,
        update_epochs: int,
        wait_timeout_s: float,
        clock: LaneClock,
        tracer: Tracer,
    ) -> None:
        super().__init__(clock, tracer)
        self._pool, self._slots, self._book, self._meet, self._stop = pool, slots, book, meet, stop
        self._group_size, self._update_epochs, self._wait_timeout_s = group_size, update_epochs, wait_timeout_s
        self._idle: list[int] = list(range(num_envs))  # kept sorted: which environment plays a ticket is reproducible
        self._reserved: list[int] = []  # slots taken for the next group
        self._tickets: deque[Ticket] = deque()  # admitted, waiting for an environment
        self._open: dict[int, _OpenGroup] = {}

    def step(self) -> None:
        """Start what may start, then handle the messages of at least one worker (one piece of overlapped work)."""
        self._dispatch()
        with self.clock.waiting():
            ready = self._wait()
        self._meet.admission.try_acquire()
        with self.tracer.span("collect"):
            for worker in ready:
                self._handle(self._pool.receive(worker))

    def step_together(self) -> None:
        """Start what may start, then wait for every busy environment, and handle them in order (serial schedule)."""
        self._dispatch()
        self._meet.admission.try_acquire()
        records: list[Record] = []
        with self.tracer.span("collect"):
            while len(records) < self._meet.num_envs - len(self._idle):
                with self.clock.waiting():
                    workers = self._wait(workers_only=True)
                for worker in workers:
                    records += self._pool.receive(worker)
            self._handle(sorted(records, key=lambda record: record.env))

    def _wait(self, *, workers_only: bool = False) -> list[Worker]:
        """Workers with a message; empty when something else may have opened admission."""
        sources: list = [self._stop, *self._pool.workers]
        if not workers_only:
            sources.append(self._meet.admission)
            if self._idle and len(self._reserved) < self._group_size:  # none was free a moment ago
                sources.append(self._meet.slots_free.semaphore)
        if not wait_any(sources, self._wait_timeout_s) and len(self._idle) < self._meet.num_envs:
            raise WaitTimeoutError(
                f"lane sampling waited {self._wait_timeout_s:.0f} s for its simulators "
                f"({self._meet.num_envs - len(self._idle)} busy, {len(self._meet.requests)} observations with the "
                "inference lane); raise runtime.wait_timeout_s if the work can take that long"
            )
        if self._stop.is_set():
            raise Stopped
        return [worker for worker in self._pool.workers if wait_any([worker], 0)]

    def _dispatch(self) -> None:
        """Give tickets to idle environments, admitting groups while they may start and slots are there."""
        while self._idle:
            if not self._tickets and not self._admit():
                return
            ticket = self._tickets.popleft()
            env, slot = self._idle.pop(0), self._open[ticket.group].slots[ticket.member]
            self._pool.reset(env, slot, task=ticket.task, seed=ticket.seed, ticket=ticket.id)

    def _admit(self) -> bool:
        """Start the next group, if the staleness rule lets it and its slots are free."""
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

    def _handle(self, records: list[Record]) -> None:
        for record in records:
            if record.kind is Kind.observed:
                self._meet.requests.put(Request(record.env, record.slot, record.decision))
            else:
                self._idle.append(record.env)
                self._finish(record.slot)
            self.clock.count()
        self._idle.sort()

    def _finish(self, slot: int) -> None:
        group_id = int(self._slots["ticket"][slot]) // self._group_size
        group = self._open[group_id]
        group.finished += 1
        if group.finished < self._group_size:
            return
        members = tuple(group.slots[member] for member in range(self._group_size))
        initial = self._slots["initial_state"]
        if any((initial[member] != initial[members[0]]).any() for member in members):
            raise GroupMixupError(
                f"members of group {group_id} (task {group.tickets[0].task}, seed {group.tickets[0].seed}) began from "
                "different initial states: the environment's reset(task, seed) must be reproducible"
            )
        del self._open[group_id]
        self._meet.groups.put(Group(group_id, group.tickets[0].task, members))
