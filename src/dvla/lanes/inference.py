"""The inference lane: turns observations into action chunks, with the newest whole weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from dvla.lanes.lane import Lane
from dvla.models.cuda_graph import GraphedAct
from dvla.planes.semaphore import Selectable, StopFlag, Stopped, wait_any
from dvla.planes.weights import WeightPlaneError
from dvla.rl.noise import decision_keys
from dvla.runtime.device import use_own_stream

if TYPE_CHECKING:
    from dvla.envs.simulators import SimulatorPool
    from dvla.lanes.meeting_points import MeetingPoints
    from dvla.lanes.sampling import Request
    from dvla.planes.observations import SlotTensors
    from dvla.planes.weights import HostBuffers, Replica
    from dvla.telemetry.lane_clock import LaneClock
    from dvla.telemetry.trace import Tracer


class InferenceLane(Lane):
    """Serves the rank's environments; for evaluation alone, without host buffers, always with the same weights.

    Owns: the replica of the policy.
    Consumes: observations (`requests`), whole versions of the weights (`arrived`).
    Produces: actions, behaviour log-probabilities and versions in the slots (`replies`).
    Blocks on: `requests` and `arrived` together; while serving it only tries `arrived`, between two batches.
    Unblocked by: sampling (an observation), param_dist (a version).
    """

    name = "inference"

    def __init__(
        self,
        *,
        replica: Replica,
        host: HostBuffers | None,
        slots: SlotTensors,
        pool: SimulatorPool,
        meet: MeetingPoints,
        stop: StopFlag,
        device: torch.device,
        seed: int,
        max_batch: int,
        max_wait_s: float,
        verify_weights: bool,
        cuda_graphs: bool,
        clock: LaneClock,
        tracer: Tracer,
    ) -> None:
        super().__init__(clock, tracer)
        self._replica, self._host, self._slots, self._pool, self._meet = replica, host, slots, pool, meet
        self._stop, self._device, self._seed = stop, device, seed
        self._max_batch, self._max_wait_s, self._verify_weights = max_batch, max_wait_s, verify_weights
        self._act = GraphedAct(replica.policy) if cuda_graphs else replica.policy.act
        self._has_stream = False

    def step(self) -> None:
        """Apply weights if a version lies ready, then serve one batch if there are requests; else wait for either."""
        if not self._has_stream:
            use_own_stream(self._device)
            self._has_stream = True
        self.apply_arrived()
        # Before the first version there is nothing to decide with: requests wait.
        sources: list[Selectable] = [self._stop, self._meet.arrived.semaphore]
        if self._meet.applied_version >= 0:
            if batch := self._take_batch(self._max_wait_s):
                self._serve_alike(batch)
                return
            sources.append(self._meet.requests.semaphore)
        with self.clock.waiting():
            wait_any(sources, 60.0)  # idling is not a fault: the lanes that wait for this one keep the time
        if self._stop.is_set():
            raise Stopped

    def step_all(self) -> None:
        """Apply weights if they are there, then serve every request in order (serial schedule)."""
        self.apply_arrived()
        while batch := self._take_batch(0.0):
            self._serve_alike(batch)

    def apply_arrived(self) -> None:
        """Take over the arrived version, if there is one."""
        arrival = self._meet.arrived.try_get()
        if arrival is None:
            return
        assert self._host is not None, "a version arrived where there is no weight plane"
        with self.tracer.span("apply", version=arrival.version):
            self._replica.apply(self._host.buffers[arrival.buffer])
            if self._verify_weights and self._replica.digest() != arrival.digest:
                raise WeightPlaneError(f"the replica's weights of version {arrival.version} differ from the learner's")
        self._meet.applied_version = arrival.version
        self._meet.staging_free.release()
        self._meet.admission.release()

    def _take_batch(self, max_wait_s: float) -> list[Request]:
        """Up to max_batch requests; having one, wait at most `max_wait_s` for more."""
        requests = self._meet.requests
        first = requests.try_get()
        if first is None:
            return []
        batch = [first]
        deadline = time.monotonic() + max_wait_s
        while len(batch) < min(self._max_batch, self._meet.num_envs):
            request = requests.try_get()
            if request is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                with self.clock.waiting():
                    request = requests.get_within(left)
                if request is None:
                    break
            batch.append(request)
        return batch

    def _serve_alike(self, batch: list[Request]) -> None:
        """Serve a batch, greedy requests (evaluation) apart from those that explore; none of a worker that is no more."""
        current = [request for request in batch if request.generation == self._pool.generation(request.env)]
        for greedy in (False, True):
            if part := [request for request in current if request.greedy is greedy]:
                self.serve(part)

    @torch.inference_mode()
    def serve(self, batch: list[Request]) -> None:
        """Decide for a batch: write actions, log-probabilities, version and record to the slots, wake the workers."""
        with self.tracer.span("decide", size=len(batch)):
            slots = torch.tensor([request.slot for request in batch])
            decisions = torch.tensor([request.decision for request in batch])
            keys = decision_keys(self._seed, self._slots.tensors["ticket"][slots], decisions)
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
            self._slots.tensors["behavior_version"][slots, decisions] = self._meet.applied_version
            self._pool.act([(r.env, r.slot, r.decision, r.generation) for r in batch])
            self.clock.count(len(batch))
