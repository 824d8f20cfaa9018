"""A recipe (launch/recipe.sh) on several seeds, all of it each time: run ``python perf/learning.py RECIPE [SEED …]``.

Kept are success before and after on 150 initial states that training does not see, decoded as the recipe says, every curve,
and the seconds of the whole command: demonstrations, behaviour cloning, reinforcement learning, evaluations, videos. What
other recipes and seeds left in results/learning.json stays. Means come with half the width of their 95 % interval (Student's).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib import pyplot as plt
from runs import REPOSITORY, RESULTS, half_interval, store

CURVE = (
    "policy_version", "env_steps", "time/step_s", "rollout/success_rate", "rollout/episode_len",
    "rollout/zero_signal_frac", "train/entropy", "train/kl", "train/clip_frac", "staleness/mean",
)  # fmt: skip
KEYS = (
    "eval_success_before",
    "eval_success_after",
    "episodes",
    "env_steps_raw",
    "wall_s",
    "staleness_mean",
    "warnings",
)
SMOOTHED = 10
"""Batches that a drawn line averages."""


def learn(recipe: str, seed: int) -> dict:
    """Run it once; what came of it."""
    with tempfile.TemporaryDirectory() as root:
        begin = time.monotonic()
        subprocess.run(
            ["launch/recipe.sh", recipe],
            cwd=REPOSITORY,
            env=os.environ | {"ROOT": root, "SEED": str(seed)},
            check=True,
            stdout=sys.stderr,
        )
        total_s = time.monotonic() - begin
        run = Path(root) / "runs" / recipe
        summary = json.loads((run / "summary.json").read_text())
        lines, rounds = (
            [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
            for name in ("metrics", "evaluations")
        )
        return (
            {"name": recipe, "seed": seed, "total_s": total_s}
            | {key: summary[key] for key in KEYS}
            | {"curve": {tag: [line.get(tag) for line in lines] for tag in CURVE}}
            | {"evaluations": {line["policy_version"]: line["eval/success_rate"] for line in rounds}}
            | {"command": f"SEED={seed} launch/recipe.sh {recipe}"}
        )


def means(runs: list[dict]) -> list[dict]:
    """One row a recipe: mean and half interval over its seeds, and the worst."""
    rows: list[dict] = []
    for name in sorted({run["name"] for run in runs}):
        own = [run for run in runs if run["name"] == name]
        row = {"name": name, "seeds": len(own), "total_s": max(run["total_s"] for run in own)}
        for key in ("before", "after"):
            values = [run[f"eval_success_{key}"] for run in own]
            row[key] = statistics.mean(values)
            row[f"{key}_lowest"], row[f"{key}_highest"] = min(values), max(values)
            row[f"{key}_ci"] = half_interval(values) if len(values) > 1 else None
        rows.append(row)
    return rows


def draw(runs: list[dict]) -> None:
    """A panel a recipe, a colour a seed: success of sampled episodes, and of the evaluations, against environment steps."""
    recipes = sorted({run["name"] for run in runs})
    figure, panels = plt.subplots(
        1, len(recipes), figsize=(5 * len(recipes), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, recipe in zip(panels[0], recipes, strict=True):
        for run in (run for run in runs if run["name"] == recipe):
            steps, success = run["curve"]["env_steps"], run["curve"]["rollout/success_rate"]
            smooth = [statistics.fmean(success[max(0, n - SMOOTHED + 1) : n + 1]) for n in range(len(success))]
            (line,) = panel.plot(steps, smooth, linewidth=1.2, label=f"seed {run['seed']}")
            by_version = dict(zip(run["curve"]["policy_version"], steps, strict=True)) | {0: 0}
            rounds = {by_version[int(version)]: rate for version, rate in run["evaluations"].items()}
            panel.plot(*zip(*sorted(rounds.items()), strict=True), "o", color=line.get_color())
        panel.set(title=recipe, xlabel="environment steps", ylim=(0, 1))
        panel.legend(fontsize="small", loc="lower right")
    panels[0][0].set_ylabel("success")
    figure.suptitle(f"line: sampled, last {SMOOTHED} batches; dots: evaluated", fontsize="small")
    figure.savefig(REPOSITORY / "docs/learning.svg", metadata={"Date": None})


def main() -> None:
    """Measure and store."""
    recipe, seeds = sys.argv[1], [int(seed) for seed in sys.argv[2:]] or [0, 1, 2]
    kept = RESULTS / "learning.json"
    runs = json.loads(kept.read_text())["runs"] if kept.exists() else []
    for seed in seeds:
        runs = [run for run in runs if (run["name"], run["seed"]) != (recipe, seed)] + [learn(recipe, seed)]
        runs.sort(key=lambda run: (run["name"], run["seed"]))
        # Every time: nothing is lost when it is ended early.
        store("learning", means(runs), command="learning.py RECIPE", runs=runs)
        draw(runs)


if __name__ == "__main__":
    main()
