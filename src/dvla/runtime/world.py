"""Ranks, nodes and process groups: the only place that reads torchrun's variables or makes a group."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from dvla.config import ConfigError, PlacementConfig
from dvla.runtime.device import backend, choose_device
from dvla.runtime.placement import Roles, place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dvla.config import Device


class JoinError(RuntimeError):
    """Not all ranks that torchrun promised have come."""


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place among all, and the groups it may use; each group belongs to one lane."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    roles: Roles
    """Which global ranks of this node sample, infer and train."""
    learner_mesh: DeviceMesh
    """The training ranks. Axes ``replicate`` and ``shard``, the first only with HSDP. Learner collectives; grpo lane."""
    control_pg: dist.ProcessGroup
    """gloo, all ranks: agreements of the main threads, before the lanes start and after they have ended."""
    learners_pg: dist.ProcessGroup
    """gloo, the training ranks: agreements, metrics; the main thread during set-up, then the grpo lane."""
    checkpoint_pg: dist.ProcessGroup
    """gloo, the training ranks: whoever writes checkpoints."""
    node_pg: dist.ProcessGroup
    """gloo, the ranks of this node: set-up of what they share; main thread."""
    weights_pg: dist.ProcessGroup
    """gloo, the ranks of this node that train or infer: the weight plane within it; the main thread during set-up, then
    the param_dist lane."""
    leaders_pg: dist.ProcessGroup | None = None
    """gloo, the first training rank of every node: the weight plane between nodes; param_dist lane. None on other ranks,
    and on one node."""
    node: int = 0

    @property
    def main_rank(self) -> int:
        """The rank that writes what a run has once: the first that trains."""
        return self.roles.training[0] - self.node * self.local_world_size

    @property
    def is_main(self) -> bool:
        """Whether this is the main rank."""
        return self.rank == self.main_rank

    @property
    def num_nodes(self) -> int:
        """Nodes, each with `local_world_size` ranks."""
        return self.world_size // self.local_world_size

    @property
    def num_learners(self) -> int:
        """Training ranks of all nodes."""
        return len(self.roles.training) * self.num_nodes

    @property
    def num_samplers(self) -> int:
        """Sampling ranks of all nodes."""
        return len(self.roles.sampling) * self.num_nodes

    @property
    def main_sampler(self) -> int:
        """The first rank that samples."""
        return self.roles.sampling[0] - self.node * self.local_world_size

    @property
    def learner(self) -> int:
        """This rank's number among all training ranks."""
        return self.node * len(self.roles.training) + self.roles.training.index(self.rank)

    def local(self, rank: int) -> int:
        """The local rank of `rank`, which is of this node."""
        return rank - self.node * self.local_world_size

    def sampler(self, rank: int) -> int:
        """The number among all sampling ranks of `rank`, which is of this node."""
        return self.node * len(self.roles.sampling) + self.roles.sampling.index(rank)


@dataclass(frozen=True, slots=True)
class _Place:
    """What a rank tells the others before there are groups."""

    node: int
    local_world_size: int
    host: str
    fault: str | None
    """Why this rank cannot take part."""


def restart_count() -> int:
    """How often torchrun has started all ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_world(
    wanted: Device,
    timeout_s: float,
    replicate_size: int | None = None,
    placement: PlacementConfig | None = None,
    join_timeout_s: float = 600.0,
) -> World:
    """Join the ranks torchrun started; alone, without torchrun, this is a world of one.

    Args:
        wanted: Device to compute on.
        timeout_s: Seconds a collective of any group may take.
        replicate_size: Copies of the sharded learner (HSDP). None makes one per node: parameters are gathered within a
            node, and only reduced gradients cross the network. 1 shards over all training ranks, which needs the least
            memory.
        placement: Which ranks of each node do what; None for everything on every rank.
        join_timeout_s: Seconds to wait for the other ranks.

    Raises:
        ConfigError: The ranks cannot be used as asked; raised on every rank.
        JoinError: Some ranks did not come.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    node = int(os.environ.get("GROUP_RANK", rank // local_world_size))
    device, fault = torch.device("cpu"), None
    try:
        device = choose_device(wanted, local_rank, local_world_size)
    except ConfigError as error:  # perhaps of this node alone: the others must hear of it
        fault = str(error)
    is_one_node = world_size == local_world_size
    if is_one_node:  # nothing that other machines could reach; gloo and NCCL would listen on the first network there is
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    store = _open_store(rank, join_timeout_s, is_one_node=is_one_node)
    mine = _Place(node, local_world_size, socket.gethostname(), fault)
    places = _meet(store, mine, rank, world_size, join_timeout_s)
    _check(places)
    num_nodes = world_size // local_world_size
    local_roles = place(placement or PlacementConfig(), local_world_size)
    learners = [node * local_world_size + r for node in range(num_nodes) for r in local_roles.training]
    replicate_size = num_nodes if replicate_size is None else replicate_size
    if len(learners) % replicate_size:
        raise ConfigError(f"runtime.replicate_size={replicate_size} does not divide the {len(learners)} training ranks")

    # Every rank makes every group here, in this order: group creation is collective.
    timeout = timedelta(seconds=timeout_s)
    excepthook = sys.excepthook
    dist.init_process_group(
        backend(device),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    sys.excepthook = excepthook  # torch wraps it to name the rank, as dvla.entry does, and never takes that away
    grid, names = torch.tensor(learners), ["shard"]
    if replicate_size > 1:
        grid, names = grid.view(replicate_size, -1), ["replicate", "shard"]
    mesh = DeviceMesh(device.type, grid, mesh_dim_names=tuple(names))

    def gloo(ranks: Sequence[int]) -> dist.ProcessGroup:
        return dist.new_group(ranks, backend="gloo", timeout=timeout)

    roles = [local_roles.on_node(n, local_world_size) for n in range(num_nodes)]
    control_pg, learners_pg, checkpoint_pg = gloo(range(world_size)), gloo(learners), gloo(learners)
    node_pgs = [gloo(range(n * local_world_size, (n + 1) * local_world_size)) for n in range(num_nodes)]
    weights_pgs = [gloo(its.with_weights) for its in roles]
    leaders_pg = None
    if num_nodes > 1:
        leaders = [its.training[0] for its in roles]
        group = gloo(leaders)
        leaders_pg = group if rank in leaders else None
    return World(
        rank,
        world_size,
        local_rank,
        local_world_size,
        device,
        roles[node],
        mesh,
        control_pg,
        learners_pg,
        checkpoint_pg,
        node_pgs[node],
        weights_pgs[node],
        leaders_pg,
        node,
    )


def _open_store(rank: int, timeout_s: float, *, is_one_node: bool) -> Store:
    """The key-value store that groups are made with: torchrun's own, or one on rank 0.

    Torchrun's outlives ranks that it starts again, which must not look for each other at the addresses that those before
    them left there. On several nodes their counts of restarts may differ and so cannot tell these apart.
    """
    if "RANK" not in os.environ:
        return HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_torchruns and restart_count() and not is_one_node:
        raise JoinError(
            "on several nodes ranks can only be started again with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment "
            "of torchrun (launch/torchrun.sh sets it)"
        )
    listening = None
    try:
        if is_one_node and not is_torchruns:  # bound here, as the store itself would listen on every network
            host = "127.0.0.1"
            listening = socket.create_server((host, port)).detach() if rank == 0 else None
        store = TCPStore(
            host,
            port,
            is_master=rank == 0 and not is_torchruns,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # `_meet` waits, and knows whom for
            master_listen_fd=listening,
        )
    except (dist.DistError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise JoinError(f"rank {rank} cannot reach the store of rank 0 at {host}:{port}: {reason}") from error
    return PrefixStore(f"attempt_{restart_count()}", store) if is_one_node else store


def _meet(store: Store, place: _Place, rank: int, world_size: int, timeout_s: float) -> list[_Place]:
    """Tell all ranks this one's place and hear theirs, in order of rank."""
    keys = [f"dvla/place/{other}" for other in range(world_size)]
    store.set(keys[rank], json.dumps(asdict(place)))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise JoinError(
            f"rank {rank} (node {place.node}, {place.host}) waited {timeout_s:.0f} s for ranks {missing} of "
            f"{world_size}, which did not join: look at the logs of their nodes"
        ) from error
    return [_Place(**json.loads(store.get(key))) for key in keys]


def _check(places: list[_Place]) -> None:
    """Refuse what cannot work; all ranks look at the same `places` and so come to the same conclusion."""
    faults = [(rank, place) for rank, place in enumerate(places) if place.fault is not None]
    if faults:
        rank, place = faults[0]
        raise ConfigError(f"{f'rank {rank} on {place.host}: ' * (len(faults) < len(places))}{place.fault}")
    if len({place.local_world_size for place in places}) > 1:
        sizes = {place.node: f"node {place.node} ({place.host}) has {place.local_world_size}" for place in places}
        raise ConfigError(
            f"nodes differ in their number of ranks: {', '.join(sizes[node] for node in sorted(sizes))}: start every "
            "node with the same --nproc-per-node"
        )


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
