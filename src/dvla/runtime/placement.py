"""Placements: which ranks of a node sample, infer and train, and who works with whom. Pure functions of config and sizes.

A placement is three sets of local ranks, the same on every node: a whole loop of sampling and inference, and the learners
it feeds, live on one node. Only gradients and weights cross nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dvla.config import ConfigError, Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dvla.config import PlacementConfig

ROLES = ("sampling", "inference", "training")


@dataclass(frozen=True, slots=True)
class Roles:
    """The ranks with each role, as local ranks of every node or as global ranks of one (`on_node`), each in order."""

    sampling: tuple[int, ...]
    inference: tuple[int, ...]
    training: tuple[int, ...]

    def on_node(self, node: int, local_world_size: int) -> Roles:
        """The same sets as global ranks of `node`."""
        first = node * local_world_size
        return Roles(*(tuple(first + rank for rank in getattr(self, role)) for role in ROLES))

    def of(self, rank: int) -> tuple[str, ...]:
        """What `rank` does."""
        return tuple(role for role in ROLES if rank in getattr(self, role))

    @property
    def with_weights(self) -> tuple[int, ...]:
        """Ranks that take part in the weight plane: those that train or infer."""
        return tuple(sorted({*self.training, *self.inference}))

    def inference_of(self, sampler: int) -> int:
        """The rank that decides for the environments of `sampler`: itself if it infers, else one of all in turn.

        Those that do not sample come first: they have no environments of their own.
        """
        if sampler in self.inference:
            return sampler
        apart = [rank for rank in self.sampling if rank not in self.inference]
        turns = sorted(self.inference, key=lambda rank: rank in self.sampling)
        return turns[apart.index(sampler) % len(turns)]

    def samplers_of(self, inferrer: int) -> tuple[int, ...]:
        """The ranks whose environments `inferrer` decides for."""
        return tuple(rank for rank in self.sampling if self.inference_of(rank) == inferrer)

    def home_of(self, sampler: int) -> int:
        """The training rank that `sampler` reports evaluations to: itself if it trains, else one of all in turn."""
        if sampler in self.training:
            return sampler
        return self.training[self.sampling.index(sampler) % len(self.training)]

    def herald_of(self, rank: int) -> int:
        """The training rank that tells `rank`, which does not train, of new weights."""
        apart = [other for other in self.inference if other not in self.training]
        return self.training[apart.index(rank) % len(self.training)]

    def followers_of(self, learner: int) -> tuple[int, ...]:
        """The ranks that `learner` is the herald of."""
        return tuple(r for r in self.inference if r not in self.training and self.herald_of(r) == learner)

    def sampler_of(self, learner: int, number: int) -> int:
        """Where the training rank `learner` lets its group `number` (0, 1, ...) be sampled: each sampler in turn.

        The groups of all learners of the node together take every sampler equally often, whatever the ratio.
        """
        position = number * len(self.training) + self.training.index(learner)
        return self.sampling[position % len(self.sampling)]

    def samplers_in_turn(self, learner: int, number: int) -> list[int]:
        """All samplers that `learner` has its turns at, beginning with that of its group `number`."""
        count = len(self.sampling) // math.gcd(len(self.training), len(self.sampling))
        return [self.sampler_of(learner, turn) for turn in range(number, number + count)]

    def learners_of(self, sampler: int) -> list[int]:
        """The training ranks that have turns at `sampler`."""
        return [learner for learner in self.training if sampler in self.samplers_in_turn(learner, 0)]


def place(config: PlacementConfig, local_world_size: int) -> Roles:
    """The three sets of local ranks that `config` asks for.

    Where sets are disjoint, training comes first (rank 0 writes the run), then inference, then sampling.

    Raises:
        ConfigError: They do not fit a node of `local_world_size` ranks, or leave a role or a rank with nothing to do.
    """
    everyone = tuple(range(local_world_size))
    if config.name is Placement.colocated:
        return Roles(everyone, everyone, everyone)
    if config.name is Placement.custom:
        roles = Roles(*(tuple(sorted(getattr(config, role))) for role in ROLES))
        _check_map(roles, local_world_size)
        return roles
    parts = [int(part) for part in config.ratio.split(":")]
    if local_world_size % sum(parts):
        multiples = [str(sum(parts) * factor) for factor in (1, 2, 3)]
        raise ConfigError(
            f"placement.ratio={config.ratio} needs a multiple of {sum(parts)} ranks on a node ({', '.join(multiples)}, "
            f"...), but there are {local_world_size}: change it, or start another number with --nproc-per-node"
        )
    share = local_world_size // sum(parts)
    if config.name is Placement.separated:
        learners = parts[1] * share
        return Roles(everyone[learners:], everyone[learners:], everyone[:learners])
    learners = parts[2] * share if len(parts) == 3 else 0
    samplers = local_world_size - parts[0] * share
    roles = Roles(everyone[samplers:], everyone[learners:samplers], everyone[:learners] or everyone)
    _check_map(roles, local_world_size)
    return roles


def _check_map(roles: Roles, local_world_size: int) -> None:
    """Refuse a map that cannot work; raises ConfigError."""
    for role in ROLES:
        ranks: Sequence[int] = getattr(roles, role)
        if not ranks:
            raise ConfigError(f"placement.{role} is empty: give it at least one local rank")
        if len(set(ranks)) < len(ranks):
            raise ConfigError(f"placement.{role}={list(ranks)} names a rank twice")
        if not set(ranks) <= set(range(local_world_size)):
            raise ConfigError(
                f"placement.{role}={list(ranks)}: the local ranks of a node are 0 to {local_world_size - 1}"
            )
    idle = [rank for rank in range(local_world_size) if not roles.of(rank)]
    if idle:
        raise ConfigError(f"placement gives local ranks {idle} nothing to do: start fewer, or name them")
    unused = [rank for rank in roles.inference if not roles.samplers_of(rank)]
    if unused:
        raise ConfigError(
            f"placement: no sampling rank would ask the inference ranks {unused} ({len(roles.sampling)} sampling ranks "
            f"for {len(roles.inference)} inference ranks): take fewer inference ranks"
        )


def describe_placement(
    roles: Roles, *, name: str, num_nodes: int, local_world_size: int, weight_bytes: int, gradient_bytes: int
) -> list[str]:
    """Lines for people: which rank does what, and which bytes cross nodes.

    Args:
        roles: Sets of local ranks.
        name: The placement's.
        num_nodes: Nodes, each of `local_world_size` ranks.
        local_world_size: Ranks of a node.
        weight_bytes: Size of one version of the weights.
        gradient_bytes: What each node sends and receives to reduce the gradients of one step.
    """
    mib = 2**20
    lines = [f"placement {name}: {num_nodes} node{'s' * (num_nodes > 1)} of {local_world_size} ranks"]
    for rank in range(local_world_size):
        work = list(roles.of(rank))
        if "sampling" in work and rank not in roles.inference:
            work.append(f"asks {roles.inference_of(rank)}")
        ranks = ", ".join(str(node * local_world_size + rank) for node in range(num_nodes))
        lines.append(f"  rank{'s' * (num_nodes > 1)} {ranks}: {', '.join(work)}")
    if len(roles.sampling) % len(roles.training) and len(roles.training) % len(roles.sampling):
        lines.append(f"  {len(roles.sampling)} sampling ranks feed {len(roles.training)} training ranks in turn")
    if num_nodes == 1:
        lines.append("  one node: nothing crosses a network")
    else:
        lines.append(
            f"  between nodes, per step: weights {(num_nodes - 1) * weight_bytes / mib:.1f} MiB out of all leaders "
            f"together, gradients {gradient_bytes / mib:.1f} MiB in and out of each node; no observations, no actions"
        )
    return lines
