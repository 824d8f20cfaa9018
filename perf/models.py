"""Sizes and costs of all presets: run ``python perf/models.py``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from runs import store

from dvla.config import ModelConfig
from dvla.envs.protocol import EnvSpec
from dvla.models.policy import Observation
from dvla.models.policy_source import prepare_policy
from dvla.plan import PlanConfig, make_plan
from dvla.rl.noise import decision_keys

BATCH, REPEATS = 8, 5


def milliseconds(work: Callable[[], object]) -> float:
    """Median time of `work`."""
    work()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    """Measure and store."""
    torch.set_num_threads(1)
    rows = []
    for name in ("openvla_oft", "pi05"):
        for preset in ("nano", "tiny", "small", "full"):
            model = ModelConfig(name=name, preset=preset)
            plan = make_plan(PlanConfig(model=model))
            row = {
                "name": f"{name} {preset}",
                "parameters": plan.parameters.total,
                "gflop_decision": plan.decision_flops / 1e9,
                "gflop_sample": plan.sample_flops / 1e9,
                "mb": plan.weight_plane_bytes / 1e6,
            }
            if preset in ("nano", "tiny"):
                side = 64
                spec = EnvSpec(
                    name="x", cameras=("a",), image_size=(side, side), state_dim=8, action_dim=7, max_episode_steps=8,
                    instructions=("pick up the cube",),
                )  # fmt: skip
                policy = prepare_policy(model, spec=spec, seed=0).policy
                obs = Observation(
                    images=torch.zeros(BATCH, 1, side, side, 3, dtype=torch.uint8),
                    state=torch.zeros(BATCH, 8),
                    task=torch.zeros(BATCH, dtype=torch.int64),
                )
                keys = decision_keys(0, torch.arange(BATCH), torch.zeros(BATCH, dtype=torch.int64))
                record = policy.act(obs, keys).record
                row["act_ms"] = milliseconds(lambda p=policy, o=obs, k=keys: p.act(o, k))
                row["train_ms"] = milliseconds(lambda p=policy, o=obs, r=record: p(o, r)[0].sum().backward())
            rows.append(row)
    store("models", rows)


if __name__ == "__main__":
    main()
