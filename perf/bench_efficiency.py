"""Where the CPU time of the quickstart goes: run ``python perf/bench_efficiency.py``.

The last part of `make train` (two ranks on two cores; random weights instead of the clone, so that all episodes are of full
length) in the middle of a run. `cpu_efficiency` is the CPU time of simulators, decisions, gradients and optimiser by cores x
wall time, `cpu_overhead` that of everything else in the ranks: lanes, planes, supervision, telemetry. Simulators are the
worker processes, which do little else.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from counted_train import WORK
from runs import figure, store, train

REPEATS = 3
SKIPPED = 2  # batches at either end
SETTINGS = (
    *("experiment=pushcube_oft", "model.checkpoint=null", "run.eval_every=null", "algo.num_steps=16"),
    *("algo.filter_zero_signal=false", "algo.warmup_steps=0"),
)


def shares() -> dict[str, float]:
    """One run: shares of cores x wall time."""
    with tempfile.TemporaryDirectory() as folder:
        train(*SETTINGS, module="counted_train", COUNTS=folder)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    whole, spent = 0.0, dict.fromkeys(("rank", "workers", *WORK), 0.0)
    for batches in ranks:
        first, last = batches[SKIPPED], batches[-1 - SKIPPED]
        whole += (last["now"] - first["now"]) * len(os.sched_getaffinity(0)) / len(ranks)
        for key in spent:
            spent[key] += last[key] - first[key]
    work = sum(spent[key] for key in WORK)
    return {
        "cpu_efficiency": (spent["workers"] + work) / whole,
        "cpu_overhead": (spent["rank"] - work) / whole,
        "cpu_simulators": spent["workers"] / whole,
        "cpu_decisions": spent["decide"] / whole,
        "cpu_learner": (spent["gradient"] + spent["optimise"]) / whole,
    }


def main() -> None:
    """Measure and store."""
    runs = [shares() for _ in range(REPEATS)]
    store("bench_efficiency", [figure(name, [run[name] for run in runs], "share") for name in runs[0]])


if __name__ == "__main__":
    main()
