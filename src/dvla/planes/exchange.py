"""Whole versions on every node: what the ranks of each node have written, exchanged by the nodes' leaders.

Every byte of a version has one owner (`dvla.planes.weights.is_owner`), and the leader of the owner's node sends it once to
the leader of each other node: (nodes - 1) x model bytes in all, whether the learner is sharded across nodes or replicated on
them. Replicas are sent, too, rather than trusted to be equal, so that all nodes decide with the same bits. Bytes go from
host buffer to host buffer, without packing and without a second copy; for slow links, as differences (`dvla.planes.delta`).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dvla.planes.delta import decode, encode
from dvla.planes.weights import WeightPlaneError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from dvla.planes.manifest import Manifest
    from dvla.planes.weights import Publication
    from dvla.runtime.world import World

Extent = tuple[int, int]
"""First and last-but-one byte."""


class WeightExchange:
    """The collective steps of a version; uses the world's weights_pg and leaders_pg from the param_dist lane.

    Each wait is bounded by the timeout of its group. All ranks make one, those that neither train nor infer for the others'
    sake.

    Args:
        world: This rank; its control group is used in the constructor only.
        manifest: Layout of a version.
        owned: The parts of a buffer that this rank writes; none if it does not train.
        buffers: The node's host buffers.
        delta: Send another node what a version changes, where that is less than the version.

    Raises:
        WeightPlaneError: Some byte has no owner, or two.
    """

    def __init__(
        self, world: World, manifest: Manifest, owned: list[Extent], buffers: Sequence[Tensor], *, delta: bool = False
    ) -> None:
        self._world, self._manifest, self._buffers, self._delta = world, manifest, buffers, delta
        self._before: Tensor | None = None
        """The version before. Nobody writes there until all replicas of the node have applied the one after it."""
        said: list[tuple[int, list[Extent]]] = [(0, [])] * world.world_size
        dist.all_gather_object(said, (world.node, owned), group=world.control_pg)
        _require_tiling([extent for _, extents in said for extent in extents], manifest.num_bytes)
        self._extents = [
            _merged([extent for at, extents in said if at == node for extent in extents])
            for node in range(world.num_nodes)
        ]

    def gather(self, publication: Publication) -> None:
        """Make the published version whole: returns when all of it lies in this node's host buffer.

        Raises:
            WeightPlaneError: Ranks mean different versions, or one did not come.
        """
        world = self._world
        self._agree(world.weights_pg, publication, f"the other ranks of node {world.node} to write their shards")
        if world.num_nodes == 1:
            return
        if world.leaders_pg is not None:
            self._agree(world.leaders_pg, publication, "the leaders of the other nodes to have all their shards")
            with self._waiting_for(publication, "the leaders of the other nodes to send and receive"):
                self._exchange(world.leaders_pg, self._buffers[publication.buffer])
                self._before = self._buffers[publication.buffer]
        self._agree(world.weights_pg, publication, f"the leader of node {world.node} to receive from the other nodes")

    def await_applied(self, publication: Publication) -> None:
        """Return when every replica of this node has applied the version before `publication`; raises as `gather`."""
        node = self._world.node
        self._agree(self._world.weights_pg, publication, f"the replicas of node {node} to apply the version before")

    def _exchange(self, group: dist.ProcessGroup, buffer: Tensor) -> None:
        """Send this node's extents to every other leader while receiving theirs; a node is its leader's rank in `group`."""
        parts = [[buffer[start:stop] for start, stop in extents] for extents in self._extents]
        messages = self._differences(group, parts) if self._delta and self._before is not None else {}
        works = []
        for node in range(self._world.num_nodes):
            for part in [messages[node]] if node in messages else parts[node]:
                if node == self._world.node:
                    peers = (peer for peer in range(self._world.num_nodes) if peer != node)
                    works += [dist.isend(part, group=group, group_dst=peer) for peer in peers]
                else:
                    works.append(dist.irecv(part, group=group, group_src=node))
        for work in works:
            assert work is not None, "this rank leads no node"
            work.wait()
        for node, message in messages.items():
            if node != self._world.node:
                decode(message, parts[node], self._old_parts(node), self._manifest.dtype.itemsize)

    def _differences(self, group: dist.ProcessGroup, parts: list[list[Tensor]]) -> dict[int, Tensor]:
        """By node that sends a difference rather than its parts: the message; of other nodes, the space for it."""
        mine = self._world.node
        message = encode(parts[mine], self._old_parts(mine), self._manifest.dtype.itemsize)
        sizes = torch.zeros(self._world.num_nodes, dtype=torch.int64)
        sizes[mine] = len(message) if len(message) < sum(map(len, parts[mine])) else 0
        dist.all_reduce(sizes, group=group)
        return {
            node: message if node == mine else torch.empty(size, dtype=torch.uint8)
            for node, size in enumerate(sizes.tolist())
            if size
        }

    def _old_parts(self, node: int) -> list[Tensor]:
        assert self._before is not None
        return [self._before[start:stop] for start, stop in self._extents[node]]

    def _agree(self, group: dist.ProcessGroup, publication: Publication, waiting_for: str) -> None:
        """Wait for the ranks of `group`, and check that they mean the same version of the same weights."""
        mine = torch.tensor([publication.version, self._manifest.digest(), publication.digest or 0])
        limits = torch.stack([mine, -mine])
        with self._waiting_for(publication, waiting_for):
            dist.all_reduce(limits, dist.ReduceOp.MAX, group=group)
        high, low = limits[0], -limits[1]
        if not torch.equal(low, high):
            raise WeightPlaneError(
                f"ranks publish different weights: versions {low[0]} to {high[0]}, manifests {low[1]:x} to {high[1]:x}, "
                f"content {low[2]:x} to {high[2]:x}"
            )

    @contextmanager
    def _waiting_for(self, publication: Publication, whom: str) -> Iterator[None]:
        """Say who waited for whom when a collective fails."""
        try:
            yield
        except RuntimeError as error:
            raise WeightPlaneError(
                f"lane param_dist of rank {self._world.rank} waited in vain for {whom}, at version "
                f"{publication.version}: {str(error).splitlines()[0]}"
            ) from error


def _merged(extents: list[Extent]) -> list[Extent]:
    """Neighbouring extents as one."""
    merged: list[Extent] = []
    for start, stop in sorted(extents):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _require_tiling(extents: list[Extent], num_bytes: int) -> None:
    """Refuse extents that leave a byte of [0, num_bytes) without an owner or give it two."""
    end = 0
    for start, stop in [*sorted(extents), (num_bytes, num_bytes)]:
        if start != end:
            raise WeightPlaneError(f"bytes {min(start, end)} to {max(start, end)} of the weights have no single owner")
        end = stop
