"""Forecasts beside real runs: run ``python perf/planner.py``.

One run calibrates: one rank that does everything. From its profile `dvla.planning` foretells the seconds of a batch in other
settings, which are then run. Simulators and policy wait in their calls, as for hardware of their own, so ranks are no rivals
for the cores. `error_frac` is the difference of these seconds by what was measured; means over batches in the middle of a run.
Episodes last 3 to 12 decisions, drawn anew in every run, which alone makes runs differ by some per cent: decisions a second,
which are told beside, differ less.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from omegaconf import OmegaConf
from runs import store, train

from dvla.config import Config, load_as, to_plain
from dvla.planning.calibration import calibrate
from dvla.planning.forecast import forecast

NUM_STEPS = 40
BASE = (
    *("env.name=delayed_env:DelayedEnv", "env.max_episode_steps=48", "++env.options.shortest=12"),
    *("++env.options.seconds=0.005", "model.name=delayed_policy:WaitingPolicy", "++model.options.seconds=0.02"),
    *("model.num_action_chunks=4", "algo.group_size=4", "algo.groups_per_step=4", "algo.filter_zero_signal=false"),
    *(f"algo.num_steps={NUM_STEPS}", "algo.micro_batch_size=16", "runtime.num_envs=8", "runtime.num_workers=4"),
    "runtime.balance=false",  # its trials with fewer environments are not foretold
    *("telemetry.trace=true", "telemetry.tensorboard=false", "run.checkpoint_every=1000"),
)
SETTINGS: dict[str, tuple[int, tuple[str, ...]]] = {
    "calibration": (1, ()),
    "serial": (1, ("runtime.schedule=serial", "algo.max_staleness=0")),
    "on_policy": (1, ("algo.max_staleness=0",)),
    "envs_16": (1, ("runtime.num_envs=16",)),
    "micro_batch_64": (1, ("algo.micro_batch_size=64",)),
    "groups_8": (1, ("algo.groups_per_step=8",)),
    "colocated_2": (2, ()),
    "separated": (2, ("placement.name=separated",)),
    "hybrid_stages_2": (3, ("placement.name=hybrid", "placement.ratio='1:1:1'", "placement.stages=2")),
}
"""Ranks, and what differs from `BASE`."""


def measured(run: dict) -> tuple[float, float]:
    """Mean seconds of a batch, without the first and the last ones, and decisions a second in that time."""
    ends = sorted(span["ts"] + span["dur"] for span in run["spans"] if span["name"] == "report" and not span["pid"])
    begin, end = ends[3], ends[-3]
    decided = (span for span in run["spans"] if span["name"] == "decide" and begin <= span["ts"] < end)
    seconds = (end - begin) / 1e6
    return seconds / (len(ends) - 6), sum(span["args"]["size"] for span in decided) / seconds


def main() -> None:
    """Measure, foretell and store."""
    rows, calibration = [], None
    for name, (ranks, overrides) in SETTINGS.items():
        with tempfile.TemporaryDirectory() as root:
            run = train(*BASE, *overrides, ranks=ranks, root=Path(root))
            if calibration is None:
                calibration = calibrate([f"{root}/bench"])
                sys.stderr.write(f"{calibration.profile}\n")
        changes = OmegaConf.from_dotlist(list(overrides))
        config = load_as(Config, OmegaConf.merge(to_plain(calibration.config), changes))
        told = forecast(config, calibration.profile, num_nodes=1, ranks_per_node=ranks)
        step_s, decisions_per_s = measured(run)
        rows.append(
            {
                "name": name,
                "ranks": ranks,
                "measured_s": step_s,
                "forecast_s": told.step_s,
                "error_frac": abs(told.step_s / step_s - 1),
                "measured_per_s": decisions_per_s,
                "forecast_per_s": told.decisions_per_s,
            }
        )
        sys.stderr.write(f"{rows[-1]}\n")
    errors = [row["error_frac"] for row in rows[1:]]
    rows.append({"name": "planner.error_frac, mean", "error_frac": statistics.fmean(errors)})
    rows.append({"name": "planner.error_frac", "error_frac": max(errors)})
    store("planner", rows)


if __name__ == "__main__":
    main()
