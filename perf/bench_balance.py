"""Load-aware balance with one rank made slow: run ``python perf/bench_balance.py``.

Two ranks sample; the simulators of the last rank take `FACTOR` times as long as the others', which sleep for a fixed time in
each control step. `balance.*.gain` is control steps per second with ``runtime.balance=true`` by those without, medians of runs
side by side. The first batches, before anything is measured, are part of it.

By hand: with groups in turns a batch of N groups takes the slow one of R ranks N/R groups of `FACTOR` t each; shared out so
that all end together it takes N t / (R - 1 + 1/FACTOR). The ideal gain is the ratio, FACTOR (R - 1 + 1/FACTOR) / R, while the
learner is quick and N is large; `achieved` is the measured gain by the ideal one.
"""

from __future__ import annotations

import statistics

from runs import store, train

REPEATS = 2
FACTOR = 3
CASES = {  # (ranks, sampling ranks, overrides)
    "colocated": (2, 2, ()),
    "separated": (3, 2, ("placement=separated", "placement.ratio='2:1'")),
}
SETTINGS = (
    "env.name=delayed_env:SlowRankEnv",
    "++env.options.seconds=0.005",
    f"++env.options.factor={FACTOR}",
    "env.max_episode_steps=16",
    "model.num_action_chunks=4",
    "algo.group_size=4",
    "algo.groups_per_step=24",
    "algo.num_steps=8",
    "algo.filter_zero_signal=false",
    "algo.micro_batch_size=512",
    "runtime.num_envs=4",
    "runtime.num_workers=4",
    "telemetry.tensorboard=false",
)


def main() -> None:
    """Measure, print and store."""
    rows = []
    for name, (ranks, samplers, placement) in CASES.items():
        for max_staleness in (0, 1):
            pace: dict[bool, list[float]] = {True: [], False: []}
            moved = 0.0
            for _ in range(REPEATS):
                for balance, paces in pace.items():
                    run = train(
                        *SETTINGS,
                        *placement,
                        f"algo.max_staleness={max_staleness}",
                        f"runtime.balance={str(balance).lower()}",
                        ranks=ranks,
                    )
                    paces.append(run["env_steps_per_s_raw"])
                    moved = max(moved, sum(step["rollout/groups_moved"] for step in run["metrics"]))
            gain = statistics.median(pace[True]) / statistics.median(pace[False])
            ideal = FACTOR * (samplers - 1 + 1 / FACTOR) / samplers
            case = f"balance.{name}.staleness{max_staleness}"
            rows += [
                {"name": f"{case}.gain", "value": gain, "unit": "ratio"},
                {"name": f"{case}.achieved", "value": gain / ideal, "unit": "ratio"},
                {"name": f"{case}.groups_moved", "value": moved, "unit": "groups of a run"},
            ]
    store("bench_balance", rows)


if __name__ == "__main__":
    main()
