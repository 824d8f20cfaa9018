"""The quickstart on three seeds: does the return rise, and how long does it take? Run ``python perf/quickstart.py``."""

from __future__ import annotations

from runs import store, train

KEYS = (
    "policy_version", "episodes", "env_steps_raw", "wall_s", "total_s", "env_steps_per_s_raw", "decisions_per_s",
    "return_first", "return_last", "success_first", "success_last", "staleness_max", "logprob_gap_max", "command",
)  # fmt: skip


def main() -> None:
    """Measure and store."""
    rows = []
    for seed in range(3):
        run = train("experiment=quickstart", f"seed={seed}")
        rows.append(
            {"name": "quickstart", "seed": seed}
            | {key: run[key] for key in KEYS}
            | {f"busy.{lane}": use["busy_frac"] for lane, use in run["lanes"].items()}
            | {"returns": [line["rollout/return"] for line in run["metrics"]]}
        )
    store("quickstart", rows)


if __name__ == "__main__":
    main()
