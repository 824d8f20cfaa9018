"""TensorBoard's tab Custom Scalars: the run on one page."""

from __future__ import annotations

from dvla.telemetry.lane_names import LANES

_CHARTS = {
    "success": ["rollout/success_rate", "eval/success_rate"],
    "environment steps per second": ["perf/env_steps_per_s"],
    "lanes: busy share": [f"lane/{lane}/busy_frac" for lane in LANES],
    "staleness in optimiser steps": ["staleness/mean", "staleness/max"],
}
RUN_LAYOUT = {"run": {title: ["Multiline", tags] for title, tags in _CHARTS.items()}}
"""By category, then title: the kind of chart and its tags."""
