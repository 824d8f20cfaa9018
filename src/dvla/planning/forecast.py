"""What a run will do in a setting: seconds of a batch, steps a second, idle lanes; pure, from a `Profile`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dvla.config import Algorithm, ConfigError, WeightApplication
from dvla.planning.footprint import Footprint, footprint
from dvla.planning.node_model import Node
from dvla.runtime.placement import place

if TYPE_CHECKING:
    from dvla.config import Config
    from dvla.planning.profile import Profile

_MEASURED_BATCHES = 8
_MEASURED_EPISODES = 600
"""At least so many of each: the mean length of episodes, drawn at random, must be that of the profile."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a setting gives."""

    step_s: float
    """Seconds of a batch."""
    env_steps_per_s: float
    """Control steps of all nodes."""
    decisions_per_s: float
    groups_trained_per_s: float
    bubbles: dict[str, float]
    """Share of the time that each lane (mean over those of its kind), and `simulators`, do nothing."""
    staleness_mean: float
    """Optimiser steps."""
    staleness_max: float
    """Of a group's mean."""
    footprint: Footprint


def forecast(config: Config, profile: Profile, *, num_nodes: int, ranks_per_node: int) -> Forecast:
    """Play batches until the lanes have found their rhythm, and measure the next ones.

    Raises:
        ConfigError: The setting cannot work, or is not modelled.
    """
    if config.algo.name is not Algorithm.grpo:
        raise ConfigError("algo.name=ppo: plans know GRPO only")
    if config.runtime.apply_weights is not WeightApplication.between_batches:
        raise ConfigError("runtime.apply_weights=between_groups: plans know between_batches only")
    if profile.is_batch_simulator and config.placement.stages is not None:
        raise ConfigError(
            "placement.stages: a batch simulator steps all environments together, it cannot move in parts"
        )
    roles = place(config.placement, ranks_per_node)
    needs = footprint(config, profile, roles, num_nodes=num_nodes)
    if num_nodes > 1 and profile.network_gb_per_s is not None:
        per_s = profile.network_gb_per_s * 1e9
        profile = replace(
            profile,
            optimise_s=profile.optimise_s + needs.gradient_bytes_per_node / per_s,
            transfer_s=profile.transfer_s + needs.weight_bytes_per_node / per_s,
        )
    node = Node(config, profile, roles, num_nodes)
    first = 2 + config.algo.max_staleness
    node.run(first)
    begin, busy, counts = node.kernel.now, dict(node.busy_s), Counter(node.counts)
    node.staleness_max = 0.0
    episodes_per_batch = config.algo.groups_per_step * config.algo.group_size // num_nodes
    num_batches = max(_MEASURED_BATCHES, -(-_MEASURED_EPISODES // episodes_per_batch))
    node.run(num_batches)
    seconds = node.kernel.now - begin
    if seconds <= 0:
        raise ConfigError("profile: all costs are 0, so there is nothing to plan")
    counts = node.counts - counts
    has_workers = not profile.is_batch_simulator
    num = {
        "simulators": len(roles.sampling) * (config.runtime.num_workers if has_workers else 1),
        "sampling": len(roles.sampling),
        "inference": len(roles.inference),
        "grpo": len(roles.training),
        "param_dist": len(roles.training) if node.is_serial else 1,
    }
    decisions_per_s = num_nodes * counts["decisions"] / seconds
    return Forecast(
        step_s=seconds / num_batches,
        env_steps_per_s=decisions_per_s * profile.steps_per_decision,
        decisions_per_s=decisions_per_s,
        groups_trained_per_s=config.algo.groups_per_step * num_batches / seconds,
        bubbles={
            name: max(0.0, 1 - (node.busy_s[name] - busy.get(name, 0.0)) / (count * seconds))
            for name, count in num.items()
        },
        staleness_mean=counts["staleness"] / counts["trained_decisions"],
        staleness_max=math.ceil(node.staleness_max - 1e-9),
        footprint=needs,
    )
