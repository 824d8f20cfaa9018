"""Ranks and process groups: the only place that reads torchrun's variables or makes a group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dvla.config import ConfigError
from dvla.runtime.device import backend, choose_device

if TYPE_CHECKING:
    from dvla.config import Device


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place among all, and the groups it may use; each group belongs to one lane."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    learner_mesh: DeviceMesh
    """Axes ``replicate`` and ``shard``, the first only with HSDP. Learner collectives; grpo lane."""
    control_pg: dist.ProcessGroup
    """gloo: agreements, metrics, checkpoints; the main thread during set-up, then the grpo lane."""
    weights_pg: dist.ProcessGroup
    """gloo: the weight plane; param_dist lane."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what a run has once."""
        return self.rank == 0


def join_world(wanted: Device, timeout_s: float, replicate_size: int = 1) -> World:
    """Join the ranks torchrun started; alone, without torchrun, this is a world of one.

    Raises:
        ConfigError: The ranks cannot be used as asked.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if local_world_size != world_size:
        raise ConfigError(
            f"placement.name=colocated runs on one node, but torchrun started {world_size} ranks of which "
            f"{local_world_size} are here: use --nnodes 1"
        )
    device = choose_device(wanted, local_rank, local_world_size)
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1 and "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend(device), store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend(device), timeout=timeout, device_id=device if device.type == "cuda" else None)
    if world_size % replicate_size:
        raise ConfigError(f"runtime.replicate_size={replicate_size} does not divide the {world_size} ranks")
    if replicate_size == 1:
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    else:
        sizes = (replicate_size, world_size // replicate_size)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
    # Every rank makes every group here, in this order: group creation is collective.
    control_pg = dist.new_group(backend="gloo", timeout=timeout)
    weights_pg = dist.new_group(backend="gloo", timeout=timeout)
    return World(rank, world_size, local_rank, local_world_size, device, mesh, control_pg, weights_pg)


def require_same(world: World, what: str, value: str) -> None:
    """Compare `value` over all ranks.

    Raises:
        ConfigError: A rank has another one.
    """
    values: list[str] = [""] * world.world_size
    dist.all_gather_object(values, value, group=world.control_pg)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise ConfigError(f"ranks {different} have another {what} than rank 0: start all with the same command")
