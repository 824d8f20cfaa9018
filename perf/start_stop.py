"""Whether anything is left of runs that were started and stopped: ``python perf/start_stop.py``.

200 runs in one process, one after another, each with workers, four lanes and checkpoints, and each stopped at another
moment: before it begins, while it is set up, in a rollout, a decision, an optimiser step, a weight exchange, a checkpoint,
an evaluation. What the process holds is read after each; the line is fitted to what follows the first 40.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from holdings import KINDS, growth, holdings
from runs import REPOSITORY, store

from dvla.runtime.host_memory import heap_account

sys.path.insert(0, str(REPOSITORY / "tests"))

from in_process import STOPS, stop_at

CYCLES, FIRST, WARM = 200, 20, 40


def heap_mib() -> float:
    """What this process has asked of its heap and not given back; the rest of its resident memory is room in between."""
    heap = heap_account()
    assert heap is not None, "needs glibc 2.33 or newer"
    return (heap.uordblks + heap.hblkhd) / 2**20


def main() -> None:
    """Measure and store."""
    torch.set_num_threads(1)
    held, begin = [], time.monotonic()
    for _, stop in zip(range(CYCLES), itertools.cycle(STOPS.values()), strict=False):
        with tempfile.TemporaryDirectory() as root:
            summary = stop_at(Path(root), *stop)
            assert summary["exit"] == "stopped", summary["error"]
        gc.collect()
        held.append(holdings(psutil.Process()) | {"heap_mib": heap_mib()})
        sys.stderr.write(f"{len(held)} {held[-1]}\n")
    rows = []
    for kind in (*KINDS, "heap_mib"):
        values = [now[kind] for now in held]
        slope, half_width = growth(range(WARM, CYCLES), values[WARM:])
        row = {"name": kind, f"after_{FIRST}": values[FIRST - 1], f"after_{CYCLES}": values[-1]}
        rows.append(row | {"per_100_cycles": slope * 100, "half_width": half_width * 100})
    rows.append({"name": "seconds", f"after_{CYCLES}": time.monotonic() - begin})
    store("start_stop", rows)


if __name__ == "__main__":
    main()
