"""What a run looks like without a terminal: one line per optimiser step, always the same columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TextIO

from dvla.telemetry.figures import duration, fixed, short
from dvla.telemetry.lane_names import LANES
from dvla.telemetry.pace import Pace


def _busy(values: Mapping[str, Any]) -> str:
    shares = [values.get(f"lane/{lane}/busy_frac") for lane in LANES]
    return " ".join("  -" if share is None else f"{100 * share:3.0f}" for share in shares)


_COLUMNS: tuple[tuple[str, int, Callable[[Mapping[str, Any]], str]], ...] = (  # title, width, text
    ("success", 7, lambda values: fixed(values.get("rollout/success_rate"), 3)),
    ("return", 8, lambda values: short(values.get("rollout/return"))),
    ("steps/s", 7, lambda values: short(values.get("perf/env_steps_per_s"))),
    ("loss", 8, lambda values: short(values.get("train/loss"))),
    ("kl", 7, lambda values: short(values.get("train/kl"))),
    ("clip", 5, lambda values: fixed(values.get("train/clip_frac"), 3)),
    ("lp_gap", 7, lambda values: short(values.get("train/logprob_gap"))),
    ("stale", 5, lambda values: fixed(values.get("staleness/mean"), 2)),
    ("drop", 4, lambda values: short(values.get("rollout/groups_dropped"))),
    ("busy% s/i/g/p", 15, _busy),
    ("step_s", 6, lambda values: fixed(values.get("time/step_s"), 1)),
)


class PlainView:
    """Writes lines to a stream."""

    def __init__(self, file: TextIO, clock: Callable[[], float]) -> None:
        self._file, self._clock, self._begin = file, clock, clock()

    def phase(self, text: str) -> None:
        """Say what begins now."""
        self.message(f"[{self._clock() - self._begin:5.1f} s] {text}")

    def training(self, pace: Pace) -> None:
        """Say that optimiser steps begin: the header."""
        titles = "  ".join(f"{title:>{width}}" for title, width, _ in _COLUMNS)
        self.message(f"{'step':>{2 * len(str(pace.total_steps)) + 1}}  {titles}  {'eta':>7}")

    def step(self, pace: Pace, values: Mapping[str, Any]) -> None:
        """Write the line of a step."""
        step = str(pace.policy_version).rjust(len(str(pace.total_steps)))
        cells = "  ".join(f"{text(values):>{width}}" for _, width, text in _COLUMNS)
        self.message(f"{step}/{pace.total_steps}  {cells}  {duration(pace.seconds_left(self._clock())):>7}")

    def message(self, text: str) -> None:
        """Write any text."""
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        self._file.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing is open."""
