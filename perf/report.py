"""Draw RESULTS.md from the measurements in results/: run ``python perf/report.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INTRODUCTION = """# Results

Drawn by `python perf/report.py` from `perf/results/*.json`; each section names the command that measured it. Machines are
noisy: compare ratios within one run, not seconds between runs. What is a property rather than a speed is a test; the last
section says which test holds what.
"""


def number(value: Any) -> str:
    """A value for a table."""
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(map(number, value))
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(number, row)) + " |" for row in rows]) + "\n"


def section(
    title: str,
    name: str,
    head: dict[str, str],
    note: str = "",
    is_shown: Callable[[dict[str, Any]], bool] = lambda row: True,
) -> str:
    """One measurement as a section: a row per row of its file that `is_shown`, a column per key of `head`."""
    path = HERE / "results" / f"{name}.json"
    if not path.exists():
        return f"\n## {title}\n\nNot measured yet: `python perf/{name}.py`.\n"
    data = json.loads(path.read_text())
    machine = data["machine"]
    where = ", ".join(f"{key} {machine[key]}" for key in ("cpu", "cores", "memory_gib", "python", "date", "commit"))
    rows = [[row.get(key) for key in head] for row in data["rows"] if is_shown(row)]
    return f"\n## {title}\n\n`{data['command']}` ({where})\n\n{table(list(head.values()), rows)}{note}"


def runs_of(name: str, head: dict[str, str]) -> str:
    """A row per run that was kept beside the rows of a measurement."""
    path = HERE / "results" / f"{name}.json"
    if not path.exists():
        return ""
    runs = json.loads(path.read_text())["runs"]
    return table(list(head.values()), [[run.get(key) for key in head] for run in runs])


def meshes() -> str:
    """The pictures of light meshes: a row per task."""
    path = HERE / "results" / "meshes.json"
    title = (
        "\n## Light meshes at 128 by 128: CPU-ms of all cameras, and the mean difference of the pictures, of 255\n\n"
    )
    if not path.exists():
        return f"{title}Not measured yet: `python perf/mesh_difference.py`.\n"
    data = json.loads(path.read_text())
    tasks: dict[str, dict[str, Any]] = {}
    for row in data["rows"]:
        task, kind, what = re.fullmatch(r"(.+) (difference|picture) (.+)", row["name"]).groups()
        tasks.setdefault(task, {})[what if kind == "picture" else "difference " + what] = row["value"]
    columns = ["light", "light, no reflections", "full"]
    columns = [column for column in columns if any(column in values for values in tasks.values())]
    rows = []
    for task, values in tasks.items():
        different = "; ".join(f"{key.split()[1]} {value}" for key, value in values.items() if "difference" in key)
        rows.append([task, *(values.get(column) for column in columns), different])
    return f"{title}`{data['command']}`\n\n{table(['task', *columns, 'difference'], rows)}"


def main() -> None:
    """Write RESULTS.md."""
    text = INTRODUCTION
    text += section(
        "Recipes: success on 150 unseen initial states before and after GRPO; `±` is half of a 95 % interval over the seeds",
        "learning",
        {
            "name": "recipe",
            "seeds": "seeds",
            "before": "before",
            "before_ci": "±",
            "after": "after",
            "after_ci": "±",
            "after_lowest": "after, worst seed",
            "total_s": "whole command, slowest, s",
        },
        "\n"
        + runs_of(
            "learning",
            {
                "name": "recipe",
                "seed": "seed",
                "eval_success_before": "before",
                "eval_success_after": "after",
                "episodes": "episodes of GRPO",
                "env_steps_raw": "env steps",
                "wall_s": "GRPO s",
                "total_s": "whole command s",
            },
        ),
    )
    text += section(
        "Reach: GRPO from scratch, sparse reward, MLP; and the same with shuffled rewards",
        "reach",
        {
            "name": "run",
            "seed": "seed",
            "success_first": "success, first 20 %",
            "success_last": "success, last 20 %",
            "episodes": "episodes",
            "wall_s": "training s",
            "total_s": "with start-up s",
            "env_steps_per_s_raw": "env steps/s",
        },
    )
    figures = {"name": "name", "value": "median", "unit": "unit", "all": "all runs"}
    for title, name in (
        ("Simulator and policy that cost next to nothing: GRPO with an MLP, one rank", "bench_mlp"),
        ("Stages that only wait: overlapped beside serial", "bench_stages"),
        ("Where the CPU time of the quickstart goes", "bench_efficiency"),
        ("LIBERO-Spatial: training beside the ceiling of its simulators", "bench_libero"),
    ):
        text += section(title, name, figures, "\nHow it is counted: the script's first lines.\n")
    text += section("Serial against overlapped", "schedules", {"name": "name", "value": "median", "unit": "unit"})
    text += section(
        "Overlap: reach, mean of three seeds; every call of the policy waits so long, as for an accelerator",
        "overlap",
        {
            "wait_ms": "wait ms",
            "schedule": "schedule",
            "success_last": "success, last 20 %",
            "half_width": "±",
            "env_steps_raw": "env steps",
            "wall_s": "training s",
            "vs_serial": "of serial",
        },
    )
    text += section(
        "Staleness: reach, mean of three seeds; `±` is half of a 95 % interval (curves: docs/learning.md)",
        "staleness_reach",
        {
            "schedule": "schedule",
            "objective": "objective",
            "success_last": "success, last 20 %",
            "half_width": "±",
            "staleness_mean": "staleness mean",
            "staleness_max": "staleness max",
            "wall_s": "training s",
        },
    )
    text += section(
        "The sampler beside others' vector environments, its round trip and its overhead",
        "bench_sampler",
        {"name": "name", "value": "value", "unit": "unit"},
    )
    text += section(
        "The weight plane: 256 MB from learner to replica, two ranks of one node",
        "bench_weights",
        {"name": "name", "value": "value", "unit": "unit"},
    )
    text += section(
        "Stages of the hybrid placement beside theory (injected delays), and placements side by side on two cores",
        "bench_placements",
        {"name": "name", "value": "value", "unit": "unit"},
    )
    text += section(
        "Balance: one of two sampling ranks three times slower; `gain` over no balance, `achieved` of the ideal 2.0",
        "bench_balance",
        {"name": "name", "value": "value", "unit": "unit"},
    )
    text += section(
        "The planner: forecasts of runs from one calibration run (injected delays)",
        "planner",
        {
            "name": "setting",
            "ranks": "ranks",
            "measured_s": "batch s",
            "forecast_s": "foretold s",
            "error_frac": "error",
            "measured_per_s": "decisions/s",
            "forecast_per_s": "foretold",
        },
    )
    text += section(
        "The paper's table from stated stage costs, control steps/s (docs/planning.md)",
        "paper_table",
        {
            "system": "system",
            "model": "model",
            "gpus": "GPUs",
            "envs": "envs",
            "published": "published",
            "forecast": "forecast",
            "error_frac": "forecast / published - 1",
            "how": "costs",
        },
    )
    text += section(
        "Scale on paper: GiB of a rank (weights, gradients, optimiser) and, a step, over links (docs/scale.md)",
        "scale",
        {
            "model": "model",
            "ranks": "ranks",
            "copies": "copies",
            "weights_gib": "weights",
            "gradients_gib": "gradients",
            "optimiser_gib": "optimiser",
            "state_gib": "all three",
            "gathered_gib": "gathered",
            "replica_gib": "replica",
            "host_buffers_gib": "host buffers, node",
            "weights_per_node_gib": "weights in, node",
            "reduce_scatter_gib": "reduce-scatter, rank",
            "all_reduce_gib": "all-reduce, rank",
        },
    )
    text += section(
        "500 episodes: does anything grow?",
        "endurance",
        {"name": "name", "after_100": "after 100", "after_500": "after 500"},
    )
    text += section(
        "Whatever dies, whenever: real torchrun, two ranks, reach; a checkpoint at every step",
        "chaos",
        {
            "victim": "killed",
            "moment": "in the middle of",
            "outcome": "the run",
            "seconds": "after s",
            "exit_code": "exit code",
            "error": "error",
            "resumed_from": "next start goes on from version",
        },
        "\nSeconds are from the kill to the end of the last process; of a run that goes on, to its regular end. In every "
        "row: no process and no shared memory left, every complete checkpoint whole afterwards, or retired by newer ones; "
        "the next start completes. Who dies with torchrun's agent is killed by the kernel and can say nothing.\n",
    )
    text += section(
        "Long runs: does anything grow? After a quarter of the steps and at the end; `±` is half of a 95 % interval",
        "soak",
        {
            "name": "process and what it holds",
            "first": "after a quarter",
            "last": "at the end",
            "largest": "largest",
            "per_1000_steps": "growth in 1,000 steps",
            "half_width": "±",
        },
        "\nWhat is not in the table did not change at all after the first quarter: most descriptors, threads, segments "
        "and children. rss: resident memory, MiB; shared: its share of shared memory, MiB; segments: mappings of shared "
        "memory. A worker that films for the first time loads the video codecs (22 MiB). What is left of growth in the "
        "perceptron's ranks is the heap that settles: it becomes less and less.\n",
        # Of processes × kinds most never change.
        is_shown=lambda row: bool(row.get("half_width")) or row["name"].endswith(("samples", "seconds")),
    )
    text += section(
        "200 runs started and stopped in one process, each at another moment",
        "start_stop",
        {
            "name": "what it holds",
            "after_20": "after 20",
            "after_200": "after 200",
            "per_100_cycles": "growth in 100 runs",
            "half_width": "±",
        },
        "\nNo lane, link or buffer of a run is left (`tests/chaos/test_start_stop.py`). heap_mib: what the process "
        "has asked of its heap and not given back; resident memory beyond it is room in between. The number of Python "
        "objects does not grow. What does is torch's and the heap's, and ever less (410 MiB after 120 runs, 411 after 200): "
        "torch keeps something for every thread that ever computed, in tables that double (160 bytes a thread in a program "
        "that does nothing else), and each run has a dozen threads.\n",
    )
    errors = ("ConfigError", "OverrideParseException", "DatasetError", "DamagedMetadataError")
    text += section(
        "Damaged inputs handed to every reader: each is refused with the reader's own error, or taken; none crashes or hangs",
        "fuzz",
        {"target": "reader", "inputs": "inputs", "accepted": "taken"} | {error: error for error in errors},
    )
    text += meshes()
    text += section(
        "The models against recordings of their originals, float32",
        "golden",
        {"name": "what", "tensors": "tensors", "worst": "largest absolute difference", "at": "where"},
        "\nThe tolerance is 1e-4, and 2e-4 for loss elements and samples of 10 steps (the original's clock drifts).\n",
    )
    text += section(
        "Presets: one camera, a LIBERO instruction, chunks of 8 x 7; milliseconds for 8 decisions on one core",
        "models",
        {
            "name": "model",
            "parameters": "parameters",
            "gflop_decision": "GFLOP a decision",
            "gflop_sample": "GFLOP a training sample",
            "mb": "MB of weights that travel, bf16",
            "act_ms": "act ms",
            "train_ms": "forward and backward ms",
        },
    )
    text += section(
        "pi0.5: cameras and prompt tokens that are not there",
        "absent_cameras",
        {"name": "what", "masked_ms": "masked ms", "left_out_ms": "left out ms", "ratio": "ratio"},
    )
    text += section("Set-up and tests", "setup", {"name": "name", "value": "value", "unit": "unit", "note": "note"})
    text += "\n" + (HERE / "properties.md").read_text()
    (HERE / "RESULTS.md").write_text(text)


if __name__ == "__main__":
    main()
