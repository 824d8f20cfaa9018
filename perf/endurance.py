"""Whether anything grows while episodes are played: run ``python perf/endurance.py``.

500 short episodes (a chunk each) of both simulators, two workers, light meshes, new initial states each time, in LIBERO
another task every 10 episodes. Resident memory, file descriptors and threads of the rank and of a worker (the larger of
the two) after the first 100 episodes, by when LIBERO has seen all of its tasks, and after the last.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch
from bench_sampler import NUM_ENVS, Sampler, environment
from runs import store
from sampler_baselines import CHUNK

EPISODES, FIRST = 500, 100
TASKS = {"maniskill": 1, "libero": 10}


def usage(process: psutil.Process) -> dict[str, float]:
    """What a process holds."""
    return {
        "rss_mib": process.memory_info().rss / 2**20,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
    }


def measure(name: str, folder: Path) -> list[dict]:
    """Play, and look twice."""
    rows = []
    with ExitStack() as stack:
        sampler = Sampler(stack, environment(name, CHUNK), "light", NUM_ENVS, folder)
        for episode in range(0, EPISODES, NUM_ENVS):
            if episode == FIRST:
                gc.collect()
                before = look(sampler)
            sampler.seconds(task=episode // 10 % TASKS[name], seed=episode)
        gc.collect()
        for who, after in look(sampler).items():
            rows += [
                {"name": f"{name}.{who}.{what}", "after_100": before[who][what], "after_500": value}
                for what, value in after.items()
            ]
    return rows


def look(sampler: Sampler) -> dict[str, dict[str, float]]:
    """The rank and its workers."""
    workers = [usage(psutil.Process(worker.pid)) for worker in sampler.pool.workers]
    return {
        "rank": usage(psutil.Process()),
        "worker": {what: max(worker[what] for worker in workers) for what in workers[0]},
    }


def main() -> None:
    """Measure and store."""
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        store("endurance", [row for name in TASKS for row in measure(name, Path(folder))])


if __name__ == "__main__":
    main()
