"""One rank with its learner on the device and the weight plane beside it, as a run has them."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from batches import SPEC, K

from dvla.config import AlgoConfig, Device, Precision, RuntimeConfig
from dvla.lanes.learner import Learner, MicroBatch
from dvla.models.policy import Observation
from dvla.models.registry import build_policy
from dvla.models.sharding import COMPUTE_DTYPE
from dvla.planes.exchange import WeightExchange
from dvla.planes.manifest import make_manifest
from dvla.planes.weights import HostBuffers, Replica, ShardWriter
from dvla.runtime.world import World, join_world

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def rank_of_one(device: torch.device) -> Iterator[World]:
    """A world of one rank: NCCL for the learner when it is on a GPU, gloo for all else."""
    world = join_world(Device[device.type], 60.0, 1)
    try:
        yield world
    finally:
        dist.destroy_process_group()


def wide_policy(width: int, layers: int) -> Any:
    """A perceptron with weights enough to measure by."""
    options = {"hidden_sizes": [width] * layers}
    return build_policy("mlp", "default", options, spec=SPEC, num_action_chunks=K, temperature=1.0, seed=0)


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The batch, moved."""
    assert batch.prox_logprobs is None
    return MicroBatch(
        observation=Observation(*(getattr(batch.observation, name).to(device) for name in ("images", "state", "task"))),
        record={name: values.to(device) for name, values in batch.record.items()},
        behavior_logprobs=batch.behavior_logprobs.to(device),
        prox_logprobs=None,
        advantages=batch.advantages.to(device),
        weights=batch.weights.to(device),
        action_mask=batch.action_mask.to(device),
        is_current=batch.is_current.to(device),
    )


class WeightPlane:
    """Learner, host buffers and replica.

    Args:
        world: The rank.
        policy: A plain fp32 policy on the host.
        precision: Of learner and replica, and in which weights travel.
        device: Of replica and host buffers; by default the learner's.
    """

    def __init__(self, world: World, policy: Any, precision: Precision, device: torch.device | None = None) -> None:
        device = device or world.device
        dtype = COMPUTE_DTYPE[precision]
        self.manifest = make_manifest(policy, dtype)
        self.replica = Replica(copy.deepcopy(policy).to(device, dtype), self.manifest, device)
        self.learner = Learner(policy.to(world.device), world, AlgoConfig(lr=1e-3), RuntimeConfig(precision=precision))
        self.host = HostBuffers(self.manifest, world.node_pg, device)
        self.writer = ShardWriter(self.manifest, self.learner.parameters(), self.host, world.device)
        self.exchange = WeightExchange(world, self.manifest, self.writer.extents, self.host.buffers)

    def write(self, version: int) -> int:
        """Write the learner's shards to the buffer of `version`; its number."""
        buffer = version % self.writer.num_buffers
        self.writer.write(buffer)
        return buffer

    def train(self, batch: MicroBatch, version: int) -> None:
        """One optimiser step on one micro-batch."""
        self.learner.accumulate(batch, is_last=True)
        self.learner.step(version)
