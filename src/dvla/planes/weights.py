"""The weight plane of a node: learner shards -> one shared host buffer -> every replica, whole versions only.

All local ranks map one anonymous shared-memory file holding a few buffers; each version takes the next one. The learner of
each rank writes the shards it owns to their places there; once the version is whole on every node (`dvla.planes.exchange`),
replicas take it over: in place on a CPU, in one copy on a GPU. No full state dict exists anywhere, and nothing here touches
a GPU stream other than the caller's.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from dvla.planes.anonymous_memory import create_anonymous_memory
from dvla.runtime.device import finish_copies, pin, unpin

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dvla.planes.manifest import Manifest, ManifestEntry


class WeightPlaneError(RuntimeError):
    """Ranks disagree about a transfer, did not come to it, or bytes changed on the way."""


@dataclass(frozen=True, slots=True)
class Publication:
    """This rank's shards of `version` lie in host buffer `buffer`."""

    version: int
    buffer: int
    digest: int | None
    """Of the learner's full parameters, when transfers are verified (`learner_digest`)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The whole of `version` lies in host buffer `buffer`."""

    version: int
    buffer: int
    digest: int | None


def reads_in_place(device: torch.device) -> bool:
    """Whether replicas on `device` compute with the host buffer itself instead of a copy."""
    return device.type == "cpu"


def num_host_buffers(device: torch.device) -> int:
    """Host buffers of a node whose replicas are on `device`; see `HostBuffers`."""
    return 3 if reads_in_place(device) else 2


class HostBuffers:
    """The host buffers of a node, each for a whole version, shared by its ranks.

    While one is written, replicas take over the one before. So two are enough where replicas copy; where they read in
    place, they hold a third until they have taken over the next version.

    Args:
        manifest: Layout of a version.
        group: A gloo group of the ranks of this node that train or infer; used in the constructor only.
        device: The rank's device; with a GPU the memory is pinned.

    Raises:
        MemoryError: The node has too little memory for them; raised on all its ranks.
    """

    def __init__(self, manifest: Manifest, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = device
        count = num_host_buffers(device)
        size = count * manifest.num_bytes
        said: list[Any] = [None, None, None]  # process, descriptor, fault
        if dist.get_rank(group) == 0:
            try:
                said = [os.getpid(), _create_memory(size), None]
            except (MemoryError, OSError) as error:
                said[2] = str(error)
        descriptor = said[1]
        dist.broadcast_object_list(said, group_src=0, group=group)
        if said[2] is not None:
            raise MemoryError(
                f"the weight plane needs {count} host buffers of {manifest.num_bytes / 2**20:.0f} MiB on each node "
                f"({said[2]}): set runtime.precision=bf16, freeze parts (model.freeze), train adapters "
                "(model.lora_rank), or take nodes with more memory"
            )
        if descriptor is None:
            # The file has no name: the leader's descriptor is the only way to it, and only for the same user.
            descriptor = os.open(f"/proc/{said[0]}/fd/{said[1]}", os.O_RDWR | os.O_CLOEXEC)
        # Every page is there now rather than at the first publish.
        self._memory = np.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
        dist.barrier(group)  # all have opened it
        os.close(descriptor)
        pin(self._memory, device)
        self.buffers = torch.from_numpy(self._memory).chunk(count)

    def close(self) -> None:
        """Unpin; the memory itself goes with the last mapping."""
        unpin(self._memory, self._device)


def _create_memory(num_bytes: int) -> int:
    """An anonymous shared-memory file of zeros; its descriptor."""
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise MemoryError(f"{available / 2**20:.0f} MiB are free")
    return create_anonymous_memory("dvla-weights", num_bytes)


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


def is_owner(parameter: DTensor, entry: ManifestEntry, manifest: Manifest) -> bool:
    """Whether this rank is the one that writes its shard of `parameter`.

    Where several ranks hold the same shard (HSDP), the parameters are divided among them by their place in the buffer, so
    that each rank writes, and each node sends, about an equal part.
    """
    replicas, replica = 1, 0
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            size = parameter.device_mesh.size(axis)
            replicas, replica = replicas * size, replica * size + parameter.device_mesh.get_local_rank(axis)
    return entry.offset * replicas // manifest.num_bytes == replica


class ShardWriter:
    """Writes the shards this rank owns to their places in the host buffers.

    Args:
        manifest: Layout of a version.
        parameters: The learner's, sharded.
        host: Where versions lie.
        device: The learner's.

    Raises:
        WeightPlaneError: The learner has other parameters than the manifest says.
    """

    def __init__(
        self, manifest: Manifest, parameters: dict[str, Tensor], host: HostBuffers, device: torch.device
    ) -> None:
        self._device = device
        self.extents: list[tuple[int, int]] = []
        """First and last-but-one byte of each part of a buffer that this rank owns, padding behind it included."""
        self._shards: list[DTensor] = []
        self._places: list[list[Tensor]] = [[] for _ in host.buffers]
        for entry in manifest.entries:
            parameter = parameters.get(entry.name)
            if not isinstance(parameter, DTensor) or tuple(parameter.shape) != entry.shape:
                raise WeightPlaneError(f"parameter {entry.name} {entry.shape} of the manifest is not in the learner")
            start, stop = shard_rows(parameter)
            if start == stop or not is_owner(parameter, entry, manifest):
                continue
            self._shards.append(parameter)
            for places, buffer in zip(self._places, host.buffers, strict=True):
                places.append(manifest.view(buffer, entry)[start:stop])
            self.extents.append(manifest.extent(entry, start, stop))

    @property
    def num_buffers(self) -> int:
        """Host buffers that versions take in turn."""
        return len(self._places)

    @torch.no_grad()
    def write(self, buffer: int) -> None:
        """Copy every shard to its place, casting on the way; returns when the bytes are there."""
        # Without autograd to_local is the shard's own tensor, at no cost.
        shards = [parameter.to_local() for parameter in self._shards]
        # In one call: other lanes cannot take the GIL between two copies.
        if shards:  # a rank may own nothing of a small model
            torch._foreach_copy_(self._places[buffer], shards, non_blocking=True)
        finish_copies(self._device)


def learner_digest(manifest: Manifest, parameters: dict[str, Tensor]) -> int:
    """60 bits of the SHA-256 of the learner's full parameters as they travel; collective over the learner's mesh."""
    digest = hashlib.sha256()
    for entry in manifest.entries:
        parameter = parameters[entry.name].detach()
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        _feed(digest, full.to("cpu", manifest.dtype))
    return _number(digest)


def _number(digest: hashlib._Hash) -> int:
    return int(digest.hexdigest()[:15], 16)


def _feed(digest: hashlib._Hash, tensor: Tensor) -> None:
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


class Replica:
    """The inference lane's plain policy, whose trainable parameters are views of one version.

    Args:
        policy: A frozen policy on its device, in its compute dtype; keeps its own weights until a version is applied.
        manifest: Layout of a version; its dtype is the policy's.
        device: The policy's device.
    """

    def __init__(self, policy: nn.Module, manifest: Manifest, device: torch.device) -> None:
        self.policy: Any = policy.requires_grad_(False).eval()
        self._manifest, self._device = manifest, device
        parameters = dict(policy.named_parameters())
        self._parameters = [parameters[entry.name] for entry in manifest.entries]
        self._views: dict[int, list[Tensor]] = {}  # address of a buffer -> its parameters
        self._flat: Tensor | None = None
        if not reads_in_place(device):
            self._flat = torch.zeros(manifest.num_bytes, dtype=torch.uint8, device=device)
            for parameter, place in zip(self._parameters, self._views_of(self._flat), strict=True):
                parameter.data = place.copy_(parameter)

    def apply(self, buffer: Tensor) -> None:
        """Take over a whole version, without allocating.

        On a GPU it is copied: the buffer may be written again afterwards. On a CPU the parameters become views of the
        buffer, which must stay as it is until the next version has been applied.
        """
        if self._flat is None:
            for parameter, place in zip(self._parameters, self._views_of(buffer), strict=True):
                parameter.data = place
        else:
            self._flat.copy_(buffer, non_blocking=True)
            finish_copies(self._device)

    def _views_of(self, buffer: Tensor) -> list[Tensor]:
        address = buffer.data_ptr()
        if address not in self._views:
            self._views[address] = [self._manifest.view(buffer, entry) for entry in self._manifest.entries]
        return self._views[address]

    def digest(self) -> int:
        """Of the parameters as the policy sees them, comparable to `learner_digest`."""
        digest = hashlib.sha256()
        for parameter in self._parameters:
            _feed(digest, parameter.detach().to("cpu"))
        return _number(digest)
