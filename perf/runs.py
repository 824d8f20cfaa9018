"""Start training runs the way people do and read their summaries; shared by the benchmarks of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scipy import stats

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(os.environ.get("BENCH_RESULTS", Path(__file__).parent / "results"))
OWN_CLASSES = [str(REPOSITORY / folder) for folder in ("src", "tests", "perf")]


def train(
    *overrides: str, ranks: int = 2, root: Path | None = None, module: str = "dvla.train", **variables: str
) -> dict:
    """Run ``torchrun … -m dvla.train`` to its end.

    Args:
        overrides: Settings.
        ranks: Processes.
        root: Keeps the run there, as ``bench``; else it is gone afterwards.
        module: Its command, or one that calls it.
        variables: Of the environment.

    Returns:
        Its summary, with `metrics` (the lines of metrics.jsonl), `spans` (with telemetry.trace=true, the events of the
        traces of all ranks), `command`, `total_s` (start-up included), `cpu_s` (of all its processes, start-up included)
        and `begin_s` (when it was started, in seconds since 1970).
    """
    with contextlib.nullcontext(root) if root else tempfile.TemporaryDirectory() as root:
        command = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m", module, *overrides]
        begin, begin_s, before = time.monotonic(), time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *command[1:], f"run.root={root}", "run.name=bench"],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(OWN_CLASSES)} | variables,
            check=True,
            stdout=sys.stderr,
        )
        total_s, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        folder = Path(root) / "bench"
        summary = json.loads((folder / "summary.json").read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        traces = [json.loads(path.read_text())["traceEvents"] for path in sorted(folder.glob("traces/*"))]
        return summary | {
            "metrics": [json.loads(x) for x in lines],
            "spans": [event for trace in traces for event in trace if event["ph"] == "X"],
            "command": " ".join(command),
            "total_s": total_s,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "begin_s": begin_s,
        }


def batch_seconds(run: dict, skip: int = 3) -> float:
    """Mean seconds of a batch of a traced run, without the first and the last `skip`."""
    ends = sorted(span["ts"] + span["dur"] for span in run["spans"] if span["name"] == "report" and not span["pid"])
    return (ends[-skip] - ends[skip]) / 1e6 / (len(ends) - 2 * skip)


def figure(name: str, values: Sequence[float], unit: str) -> dict:
    """A row of results: the median, and what it is the median of."""
    return {"name": name, "value": statistics.median(values), "unit": unit, "all": list(values)}


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
