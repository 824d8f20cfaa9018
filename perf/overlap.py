"""What overlap costs and brings: serial beside overlapped, bare and with a policy that waits: run ``python perf/overlap.py``.

experiment=reach on two ranks, three seeds, in turn. Serial is on-policy; overlapped is max_staleness 1 with the decoupled
objective. Where every call of the policy waits, as for an accelerator, simulators and the other calls can go on meanwhile.
A row has the mean success of the last fifth of the batches and of the seconds, with half of the success's 95 % interval.
"""

from __future__ import annotations

import statistics

from runs import half_interval, store, train

SEEDS = 3
SCHEDULES = {
    "serial": ("runtime.schedule=serial", "algo.max_staleness=0"),
    "overlapped": ("algo.max_staleness=1", "algo.objective=decoupled"),
}
WAITS_S = (0.0, 0.01)


def main() -> None:
    """Measure and store."""
    runs: dict[tuple[float, str], list[dict]] = {(wait, how): [] for wait in WAITS_S for how in SCHEDULES}
    for seed in range(SEEDS):
        for wait, how in runs:
            policy = ("model.name=delayed_policy:WaitingPolicy", f"++model.options.seconds={wait}")
            runs[wait, how].append(train("experiment=reach", *policy, *SCHEDULES[how], f"seed={seed}"))
    rows = []
    for (wait, how), own in runs.items():
        success = [run["success_last"] for run in own]
        rows.append(
            {
                "wait_ms": wait * 1000,
                "schedule": how,
                "success_last": statistics.fmean(success),
                "half_width": half_interval(success),
                "env_steps_raw": statistics.fmean(run["env_steps_raw"] for run in own),
                "wall_s": statistics.fmean(run["wall_s"] for run in own),
                "vs_serial": statistics.fmean(run["wall_s"] for run in own)
                / statistics.fmean(run["wall_s"] for run in runs[wait, "serial"]),
            }
        )
    store("overlap", rows)


if __name__ == "__main__":
    main()
