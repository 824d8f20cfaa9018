"""GRPO from scratch on the built-in reach, and the control with shuffled rewards: run ``python perf/reach.py``."""

from __future__ import annotations

from runs import store, train

KEYS = ("policy_version", "episodes", "env_steps_raw", "wall_s", "total_s", "env_steps_per_s_raw", "success_first",
        "success_last", "staleness_max", "logprob_gap_max", "command")  # fmt: skip


def main() -> None:
    """Measure and store."""
    rows = []
    for name, overrides in (("reach", []), ("reach_shuffled", ["env.name=shuffled_reach:ShuffledReach"])):
        for seed in range(3):
            run = train("experiment=reach", f"seed={seed}", *overrides)
            rows.append(
                {"name": name, "seed": seed}
                | {key: run[key] for key in KEYS}
                | {"success": [line["rollout/success_rate"] for line in run["metrics"]]}
            )
    store("reach", rows)


if __name__ == "__main__":
    main()
