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

from runs import REPOSITORY, RESULTS, store

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
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantiles by the number of values."""


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
    rows = []
    for name in sorted({run["name"] for run in runs}):
        own = [run for run in runs if run["name"] == name]
        row = {"name": name, "seeds": len(own), "total_s": max(run["total_s"] for run in own)}
        for key in ("before", "after"):
            values = [run[f"eval_success_{key}"] for run in own]
            row[key] = statistics.mean(values)
            row[f"{key}_lowest"], row[f"{key}_highest"] = min(values), max(values)
            if len(values) in STUDENT_T:
                row[f"{key}_ci"] = STUDENT_T[len(values)] * statistics.stdev(values) / len(values) ** 0.5
        rows.append(row)
    return rows


def main() -> None:
    """Measure and store."""
    recipe, seeds = sys.argv[1], [int(seed) for seed in sys.argv[2:]] or [0, 1, 2]
    kept = RESULTS / "learning.json"
    runs = json.loads(kept.read_text())["runs"] if kept.exists() else []
    for seed in seeds:
        runs = [run for run in runs if (run["name"], run["seed"]) != (recipe, seed)] + [learn(recipe, seed)]
        runs.sort(key=lambda run: (run["name"], run["seed"]))
        store(
            "learning", means(runs), command="learning.py RECIPE", runs=runs
        )  # every time: nothing is lost if ended early


if __name__ == "__main__":
    main()
