"""``summary.json``: how a run went, in one object that other programs rely on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dvla.telemetry.atomic_file import write_atomically
from dvla.telemetry.lane_names import LANES
from dvla.telemetry.redact import redact

SUMMARY_KEYS = (
    *("run", "exit", "error", "schedule", "placement", "device", "world_size", "nodes", "model", "env"),
    *("policy_version", "episodes", "groups", "groups_dropped", "env_steps_raw", "env_steps_valid"),
    *("wall_s", "env_steps_per_s_raw", "env_steps_per_s_valid", "decisions_per_s"),
    *("success_first", "success_last", "return_first", "return_last", "eval_success_before", "eval_success_after"),
    *("staleness_mean", "staleness_max", "logprob_gap_max"),
    *("weight_syncs", "weight_bytes", "weight_sync_s_mean"),
    *("worker_restarts", "cpu_efficiency", "lanes"),
)
"""Keys every summary has; null where something was not measured."""
LANE_KEYS = ("busy_frac", "wait_s", "items")
"""Keys of each lane under `lanes`."""
EXITS = ("completed", "stopped", "failed")
"""How a run can end."""


def write_summary(path: Path, values: Mapping[str, Any]) -> None:
    """Write a summary, whole or not at all.

    Args:
        path: The file, replaced if it is there.
        values: All of `SUMMARY_KEYS`, more if there is more to say. Lanes may be missing (the run failed
            before they began): their values are null then. Numbers that are not finite become null.

    Raises:
        ValueError: A key is missing, or a value cannot be right.
    """
    if missing := [key for key in SUMMARY_KEYS if key not in values]:
        raise ValueError(f"the summary lacks {', '.join(missing)}")
    if values["exit"] not in EXITS:
        raise ValueError(f"exit must be one of {', '.join(EXITS)}, not {values['exit']!r}")
    lanes = values["lanes"] or {}
    if unknown := set(lanes) - set(LANES):
        raise ValueError(f"there are no lanes {', '.join(sorted(unknown))}")
    ordered = {key: values[key] for key in SUMMARY_KEYS} | dict(values)
    ordered["lanes"] = {lane: {key: (lanes.get(lane) or {}).get(key) for key in LANE_KEYS} for lane in LANES}
    finite = json.loads(json.dumps(ordered), parse_constant=lambda _: None)  # JSON has no word for the others
    write_atomically(path, [redact(json.dumps(finite, indent=1)) + "\n"])
