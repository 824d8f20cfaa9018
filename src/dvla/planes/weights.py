"""The weight plane of a node: learner shards -> one shared host buffer -> every replica, whole versions only.

All local ranks map one anonymous shared-memory file holding two buffers. The learner of each rank writes its own shard of
every parameter into the buffer of the version's parity; the ranks then agree over their gloo group that the version is
whole; every replica copies it in one go. No full state dict exists anywhere, and nothing here touches a GPU stream other
than the caller's.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from dvla.planes.slots import create_memory, map_memory
from dvla.runtime.device import finish_copies, pin, unpin

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dvla.planes.manifest import Manifest


class WeightPlaneError(RuntimeError):
    """Ranks disagree about a transfer, or bytes changed on the way."""


@dataclass(frozen=True, slots=True)
class Publication:
    """This rank's shards of `version` lie in host buffer `buffer`."""

    version: int
    buffer: int
    digest: str | None
    """SHA-256 of the learner's full parameters, when transfers are verified."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The whole of `version` lies in host buffer `buffer`."""

    version: int
    buffer: int
    digest: str | None


class HostBuffers:
    """Two host buffers for whole versions, shared by all ranks of the node.

    Args:
        manifest: Layout of a version.
        group: A gloo group of the ranks of this node; this class uses it in its constructor only.
        device: The rank's device; with a GPU the memory is pinned.
    """

    def __init__(self, manifest: Manifest, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = device
        size = 2 * manifest.num_bytes
        leader = dist.get_rank(group) == 0
        descriptor = create_memory("dvla-weights", size) if leader else -1
        where = [(os.getpid(), descriptor)]
        dist.broadcast_object_list(where, group_src=0, group=group)
        if not leader:
            # The file has no name: the leader's descriptor is the only way to it, and only for the same user.
            descriptor = os.open(f"/proc/{where[0][0]}/fd/{where[0][1]}", os.O_RDWR | os.O_CLOEXEC)
        self._memory = map_memory(descriptor, size)
        if leader:
            self._memory.fill(0)  # touch every page now rather than at the first publish
        dist.barrier(group)  # all have opened it, and nobody writes before it was cleared
        os.close(descriptor)
        pin(self._memory, device)
        both = torch.from_numpy(self._memory)
        self.buffers = (both[: manifest.num_bytes], both[manifest.num_bytes :])

    def close(self) -> None:
        """Unpin; the memory itself goes with the last mapping."""
        unpin(self._memory, self._device)


def shard_rows(parameter: DTensor) -> tuple[int, int]:
    """First and last-but-one row of `parameter` that lie on this rank: FSDP2 cuts the first axis in equal blocks.

    Raises:
        WeightPlaneError: The parameter is sharded in another way.
    """
    start, stop = 0, parameter.shape[0]
    for axis, placement in enumerate(parameter.placements):
        if placement == Shard(0):
            block = -(-parameter.shape[0] // parameter.device_mesh.size(axis))
            start = min(parameter.shape[0], block * parameter.device_mesh.get_local_rank(axis))
            stop = min(parameter.shape[0], start + block)
        elif not isinstance(placement, Replicate):
            raise WeightPlaneError(f"weights sharded as {placement} cannot be published: only along the first axis")
    return start, stop


def shard_views(manifest: Manifest, parameters: dict[str, Tensor], buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs (local shard, its place in `buffer`) of all parameters this rank has a share of.

    Raises:
        WeightPlaneError: The learner has another parameter than the manifest says.
    """
    pairs = []
    for entry in manifest.entries:
        parameter = parameters.get(entry.name)
        if parameter is None or tuple(parameter.shape) != entry.shape:
            raise WeightPlaneError(f"parameter {entry.name} {entry.shape} of the manifest is not in the learner")
        place = manifest.view(buffer, entry)
        local = parameter.detach()
        if isinstance(local, DTensor):
            start, stop = shard_rows(local)
            local, place = local.to_local(), place[start:stop]
        if local.numel():
            pairs.append((local, place))
    return pairs


def write_shards(pairs: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Copy every shard to its place, casting on the way; returns when the bytes are there."""
    for shard, place in pairs:
        place.copy_(shard, non_blocking=True)
    finish_copies(device)


def learner_digest(manifest: Manifest, parameters: dict[str, Tensor]) -> str:
    """SHA-256 of the learner's full parameters as they travel; collective over the learner's mesh, for verification."""
    digest = hashlib.sha256()
    for entry in manifest.entries:
        parameter = parameters[entry.name].detach()
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        _feed(digest, full.to("cpu", manifest.dtype))
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, tensor: Tensor) -> None:
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


class Replica:
    """The inference lane's plain policy, whose trainable parameters are views of one flat buffer.

    Args:
        policy: A frozen policy on its device, in its compute dtype.
        manifest: Layout of a version; its dtype is the policy's.
        device: The policy's device.
    """

    def __init__(self, policy: nn.Module, manifest: Manifest, device: torch.device) -> None:
        self.policy: Any = policy.requires_grad_(False).eval()
        self._manifest = manifest
        self._flat = torch.zeros(manifest.num_bytes, dtype=torch.uint8, device=device)
        parameters = dict(policy.named_parameters())
        for entry in manifest.entries:
            place = manifest.view(self._flat, entry)
            place.copy_(parameters[entry.name])
            parameters[entry.name].data = place

    def apply(self, buffer: Tensor) -> None:
        """Take over a whole version: one copy, no allocation. Returns when the buffer may be written again."""
        self._flat.copy_(buffer, non_blocking=True)
        finish_copies(self._flat.device)

    def digest(self) -> str:
        """SHA-256 over the parameters as the policy sees them, comparable to `learner_digest`."""
        digest = hashlib.sha256()
        parameters = dict(self.policy.named_parameters())
        for entry in self._manifest.entries:
            _feed(digest, parameters[entry.name].detach().to("cpu"))
        return digest.hexdigest()
