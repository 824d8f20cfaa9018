"""Who sends which group to whom, and in which pattern: a pure function of two sets of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BROADCAST_RATIO = 4
"""Receivers per sender from which on one broadcast group replaces the pairs."""


class Pattern(Enum):
    """How the bytes of a group travel between ranks that share no memory."""

    point_to_point = "point-to-point"
    """Each pair of sender and receiver has its own group of two: a group of episodes travels to its receiver only."""
    master_broadcast = "master-node broadcast"
    """Each sender is the master of a block of receivers: a group of episodes travels to the block, one of it keeps it."""


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """A sender, a receiver, and the groups that pass between them: first_group, first_group + stride, ..."""

    sender: int
    receiver: int
    first_group: int
    stride: int


@dataclass(frozen=True, slots=True)
class Route:
    """The ranks of one process group: `source` sends, `targets` receive; together they make every collective call."""

    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Group g is sampled by sender g mod S and trained on by receiver g mod R, and by no other.

    So any run of consecutive groups is balanced within one over senders and over receivers, whatever the ratio, and both
    sides know all partners and all numbers without talking: a link carries every lcm(S, R)-th group.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    pattern: Pattern

    def sender_of(self, group: int) -> int:
        """The rank that samples `group`."""
        return self.senders[group % len(self.senders)]

    def receiver_of(self, group: int) -> int:
        """The one rank that trains on `group`."""
        return self.receivers[group % len(self.receivers)]

    def links(self) -> tuple[PlannedLink, ...]:
        """All pairs that exchange groups, in order of their first one."""
        stride = math.lcm(len(self.senders), len(self.receivers))
        return tuple(PlannedLink(self.sender_of(g), self.receiver_of(g), g, stride) for g in range(stride))

    def routes(self) -> tuple[Route, ...]:
        """The process groups that carry groups of episodes, in one order on all ranks."""
        if self.pattern is Pattern.point_to_point:
            return tuple(Route(link.sender, (link.receiver,)) for link in self.links())
        return tuple(
            Route(sender, tuple(link.receiver for link in self.links() if link.sender == sender))
            for sender in self.senders
        )

    def back_routes(self) -> tuple[Route, ...]:
        """The process groups that carry answers from each receiver to each of its senders."""
        return tuple(Route(link.receiver, (link.sender,)) for link in self.links())

    def describe(self) -> str:
        """One line for the log."""
        pairs = ", ".join(f"{route.source}->{'+'.join(map(str, route.targets))}" for route in self.routes())
        return f"data plane {len(self.senders)}:{len(self.receivers)}, {self.pattern.value}: {pairs}"


def make_plan(senders: Sequence[int], receivers: Sequence[int], node_of: Mapping[int, int]) -> TransferPlan:
    """Plan the transfer from the ranks `senders` to the ranks `receivers`.

    Every group is for one receiver, so point-to-point sends the fewest bytes. With few senders per receiver, however, a
    sender's own port is the limit, and it sends the same bytes either way, while with point-to-point it keeps a
    connection (with NCCL also buffers and kernels) per receiver. So senders become masters of equal blocks when there are
    at least `BROADCAST_RATIO` receivers to a sender, the ratio is whole, and no block spans nodes (else bytes that most do
    not keep would cross between nodes several times).

    Raises:
        ValueError: A set is empty or names a rank twice.
    """
    for name, ranks in (("sending", senders), ("receiving", receivers)):
        if not ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"the {name} ranks must be at least one, each once, not {list(ranks)}")
    plan = TransferPlan(tuple(senders), tuple(receivers), Pattern.master_broadcast)
    per_sender, rest = divmod(len(receivers), len(senders))
    is_local = all(len({node_of[rank] for rank in route.targets}) == 1 for route in plan.routes())
    if rest == 0 and per_sender >= BROADCAST_RATIO and is_local:
        return plan
    return TransferPlan(plan.senders, plan.receivers, Pattern.point_to_point)
