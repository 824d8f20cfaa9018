"""What asynchrony costs: learning with data of every allowed age, plain clip or decoupled, beside the serial run.

``python perf/staleness.py`` takes experiment=reach: three seeds of twelve settings, some ten minutes on two cores.
``python perf/staleness.py NAME [key=value …]`` takes another experiment.

Each run keeps its curve: success of sampled episodes against environment steps and seconds. For each setting there is a row
with the mean over the seeds of the success in the last fifth of the run, and half the width of its 95 % interval (Student's
t). The curves are drawn in docs/.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from matplotlib import pyplot as plt
from runs import REPOSITORY, half_interval, store, train

SEEDS = 3
AGES = (0, 1, 2, 4, 8)
OBJECTIVES = {
    "clip": ["algo.objective=clip", "algo.behavior_ratio_cap=null"],
    "decoupled": ["algo.objective=decoupled"],
}
CURVE = ("env_steps", "time/step_s", "rollout/success_rate")
SCALARS = ("success_last", "staleness_mean", "staleness_max", "env_steps_raw", "wall_s")


def settings() -> dict[tuple[str, str], list[str]]:
    """Overrides by schedule and objective."""
    schedules = {"serial": ["runtime.schedule=serial", "algo.max_staleness=0"]}
    schedules |= {f"max_staleness {age}": [f"algo.max_staleness={age}"] for age in AGES}
    return {
        (schedule, objective): [*how, *overrides]
        for schedule, how in schedules.items()
        for objective, overrides in OBJECTIVES.items()
    }


def means(runs: list[dict]) -> list[dict]:
    """A row per setting."""
    rows = []
    for schedule, objective in settings():
        own = [run for run in runs if (run["schedule"], run["objective"]) == (schedule, objective)]
        if len(own) < SEEDS:
            continue
        mean: dict[str, Any] = {key: statistics.fmean(run[key] for run in own) for key in SCALARS}
        half = half_interval([run["success_last"] for run in own])
        rows.append({"schedule": schedule, "objective": objective, **mean, "half_width": half})
    return rows


def draw(experiment: str, runs: list[dict]) -> None:
    """Success against environment steps, mean over the seeds: a panel per objective."""
    figure, panels = plt.subplots(1, len(OBJECTIVES), figsize=(10, 4), sharey=True, layout="constrained")
    for panel, objective in zip(panels, OBJECTIVES, strict=True):
        for schedule in dict.fromkeys(schedule for schedule, _ in settings()):
            own = [r["curve"] for r in runs if (r["schedule"], r["objective"]) == (schedule, objective)]
            x, y = (
                [statistics.fmean(values) for values in zip(*(curve[tag] for curve in own), strict=False)]
                for tag in ("env_steps", "rollout/success_rate")
            )
            panel.plot(x, y, label=schedule, color="black" if schedule == "serial" else None, linewidth=1.2)
        panel.set(title=objective, xlabel="environment steps")
    figure.suptitle(f"{experiment}, mean of {SEEDS} seeds")
    panels[0].set_ylabel("success of sampled episodes")
    panels[0].legend(fontsize="small")
    figure.savefig(REPOSITORY / "docs" / f"staleness_{experiment}.svg", metadata={"Date": None})


def main() -> None:
    """Measure, store and draw."""
    experiment, *overrides = sys.argv[1:] or ["reach"]
    runs: list[dict] = []
    for seed in range(SEEDS):
        for (schedule, objective), own in settings().items():
            run = train(f"experiment={experiment}", *own, *overrides, f"seed={seed}")
            runs.append(
                {"schedule": schedule, "objective": objective, "seed": seed, "command": run["command"]}
                | {key: run[key] for key in SCALARS}
                | {"curve": {tag: [round(line[tag], 4) for line in run["metrics"]] for tag in CURVE}}
            )
            # After every run: nothing is lost when it is ended early.
            command = " ".join(["staleness.py", *sys.argv[1:]])
            store(f"staleness_{experiment}", means(runs), command=command, runs=runs)
    draw(experiment, runs)


if __name__ == "__main__":
    main()
