"""Start training runs the way people do and read their summaries; shared by the benchmarks of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scipy import stats

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
OWN_CLASSES = [str(REPOSITORY / folder) for folder in ("src", "tests", "perf")]


def train(*overrides: str, ranks: int = 2, root: Path | None = None) -> dict:
    """Run ``torchrun … -m dvla.train`` to its end.

    Args:
        overrides: Settings.
        ranks: Processes.
        root: Keeps the run there, as ``bench``; else it is gone afterwards.

    Returns:
        Its summary, with `metrics` (the lines of metrics.jsonl), `spans` (with telemetry.trace=true, the events of the
        traces of all ranks), `command` and `total_s` (start-up included).
    """
    with contextlib.nullcontext(root) if root else tempfile.TemporaryDirectory() as root:
        command = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m", "dvla.train", *overrides]
        begin = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *command[1:], f"run.root={root}", "run.name=bench"],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(OWN_CLASSES)},
            check=True,
            stdout=sys.stderr,
        )
        total_s = time.monotonic() - begin
        folder = Path(root) / "bench"
        summary = json.loads((folder / "summary.json").read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        traces = [json.loads(path.read_text())["traceEvents"] for path in sorted(folder.glob("traces/*"))]
        return summary | {
            "metrics": [json.loads(x) for x in lines],
            "spans": [event for trace in traces for event in trace if event["ph"] == "X"],
            "command": " ".join(command),
            "total_s": total_s,
        }


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of two or more values (Student's t)."""
    return float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5


def machine() -> dict:
    """What this was measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
    }


def store(name: str, rows: list[dict], *, command: str | None = None, runs: Sequence[dict] = ()) -> None:
    """Print rows as JSON lines and keep them as results/NAME.json.

    Args:
        name: Of the script and of the file.
        rows: For tables.
        command: In perf/, if it is more than the script's name.
        runs: What the rows were computed from, kept beside them.
    """
    for row in rows:
        sys.stdout.write(json.dumps({key: value for key, value in row.items() if key != "metrics"}) + "\n")
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": machine(), "command": f"python perf/{command or f'{name}.py'}", "rows": rows}
    if runs:
        content["runs"] = list(runs)
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
