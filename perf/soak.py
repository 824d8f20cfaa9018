"""Whether anything grows in a long run: ``python perf/soak.py [POLICY ...]``.

The built-in reach from pictures, two ranks, two workers each, with checkpoints of which two are kept, evaluations with
videos, and TensorBoard: 2,000 optimiser steps of a nano VLA, and 6,000 of a small perceptron. Every process of the run is
looked at from outside every 10 steps. A line is fitted to all samples but those of the first quarter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from holdings import KINDS, growth, holdings
from runs import REPOSITORY, RESULTS, store

EVERY = 10
COMMON = (
    *("env=reach", "env.cameras=[top]", "env.image_size=[32,32]", "env.max_episode_steps=8"),
    *("runtime.num_envs=4", "runtime.num_workers=2", "algo.filter_zero_signal=false"),
    *("algo.group_size=2", "algo.groups_per_step=2"),
    *("run.checkpoint_every=50", "run.keep_checkpoints=2", "run.eval_every=100"),
    *("evaluation.episodes_per_task=8", "evaluation.videos_per_task=1", "telemetry.console=false"),
)
POLICIES = {
    "mlp": (6000, "model=mlp", "model.preset=nano"),
    "openvla_oft": (2000, "model=openvla_oft_nano", "++model.options.image_size=32"),
}


def processes_of(agent: psutil.Process) -> dict[str, psutil.Process]:
    """The agent, ranks and workers of a run by name."""
    named = {"agent": agent}
    for process in agent.children(recursive=True):
        words = process.cmdline()
        if words and words[0].startswith("dvla:"):
            named[words[0].removeprefix("dvla:")] = process
    return named


def soak(num_steps: int, *overrides: str) -> tuple[dict[str, dict[str, list[float]]], list[int], float]:
    """Run to the end; what each process held by kind, at which steps, and the seconds it took."""
    with tempfile.TemporaryDirectory() as root:
        metrics = Path(root) / "soak" / "metrics.jsonl"
        begin = time.monotonic()
        run = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "dvla.train",
             *COMMON, *overrides, f"algo.num_steps={num_steps}", f"run.root={root}", "run.name=soak"],
            cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=sys.stderr,
        )  # fmt: skip
        try:
            held: dict[str, dict[str, list[float]]] = {}
            steps: list[int] = []
            while run.poll() is None:
                step = metrics.read_text().count("\n") if metrics.exists() else 0
                # Not the last ones: then processes are on their way out.
                if step >= (steps[-1] if steps else 0) + EVERY and step < num_steps - 5 * EVERY:
                    now = {name: holdings(p) for name, p in processes_of(psutil.Process(run.pid)).items()}
                    steps.append(step)
                    for name, values in now.items():
                        for kind in KINDS:
                            held.setdefault(name, {}).setdefault(kind, []).append(values[kind])
                time.sleep(0.1)
            assert run.returncode == 0, f"the run ended with {run.returncode}"
            assert {len(series) for kinds in held.values() for series in kinds.values()} == {len(steps)}, (
                "who came late?"
            )
            return held, steps, time.monotonic() - begin
        finally:
            run.kill()


def main() -> None:
    """Measure and store."""
    wanted, path = sys.argv[1:] or list(POLICIES), RESULTS / "soak.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in rows if row["name"].split(".")[0] not in wanted]
    for policy in wanted:
        held, steps, seconds = soak(*POLICIES[policy])
        warm = next(index for index, step in enumerate(steps) if step >= POLICIES[policy][0] // 4)
        for process, kinds in held.items():
            for kind, values in kinds.items():
                slope, half_width = growth(steps[warm:], values[warm:])
                rows.append(
                    {
                        "name": f"{policy}.{process}.{kind}",
                        "first": values[warm],
                        "last": values[-1],
                        "largest": max(values[warm:]),
                        "per_1000_steps": slope * 1000,
                        "half_width": half_width * 1000,
                    }
                )
        rows.append({"name": f"{policy}.samples", "last": len(steps)})
        rows.append({"name": f"{policy}.seconds", "last": seconds})
    store("soak", rows)


if __name__ == "__main__":
    main()
