"""What the ranks of a node share: the memory of episode slots, a board of numbers, and a link for every pair that talks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dvla.envs.batch_pool import BatchPool
from dvla.planes.data_plane import DataPlane, slots_in_memory, slots_on_device
from dvla.planes.node_board import NodeBoard, board_bytes
from dvla.planes.shared_transport import Link, LocalLink, SharedTransport, connect_node, local_links
from dvla.planes.slots import layout_bytes
from dvla.planes.transport import Kind, Parcel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dvla.envs.pool import WorkerPool
    from dvla.planes.semaphore import StopFlag
    from dvla.planes.slots import SlotField
    from dvla.runtime.placement import Roles
    from dvla.runtime.world import World

_GROUPS, _DECISIONS, _WEIGHTS = "groups", "decisions", "weights"
_LINE = 64


@dataclass(slots=True)
class Node:
    """This rank's part. Each transport has one lane that receives from it, and links only where the roles say so."""

    data: DataPlane
    board: NodeBoard
    learners: SharedTransport
    """Of the sampling lane: to all training ranks."""
    samplers: SharedTransport
    """Of the grpo lane: to all sampling ranks."""
    inferrer: SharedTransport
    """Of the sampling lane: to the rank that decides for it, when that is another one."""
    askers: SharedTransport
    """Of the inference lane: to the other ranks it decides for."""
    weights: SharedTransport
    """Of the param_dist lane: between a training rank and those it tells of new versions."""

    def wish_to_stop(self, home: int | None) -> None:
        """Pass on, from a rank that does not train, that it was asked to stop; `home` is its training rank if it samples."""
        if home is not None:
            self.learners.send(Parcel(Kind.wish, home))
        else:
            for sampler in self.askers.peers:
                self.askers.send(Parcel(Kind.wish, sampler))

    def leave(self) -> None:
        """Take leave in order; without it, the peers take the end of this process for its death."""
        for transport in self._transports():
            transport.leave()

    def close(self) -> None:
        """Let go of all, once the lanes have ended."""
        for transport in self._transports():
            transport.close()
        self.data.close()

    def _transports(self) -> tuple[SharedTransport, ...]:
        return self.learners, self.samplers, self.inferrer, self.askers, self.weights


def join_node(
    world: World,
    layout: list[SlotField],
    pool: WorkerPool | BatchPool | None,
    stop: StopFlag,
    *,
    is_shared: bool,
    timeout_s: float,
) -> Node:
    """Meet the other ranks of the node; collective over its `node_pg`.

    Args:
        world: This rank.
        layout: Of the slots of all sampling ranks of the node, or, on devices, of this rank's.
        pool: The simulators of this rank.
        stop: The rank's stop flag.
        is_shared: Whether slots lie in the host memory of the node, or on the device of each batch simulator.
        timeout_s: How long to wait for other ranks, now and whenever one does not read.

    Raises:
        MemoryError: The machine has too little memory for the slots.
        TransportError: A rank did not come.
    """
    roles, rank, size = world.roles, world.rank, world.local_world_size
    slot_bytes = -(-layout_bytes(layout) // _LINE) * _LINE if is_shared else 0
    links = connect_node(world.node_pg, _pairs(roles), slot_bytes + board_bytes(size), timeout_s)
    if is_shared:
        data = slots_in_memory(layout, links.descriptor, links.memory, pool, world.device)
    else:
        assert isinstance(pool, BatchPool)
        os.close(links.descriptor)
        data = slots_on_device(layout, pool, world.device)
    mine, others = {}, {}
    for purpose in (_GROUPS, _DECISIONS, _WEIGHTS):
        mine[purpose] = list[Link | LocalLink](links.first.get(purpose, []))
        others[purpose] = list[Link | LocalLink](links.second.get(purpose, []))
    if rank in roles.sampling and rank in roles.training:
        one, other = local_links(rank, stop)
        mine[_GROUPS].append(one)
        others[_GROUPS].append(other)

    def transport(ends: Sequence[Link | LocalLink]) -> SharedTransport:
        return SharedTransport(rank, sorted(ends, key=lambda link: link.peer), stop, timeout_s)

    return Node(
        data,
        NodeBoard(links.memory[slot_bytes:], size),
        learners=transport(mine[_GROUPS]),
        samplers=transport(others[_GROUPS]),
        inferrer=transport(mine[_DECISIONS]),
        askers=transport(others[_DECISIONS]),
        weights=transport(mine[_WEIGHTS] + others[_WEIGHTS]),
    )


def _pairs(roles: Roles) -> list[tuple[str, int, int]]:
    """All links of a node: sampling to training, sampling to inference, and training to who needs its weights."""
    groups = [(_GROUPS, sampler, learner) for sampler in roles.sampling for learner in roles.training]
    decisions = [(_DECISIONS, sampler, roles.inference_of(sampler)) for sampler in roles.sampling]
    weights = [(_WEIGHTS, learner, other) for learner in roles.training for other in roles.followers_of(learner)]
    return groups + decisions + weights
