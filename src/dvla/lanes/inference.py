"""The inference lane: turns observations into action chunks, with the newest whole weights."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import torch

from dvla.config import WeightApplication
from dvla.lanes.balance import BatchTimes
from dvla.lanes.lane import Lane
from dvla.models.cuda_graph import GraphedAct
from dvla.planes.semaphore import Selectable, StopFlag, Stopped, wait_any
from dvla.planes.transport import Kind, Parcel
from dvla.planes.weights import WeightPlaneError
from dvla.rl.noise import decision_keys
from dvla.runtime.device import finish_copies, use_own_stream

if TYPE_CHECKING:
    from dvla.config import RuntimeConfig
    from dvla.envs.simulators import SimulatorPool
    from dvla.lanes.meeting_points import MeetingPoints
    from dvla.planes.observations import SlotTensors
    from dvla.planes.shared_transport import SharedTransport
    from dvla.planes.weights import HostBuffers, Replica
    from dvla.telemetry.lane_clock import LaneClock
    from dvla.telemetry.trace import Tracer


class InferenceLane(Lane):
    """Decides for environments; for evaluation alone, without host buffers, always with the same weights.

    Owns: the replica of the policy.
    Consumes: observations (`requests`, and of other ranks' sampling lanes), whole versions of the weights (`arrived`).
    Produces: actions, behaviour log-probabilities and versions in the slots (`replies`).
    Blocks on: observations and `arrived` together; while serving it only tries `arrived`, between two batches.
    Unblocked by: sampling (an observation), param_dist (a version).

    Args:
        rank: This rank.
        replica: The policy.
        host: Where arrived versions lie.
        slots: The slot memory.
        pool: The simulators of this rank, if it samples.
        samplers: To the other ranks it decides for, if there are any.
        meet: Where it meets the lanes of its rank.
        stop: The rank's stop flag.
        device: The replica's.
        seed: Of the run.
        num_envs: Environments it decides for.
        stages: Parts in which they move (`dvla.lanes.stages`).
        runtime: Batches, and when weights are taken over.
        balances: Whether measured times decide about batches.
        group_size: Episodes of a group.
        applied_version: The version of the weights the replica begins with; -1 when it waits for the first one.
    """

    name = "inference"

    def __init__(
        self,
        *,
        rank: int,
        replica: Replica,
        host: HostBuffers | None,
        slots: SlotTensors,
        pool: SimulatorPool | None,
        samplers: SharedTransport | None,
        meet: MeetingPoints,
        stop: StopFlag,
        device: torch.device,
        seed: int,
        num_envs: int,
        stages: int | None,
        runtime: RuntimeConfig,
        balances: bool,
        group_size: int,
        applied_version: int = -1,
        clock: LaneClock,
        tracer: Tracer,
    ) -> None:
        super().__init__(clock, tracer)
        self._rank, self._replica, self._host, self._slots, self._pool = rank, replica, host, slots, pool
        self._samplers, self._meet, self._stop, self._device, self._seed = samplers, meet, stop, device, seed
        self._max_batch = min(runtime.max_batch, -(-num_envs // (stages or 1)))
        self._max_wait_s, self._verify_weights = runtime.max_wait_s, runtime.verify_weights
        self._times, self._batch_limit = BatchTimes() if balances and stages is None else None, self._max_batch
        self._known_sizes: set[int] = set()
        self._keeps_groups = runtime.apply_weights is WeightApplication.between_groups
        self._group_size = group_size
        self._open_groups: set[int] = set()  # that have decisions of the weights in use, and not yet all of theirs
        self._act = GraphedAct(replica.policy) if runtime.cuda_graphs else replica.policy.act
        self._queues: dict[tuple[int, bool], deque[Parcel]] = {}  # by (stage, greedy): what makes one batch
        self._early: list[Parcel] = []  # for weights that have not arrived
        self._has_stream = False
        self.applied_version = applied_version
        """Optimiser steps behind the weights in use."""

    def step(self) -> None:
        """Apply weights if a version lies ready, then serve one batch if there are requests; else wait for either."""
        if not self._has_stream:
            use_own_stream(self._device)
            self._has_stream = True
        self.apply_arrived()
        if batch := self._take_batch(self._max_wait_s):
            self.serve(batch)
            return
        with self.clock.waiting("requests", "sampling"):
            # Idling is not a fault: the lanes that wait for this one keep the time.
            sets_free = self._meet.group_ends if self._open_groups else self._meet.arrived
            wait_any([*self._sources(), sets_free.semaphore], 60.0)
        if self._stop.is_set():
            raise Stopped

    def step_all(self) -> None:
        """Apply weights if they are there, then serve every request in order (serial schedule)."""
        self.apply_arrived()
        while batch := self._take_batch(0.0):
            self.serve(batch)

    def apply_arrived(self) -> None:
        """Take over the arrived version, if there is one and it may be."""
        while (group := self._meet.group_ends.try_get()) is not None:
            self._open_groups.discard(group)
        if self._open_groups:
            return
        arrival = self._meet.arrived.try_get()
        if arrival is None:
            return
        assert self._host is not None, "a version arrived where there is no weight plane"
        with self.tracer.span("apply", version=arrival.version):
            self._replica.apply(self._host.buffers[arrival.buffer])
            if self._verify_weights and self._replica.digest() != arrival.digest:
                raise WeightPlaneError(f"the replica's weights of version {arrival.version} differ from the learner's")
        self.applied_version = arrival.version
        self.clock.beat()
        self._meet.staging_free.release()
        early, self._early = self._early, []
        for request in early:
            self._queue(request)

    def _sources(self) -> list[Selectable]:
        return [self._stop, self._meet.requests.semaphore, *([self._samplers] if self._samplers else [])]

    def _collect(self) -> None:
        """Take in all requests there are."""
        while (request := self._meet.requests.try_get()) is not None:
            self._queue(request)
        if self._samplers is not None:
            while (parcel := self._samplers.receive()) is not None:
                if parcel.kind is Kind.request:
                    self._queue(parcel)
            if self._pool is None and not self._samplers.num_open:
                raise Stopped  # nobody is left to decide for

    def _queue(self, request: Parcel) -> None:
        if request.version > self.applied_version or self.applied_version < 0:
            self._early.append(request)
        else:
            self._queues.setdefault((request.stage, request.greedy), deque()).append(request)

    def _take_batch(self, max_wait_s: float) -> list[Parcel]:
        """Up to max_batch requests of one stage, greedy ones (evaluation) apart; having one, wait for more."""
        self._collect()
        while self._queues:
            key = next(iter(self._queues))  # that has waited longest
            queue = self._queues[key]
            deadline = time.monotonic() + max_wait_s
            while len(queue) < self._max_batch and (left := deadline - time.monotonic()) > 0:
                if self._times is not None:
                    left = min(left, self._times.worth_waiting_s(len(queue), left))
                before = len(queue)
                with self.clock.waiting("more requests", "sampling"):
                    wait_any(self._sources(), left)
                if self._stop.is_set():
                    raise Stopped
                self._collect()
                if self._times is not None and len(queue) == before:
                    break
            batch = [queue.popleft() for _ in range(min(len(queue), self._max_batch))]
            del self._queues[key]
            if queue:
                self._queues[key] = queue  # behind the others
            # None of a worker that is no more.
            if batch := [request for request in batch if not self._is_own(request) or self._is_current(request)]:
                return batch
        return []

    def _is_own(self, request: Parcel) -> bool:
        return request.peer == self._rank

    def _is_current(self, request: Parcel) -> bool:
        assert self._pool is not None
        return request.generation == self._pool.generation(request.id)

    @torch.inference_mode()
    def serve(self, batch: list[Parcel]) -> None:
        """Decide for a batch: write actions, log-probabilities, version and record to the slots, wake who waits."""
        begin = time.monotonic()
        queued = sum(map(len, self._queues.values()))
        with self.tracer.span("decide", size=len(batch), greedy=batch[0].greedy, queued=queued):
            slots = torch.tensor([request.slots[0] for request in batch])
            decisions = torch.tensor([request.decision for request in batch])
            tickets = self._slots.tensors["ticket"][slots]
            keys = decision_keys(self._seed, tickets, decisions)
            observation, keys = self._slots.observation(slots, decisions), keys.to(self._device, non_blocking=True)
            decision = (
                self._replica.policy.act(observation, keys, greedy=True)
                if batch[0].greedy
                else self._act(observation, keys)
            )
            self._slots.scatter("actions", slots, decisions, decision.actions)
            self._slots.scatter("logprobs", slots, decisions, decision.logprobs)
            for name, values in decision.record.items():
                self._slots.scatter(f"record.{name}", slots, decisions, values)
            self._slots.tensors["behavior_version"][slots, decisions] = self.applied_version
            if self._keeps_groups and not batch[0].greedy:
                self._open_groups.update((tickets // self._group_size).tolist())
            own = [(r.id, r.slots[0], r.decision, r.generation) for r in batch if self._is_own(r)]
            if own:
                assert self._pool is not None
                self._pool.act(own)
            others = [request for request in batch if not self._is_own(request)]
            if others:
                assert self._samplers is not None
                finish_copies(self._device)
                for request in others:
                    self._samplers.send(request.answer(Kind.reply))
            self.clock.count(len(batch))
        if self._times is not None:
            if len(batch) in self._known_sizes:  # the first of a size may warm up, compile or capture
                self._times.note(len(batch), time.monotonic() - begin)
                self._max_batch = self._times.largest_batch(self._batch_limit)
            self._known_sizes.add(len(batch))
