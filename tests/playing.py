"""Play evaluation episodes in this process: real workers, the sampling and the inference lane, a policy of the test's own."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from dvla.config import (
    Config,
    EnvConfig,
    EvaluationConfig,
    ModelConfig,
    PlacementConfig,
    RenderConfig,
    RuntimeConfig,
    TelemetryConfig,
)
from dvla.envs.pool import WorkerPool
from dvla.evaluator import play
from dvla.models.policy import Decision
from dvla.planes.semaphore import StopFlag
from dvla.runtime.placement import place
from dvla.runtime.world import World


class KeyedPolicy(nn.Module):
    """Uniform random actions that depend on the decision's key alone; remembers what it has seen.

    The first decision takes `slow_s` seconds.
    """

    def __init__(self, action_dim: int, num_action_chunks: int, slow_s: float = 0.0) -> None:
        super().__init__()
        self.slow_s = slow_s
        self.shape = (num_action_chunks, action_dim)
        self.record_spec: dict = {}
        self.seen: dict[int, bytes] = {}  # key -> digest of what was observed

    def act(self, obs, keys, *, greedy=False):
        assert greedy
        time.sleep(self.slow_s)
        self.slow_s = 0.0
        actions = []
        for row, key in enumerate(keys.tolist()):
            generator = torch.Generator().manual_seed(key % 2**31)
            actions.append(torch.rand(self.shape, generator=generator) * 1.6 - 0.8)
            self.seen[key] = hashlib.blake2b(
                obs.images[row].numpy().tobytes() + obs.state[row].numpy().tobytes()
            ).digest()
        stacked = torch.stack(actions)
        return Decision(stacked, torch.zeros_like(stacked), {})


@dataclass
class Play:
    """What was played."""

    outcomes: list
    restarts: int
    seen: dict = field(default_factory=dict)

    def key(self) -> list[tuple]:
        """The outcomes, in an order that does not depend on who ended when."""
        return sorted((o.task, o.seed, o.success, o.steps, o.reward) for o in self.outcomes)


def make_config(env: EnvConfig, *, episodes: int, num_action_chunks: int = 4, meshes="full", **runtime) -> Config:
    """A config for `play_episodes`."""
    from dvla.config import Meshes

    return Config(
        env=env,
        render=RenderConfig(meshes=Meshes[meshes]),
        model=ModelConfig(num_action_chunks=num_action_chunks),
        evaluation=EvaluationConfig(episodes_per_task=episodes),
        runtime=RuntimeConfig(**({"setup_timeout_s": 120.0} | runtime)),
        telemetry=TelemetryConfig(console=False),
    )


def play_episodes(config: Config, logs: Path, *, rank: int = 0, world_size: int = 1, slow_s: float = 0.0) -> Play:
    """Play this rank's share of the episodes of `config`."""
    runtime = config.runtime
    roles, device = place(PlacementConfig(), world_size), torch.device("cpu")
    groups = (None,) * 6  # nothing here is collective
    world = World(rank, world_size, rank, world_size, device, roles, *groups)  # type: ignore[arg-type]
    with WorkerPool(
        config.env,
        config.render,
        num_envs=runtime.num_envs,
        num_workers=runtime.num_workers,
        logs=logs,
        setup_timeout_s=runtime.setup_timeout_s,
        step_timeout_s=runtime.step_timeout_s,
        title=f"dvla:test:r{rank}",
    ) as pool:
        spec = pool.spec()
        policy = KeyedPolicy(spec.action_dim, config.model.num_action_chunks, slow_s)
        played = play(config, world, spec, pool, policy, 0, StopFlag())
    if played.error is not None:
        raise played.error
    return Play(played.outcomes, played.restarts, policy.seen)
