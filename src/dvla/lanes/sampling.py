"""The sampling lane: keeps every simulator of the rank busy, and replaces those that fail."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dvla.envs.messages import Kind, Record
from dvla.envs.pool import WorkerError
from dvla.lanes.lane import Lane
from dvla.planes.semaphore import Selectable, StopFlag, Stopped, WaitTimeoutError, wait_any
from dvla.planes.transport import Kind as ParcelKind
from dvla.planes.transport import Parcel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from dvla.envs.simulators import SimulatorPool
    from dvla.lanes.balance import EnvLimit
    from dvla.lanes.episode_source import EpisodeSource
    from dvla.lanes.stages import Stages
    from dvla.planes.shared_transport import SharedTransport
    from dvla.planes.tickets import Ticket
    from dvla.telemetry.lane_clock import LaneClock
    from dvla.telemetry.trace import Tracer

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # how often the simulators are looked after

_MEASURE_S = 10.0  # over which the pace of simulation is measured, while all environments that may be in flight are

_NO_EPISODE = ("none", -1)  # counts workers that failed while they had none


class RepeatedFailureError(RuntimeError):
    """The simulators of one task fail again and again."""


@dataclass(frozen=True, slots=True)
class _Running:
    """The episode of an environment."""

    ticket: Ticket
    slot: int
    source: EpisodeSource


class SamplingLane(Lane):
    """Starts episodes, passes observations on, hands finished episodes back to their source, replaces failed workers.

    Owns: the worker processes and their sockets, the idle environments, the episodes under way, the episode slots.
    Consumes: orders and freed slots of training ranks, workers' messages, replies of an inference rank.
    Produces: observations (`requests`), finished groups, outcomes.
    Blocks on: workers, the training ranks, an inference rank.
    Unblocked by: workers (an observation, an end, a death), grpo (orders, frees slots), a remote inference lane (actions).

    Args:
        pool: The simulators.
        sources: Where episodes come from, the first that has one is asked first.
        stages: Which requests go together.
        learners: To the training ranks.
        home: The one of them that hears when this rank was asked to stop.
        inferrer: The rank that decides.
        ask: Sends it a request.
        replies: From it, when it is another rank; on this rank, the inference lane wakes workers itself.
        num_envs: Environments.
        limit: How many of them may be in flight.
        max_worker_failures: Failures of one task's simulators in a row that are made good; one more ends the run.
        note_restart: Told when a worker was replaced.
    """

    name = "sampling"

    def __init__(
        self,
        *,
        pool: SimulatorPool,
        sources: Sequence[EpisodeSource],
        stages: Stages,
        learners: SharedTransport,
        home: int,
        ask: Callable[[Parcel], None],
        inferrer: int,
        replies: SharedTransport | None,
        stop: StopFlag,
        num_envs: int,
        limit: EnvLimit,
        max_worker_failures: int,
        wait_timeout_s: float,
        note_restart: Callable[[], None],
        clock: LaneClock,
        tracer: Tracer,
    ) -> None:
        super().__init__(clock, tracer)
        self._pool, self._sources, self._stages, self._stop = pool, sources, stages, stop
        self._home = home
        self._learners, self._ask, self._inferrer, self._replies = learners, ask, inferrer, replies
        self._max_worker_failures, self._wait_timeout_s = max_worker_failures, wait_timeout_s
        self._note_restart, self._limit = note_restart, limit
        self._full_s, self._full_records = 0.0, 0  # since the pace was last measured
        self._idle: list[int] = list(range(num_envs))  # kept sorted: which environment plays a ticket is reproducible
        self._running: dict[int, _Running] = {}
        # By task and by ticket: failures since an episode of it came to its end.
        self._failures: Counter[tuple[str, int]] = Counter()
        self._next_look = 0.0

    def step(self) -> None:
        """Start what may start, then handle the messages of at least one worker (one piece of overlapped work)."""
        self._take_parcels()
        self._dispatch()
        # Else it is the want of orders that limits the pace, of which the number of environments shows nothing.
        is_full, begin = len(self._running) == self._limit.limit, time.monotonic()
        num_records = 0
        with self._waiting():
            ready = self._wait()
        with self.tracer.span("collect", workers=len(ready), running=len(self._running)):
            for worker in ready:
                for record in self._receive(worker):
                    self._handle(record)
                    num_records += 1
        if is_full:
            self._full_s += time.monotonic() - begin
            self._full_records += num_records
            if self._full_s >= _MEASURE_S:
                self._adapt()

    def step_together(self) -> None:
        """Start what may start, then wait for every busy environment, and handle them in order (serial schedule)."""
        self._take_parcels()
        self._dispatch()
        answers: dict[int, tuple[int, Record]] = {}  # with the generation of the worker that gave it
        with self.tracer.span("collect", running=len(self._running)):
            while len(answers) < len(self._running):
                with self.clock.waiting(f"{len(self._running)} simulators"):
                    workers = self._wait(workers_only=True)
                for worker in workers:
                    for record in self._receive(worker):
                        answers[record.env] = (self._pool.generation(record.env), record)
                # Episodes of a worker that was replaced in the meantime have begun anew.
                answers = {env: given for env, given in answers.items() if given[0] == self._pool.generation(env)}
            for env in sorted(answers):
                self._handle(answers[env][1])

    def _waiting(self) -> AbstractContextManager[None]:
        if self._running:
            return self.clock.waiting(f"{len(self._running)} simulators or their actions", "inference")
        return self.clock.waiting("orders", "grpo")

    def _wait(self, *, workers_only: bool = False) -> list[Any]:
        """Workers with a message; empty when another rank or lane has sent something."""
        others: list[Selectable] = []
        if not workers_only:
            others = [self._learners, *([self._replies] if self._replies else [])]
        deadline = time.monotonic() + self._wait_timeout_s
        while True:
            self._look_after_workers()
            if ready := wait_any([self._stop, *self._pool.workers, *others], _LOOK_S):
                break
            if time.monotonic() > deadline and self._running:
                raise WaitTimeoutError(
                    f"lane sampling waited {self._wait_timeout_s:.0f} s for its {len(self._running)} busy simulators and the "
                    "inference lane; raise runtime.wait_timeout_s if the work can take that long"
                )
        if self._stop.is_set():
            raise Stopped
        return [worker for worker in self._pool.workers if worker in ready]

    def _take_parcels(self) -> None:
        """Take in all that other lanes and ranks have sent; end when every training rank has left."""
        while (parcel := self._learners.receive()) is not None:
            for source in self._sources:
                source.take(parcel)
        if not self._learners.num_open:
            raise Stopped
        replies = []
        while self._replies is not None and (parcel := self._replies.receive()) is not None:
            if parcel.kind is ParcelKind.wish:
                self._learners.send(replace(parcel, peer=self._home))
            if parcel.kind is not ParcelKind.reply:
                continue  # one that has left was left by the training ranks before
            replies.append((parcel.id, parcel.slots[0], parcel.decision, parcel.generation))
        if replies:
            self._pool.act(replies)

    def _dispatch(self) -> None:
        """Give tickets to idle environments while there are any."""
        while self._idle and len(self._running) < self._limit.limit:
            for source in self._sources:
                order = source.next()
                if order is not None:
                    break
            else:
                return
            env = self._idle.pop(0)
            self._running[env] = _Running(*order, source)
            self._begin(env)

    def _begin(self, env: int) -> None:
        ticket, slot = self._running[env].ticket, self._running[env].slot
        with self.tracer.span("reset", env=env, task=ticket.task, seed=ticket.seed, greedy=ticket.greedy):
            self._pool.reset(env, slot, task=ticket.task, seed=ticket.seed, ticket=ticket.id, film=ticket.film)

    def _handle(self, record: Record) -> None:
        with self.tracer.span("handle", what=record.kind.name, decision=record.decision, simulator_s=record.seconds):
            self._pass_on(record)
        self.clock.count()

    def _pass_on(self, record: Record) -> None:
        env = record.env
        if record.kind is Kind.observed:
            ticket = self._running[env].ticket
            requests = self._stages.asks(
                Parcel(
                    ParcelKind.request,
                    self._inferrer,
                    (record.slot,),
                    id=env,
                    version=ticket.version,
                    decision=record.decision,
                    greedy=ticket.greedy,
                    generation=self._pool.generation(env),
                    stage=self._stages.of(env),
                )
            )
        else:
            running = self._running.pop(env)
            for key in (("task", running.ticket.task), ("ticket", running.ticket.id), _NO_EPISODE):
                self._failures.pop(key, None)
            running.source.finished(running.ticket, running.slot)
            self._idle.append(env)
            self._idle.sort()
            requests = self._stages.leaves(env)
        for request in requests:
            self._ask(request)

    # -- failures ----------------------------------------------------------------------------------------------------

    def _look_after_workers(self) -> None:
        """Replace workers that hang; at most once in a while, since looking costs more than most waits."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            for worker, error in self._pool.overdue():
                self._replace(worker, error)

    def _adapt(self) -> None:
        """Let the pace since the last time decide how many environments are in flight."""
        before = self._limit.limit
        limit = self._limit.look(self._full_records / self._full_s)
        self._full_s, self._full_records = 0.0, 0
        if limit != before:
            logger.info("%s", f"balance: {limit} environments in flight, before {before}", extra={"file_only": True})

    def _receive(self, worker: Any) -> list[Record]:
        try:
            return self._pool.receive(worker)
        except WorkerError as error:
            self._replace(worker, error)
            return []

    def _replace(self, worker: Any, cause: Exception) -> None:
        """Put a new worker in the place of one that failed; its episodes begin anew, with the same tickets.

        Raises:
            RepeatedFailureError: It is the same task's simulator that fails again and again.
        """
        lost = [env for env in self._pool.envs_of(worker) if env in self._running]
        # The simulator that moved last is the one the worker was busy with.
        culprit = self._running[max(lost, key=self._pool.beat)] if lost else None
        where, keys = "no episode under way", [_NO_EPISODE]
        if culprit:
            ticket = culprit.ticket
            where = f"task {ticket.task}, initial state {ticket.seed}"
            # The ticket counts as well: others of its task may succeed for ever while this one never can.
            keys = [("task", ticket.task), ("ticket", ticket.id)]
        self._failures.update(keys)
        failures = max(self._failures[key] for key in keys)
        if failures > self._max_worker_failures:
            raise RepeatedFailureError(
                f"{failures} simulator workers failed in a row ({where}; runtime.max_worker_failures="
                f"{self._max_worker_failures}), the last one: {cause}"
            ) from cause
        logger.warning("%s", f"{cause}; it is replaced, {len(lost)} episodes begin anew ({where})")
        logger.info("what that worker left behind:\n%s", getattr(cause, "details", ""), extra={"file_only": True})
        self._pool.replace(worker)
        self._note_restart()
        self.clock.beat()
        for env in lost:
            self._begin(env)
            for request in self._stages.leaves(env):
                self._ask(request)
