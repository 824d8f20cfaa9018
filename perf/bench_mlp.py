"""What is left when simulator and policy cost next to nothing: run ``python perf/bench_mlp.py``.

GRPO with a perceptron of 3 x 256 on one rank: groups of 8, batches of 8 groups, episodes of 80 control steps in chunks of 8,
two optimiser steps a batch; 64 environments with their state, or 16 that also draw a picture of 256 x 256 into the slots,
which this policy has no use for. `env_steps_per_s_raw` counts control steps from the first order to the last optimiser step.
`startup_s` is from torchrun's start to the end of the first optimiser step, its batch included; these runs alone are traced.
"""

from __future__ import annotations

from runs import figure, store, train

REPEATS = 3
SETTINGS = (
    *("env=reach", "env.reward_mode=dense", "env.max_episode_steps=80", "env.terminate_on_success=false", "model=mlp"),
    *("algo.group_size=8", "algo.groups_per_step=8", "algo.update_epochs=2", "algo.micro_batch_size=640"),
    *("algo.logprob_type=chunk", "algo.filter_zero_signal=false", "telemetry.tensorboard=false"),
)
VARIANTS = {
    "grpo_mlp": ("runtime.num_envs=64", "algo.num_steps=160"),
    "grpo_mlp_image": ("runtime.num_envs=16", "algo.num_steps=60", "env.cameras=[top]", "env.image_size=[256,256]"),
}


def startup_s(run: dict) -> float:
    """Seconds until the first optimiser step is over."""
    return min(span["ts"] + span["dur"] for span in run["spans"] if span["name"] == "optimise") / 1e6 - run["begin_s"]


def main() -> None:
    """Measure and store."""
    runs: dict[str, list[dict]] = {name: [] for name in VARIANTS}
    startups = []
    for _ in range(REPEATS):
        for name, overrides in VARIANTS.items():
            runs[name].append(train(*SETTINGS, *overrides, ranks=1))
        startups.append(train(*SETTINGS, "runtime.num_envs=64", "algo.num_steps=2", "telemetry.trace=true", ranks=1))
    rows = [
        figure(f"{name}.env_steps_per_s_raw", [run["env_steps_per_s_raw"] for run in own], "1/s")
        for name, own in runs.items()
    ]
    store("bench_mlp", [*rows, figure("startup_s", [startup_s(run) for run in startups], "s")])


if __name__ == "__main__":
    main()
