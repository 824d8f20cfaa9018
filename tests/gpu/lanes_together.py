"""Learner, weight plane and replica on one GPU at the same time, each on a thread and a stream of its own."""

from __future__ import annotations

import queue
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from batches import make_batch, make_policy

from dvla.config import Precision
from dvla.models.cuda_graph import GraphedAct
from dvla.models.policy import Observation
from dvla.planes.weights import Arrival, Publication
from dvla.rl.noise import decision_keys
from dvla.runtime.device import finish_copies, use_own_stream
from dvla.runtime.world import World
from gpu.check import Findings, check
from gpu.rank_of_one import WeightPlane, on_device, rank_of_one, wide_policy

_PATIENCE_S = 30.0


def fill_value(version: int) -> float:
    """What all weights of `version` are: small, different for 256 versions in a row, and exact in bfloat16."""
    return (1 + version % 256) * 2.0**-16


@dataclass
class Lanes:
    """Three lanes; the caller's thread is the learner's.

    Args:
        world: The rank.
        plane: Learner, host buffers, replica.
        batch: What the learner trains on.
        is_graphed: Decide by CUDA graphs.
    """

    world: World
    plane: WeightPlane
    batch: Any
    is_graphed: bool = False
    published: queue.Queue = field(default_factory=queue.Queue)
    arrived: queue.Queue = field(default_factory=queue.Queue)
    host_free: threading.Semaphore = field(init=False)
    staging_free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))
    over: threading.Event = field(default_factory=threading.Event)
    errors: list[BaseException] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    decisions: int = 0
    worst_graph_gap: float = 0.0
    step_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host_free = threading.Semaphore(2)
        self._threads = [threading.Thread(target=self._guarded, args=(lane,)) for lane in (self._send, self._decide)]

    def __enter__(self) -> Lanes:
        sys.setswitchinterval(0.0005)  # as a run does
        finish_copies(self.world.device)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.published.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a lane does not end"
        if self.errors:
            raise self.errors[0]

    def _guarded(self, lane: Any) -> None:
        try:
            lane()
        except BaseException as error:
            self.errors.append(error)
            self.over.set()

    def _wait(self, semaphore: threading.Semaphore, what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not semaphore.acquire(timeout=0.5):
            assert not self.over.is_set(), "another lane has ended"
            assert time.monotonic() < deadline, f"waited {_PATIENCE_S:.0f} s for {what}"

    def _send(self) -> None:
        """The param_dist lane: gloo and host memory only."""
        is_first = True
        while (publication := self.published.get()) is not None:
            self.plane.exchange.gather(publication)
            self._wait(self.staging_free, "inference to apply the version before")
            self.arrived.put(Arrival(publication.version, publication.buffer, None))
            self.plane.exchange.await_applied(publication)
            if not is_first:
                self.host_free.release()
            is_first = False

    def _decide(self) -> None:
        """The inference lane: applies what has arrived, looks whether it is whole, decides again and again."""
        device, policy = self.world.device, self.plane.replica.policy
        use_own_stream(device)
        keys = decision_keys(0, torch.arange(8), torch.zeros(8, dtype=torch.int64)).to(device)
        act = GraphedAct(policy) if self.is_graphed else policy.act
        with torch.inference_mode():
            while not self.over.is_set():
                try:
                    arrival = self.arrived.get_nowait()
                except queue.Empty:
                    pass
                else:
                    self.plane.replica.apply(self.plane.host.buffers[arrival.buffer])
                    value = fill_value(arrival.version)
                    if not all(bool((parameter == value).all()) for parameter in policy.parameters()):
                        self.torn.append(arrival.version)
                    self.applied.append(arrival.version)
                    self.staging_free.release()
                size = 1 << self.decisions % 4
                part = Observation(
                    *(getattr(self.batch.observation, name)[:size] for name in ("images", "state", "task"))
                )
                decision = act(part, keys[:size])
                if self.is_graphed:
                    eager = policy.act(part, keys[:size]).logprobs
                    gap = (decision.logprobs - eager).abs() / eager.abs().clamp(min=1)
                    self.worst_graph_gap = max(self.worst_graph_gap, float(gap.max()))
                decision.actions.cpu()
                self.decisions += 1

    def fill(self, version: int) -> None:
        """Make all the learner's weights the value of `version`."""
        with torch.no_grad():
            for parameter in self.plane.learner.parameters().values():
                parameter.to_local().fill_(fill_value(version))

    def train(self, version: int, *, is_published: bool) -> None:
        """A whole learner step, with a collective of its own, and before it the publication of `version`."""
        begin = time.perf_counter()
        self.fill(version)
        if is_published:
            self._wait(self.host_free, "a free host buffer")
            self.published.put(Publication(version, self.plane.write(version), None))
        self.plane.train(self.batch, version)
        # FSDP2 leaves out its collectives in a world of one, but NCCL is to be at work here.
        total = torch.ones(1 << 20, device=self.world.device)
        dist.all_reduce(total, group=self.world.learner_mesh.get_group())
        finish_copies(self.world.device)
        self.step_seconds.append(time.perf_counter() - begin)
        if self.errors:
            raise self.errors[0]

    def drain(self, version: int) -> None:
        """Wait until `version` has been applied."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.applied or self.applied[-1] != version:
            assert not self.over.is_set(), "another lane has ended"
            assert time.monotonic() < deadline, f"version {version} was not applied within {_PATIENCE_S:.0f} s"
            time.sleep(0.001)

    def taken_seconds(self) -> float:
        """Median time of the steps since the last call."""
        seconds, self.step_seconds = self.step_seconds, []
        return statistics.median(seconds)


def _allocated(device: torch.device) -> int:
    """Bytes of tensors on the device."""
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


@check(limit_s=150)
def lanes_run_together(found: Findings) -> None:
    """While a learner trains over NCCL, 200 versions go over gloo to a deciding replica: none torn, no lane stuck."""
    device = found.device
    block, blocks = (25, 8) if found.on_gpu else (10, 2)
    policy = wide_policy(4096, 5) if found.on_gpu else wide_policy(128, 3)
    batch = on_device(make_batch(make_policy("mlp"), 8192 if found.on_gpu else 16, 0), device)
    with rank_of_one(device) as world:
        plane = WeightPlane(world, policy, Precision.bf16)
        lanes = Lanes(world, plane, batch)
        for version in range(3):
            lanes.train(version, is_published=False)
        for version in range(block):
            lanes.train(version, is_published=False)
        alone = lanes.taken_seconds()

        without, with_plane, decided = [], [], []
        first_allocated = last_allocated = 0
        with lanes:
            for turn in range(blocks):  # side by side, so that both see the same clock rates and neighbours
                for _ in range(block):
                    lanes.train(turn, is_published=False)
                without.append(lanes.taken_seconds())
                begin, decisions = time.perf_counter(), lanes.decisions
                for version in range(turn * block, (turn + 1) * block):
                    lanes.train(version, is_published=True)
                with_plane.append(lanes.taken_seconds())
                decided.append((lanes.decisions - decisions) / (time.perf_counter() - begin))
                lanes.drain((turn + 1) * block - 1)
                if found.on_gpu and turn == 0:
                    first_allocated = _steady(lanes, device)
            if found.on_gpu:
                last_allocated = _steady(lanes, device)
        plane.host.close()
    versions = block * blocks
    found.figure("versions", len(lanes.applied))
    found.figure("version MB", plane.manifest.num_bytes / 1e6)
    found.figure("step alone ms", alone * 1e3)
    found.figure("step beside inference ms", statistics.median(without) * 1e3)
    found.figure("step beside inference and weight plane ms", statistics.median(with_plane) * 1e3)
    slower = found.figure("slower by the weight plane", statistics.median(with_plane) / statistics.median(without))
    found.figure("inference batches/s", statistics.median(decided))
    found.demand(lanes.applied == list(range(versions)), "every version is applied, in order")
    found.demand(lanes.torn == [], f"no version is torn (these were: {lanes.torn[:10]})")
    if found.on_gpu:
        growth = found.figure("allocated growth MiB", (last_allocated - first_allocated) / 2**20)
        found.demand(growth < 8, "memory stays as it is from the first to the last versions")
        found.demand(slower < 2.5, "publishing at every step makes steps less than 2.5 times as long")


def _steady(lanes: Lanes, device: torch.device) -> int:
    """The least that was allocated in many looks: inference allocates and frees all the time."""
    seen = []
    for _ in range(50):
        seen.append(_allocated(device))
        time.sleep(0.002)
    assert not lanes.errors
    return min(seen)


@check(limit_s=60, gpu_only="there are no CUDA graphs on a CPU")
def graphs_are_captured_beside_a_learner(found: Findings) -> None:
    """CUDA graphs captured while NCCL and a learner are at work decide as the policy does, also after new weights."""
    policy = wide_policy(1024, 4)
    batch = on_device(make_batch(make_policy("mlp"), 512, 0), found.device)
    with rank_of_one(found.device) as world:
        plane = WeightPlane(world, policy, Precision.bf16)
        lanes = Lanes(world, plane, batch, is_graphed=True)
        with lanes:
            for version in range(60):
                lanes.train(version, is_published=True)
            lanes.drain(59)
        plane.host.close()
    found.figure("batches", lanes.decisions)
    found.figure("relative logprob gap to eager", lanes.worst_graph_gap)
    found.demand(lanes.decisions >= 8, "inference got on while its graphs were captured")
    found.demand(lanes.torn == [], f"no version is torn (these were: {lanes.torn[:10]})")
    found.demand(lanes.worst_graph_gap < 1e-2, "a replay gives the log-probabilities of an eager call")
