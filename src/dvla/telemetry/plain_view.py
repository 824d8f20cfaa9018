"""What a run looks like without a terminal: one line per optimiser step, always the same columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dvla.telemetry.figures import duration, fixed, short
from dvla.telemetry.lane_names import LANES
from dvla.telemetry.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

_SECONDS = 8  # width of the elapsed time


class _Column(NamedTuple):
    title: str
    width: int
    text: Callable[[Mapping[str, Any]], str]


def _busy(values: Mapping[str, Any]) -> str:
    shares = [values.get(f"lane/{lane}/busy_frac") for lane in LANES]
    return " ".join("  -" if share is None else f"{100 * share:3.0f}" for share in shares)


_COLUMNS = (
    _Column("success", 7, lambda values: fixed(values.get("rollout/success_rate"), 3)),
    _Column("return", 8, lambda values: short(values.get("rollout/return"))),
    _Column("steps/s", 7, lambda values: short(values.get("perf/env_steps_per_s"))),
    _Column("loss", 8, lambda values: short(values.get("train/loss"))),
    _Column("kl", 7, lambda values: short(values.get("train/kl"))),
    _Column("clip", 5, lambda values: fixed(values.get("train/clip_frac"), 3)),
    _Column("lp_gap", 7, lambda values: short(values.get("train/logprob_gap"))),
    _Column("stale", 5, lambda values: fixed(values.get("staleness/mean"), 2)),
    _Column("drop", 4, lambda values: short(values.get("rollout/groups_dropped"))),
    _Column("busy% s/i/g/p", 15, _busy),
    _Column("step_s", 6, lambda values: fixed(values.get("time/step_s"), 1)),
)


class PlainView:
    """Writes lines to a stream.

    Args:
        file: Where to.
        total_steps: Optimiser steps of the whole run.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, file: TextIO, total_steps: int, clock: Callable[[], float]) -> None:
        self._file, self._total_steps, self._clock = file, total_steps, clock
        self._begin = clock()
        self._pace: Pace | None = None
        self._width = len(str(total_steps))

    def phase(self, text: str) -> None:
        """Say what begins now."""
        self.message(f"[{self._clock() - self._begin:{_SECONDS - 3}.1f} s] {text}")

    def training(self, policy_version: int) -> None:
        """Say that optimiser steps begin: the header."""
        self._pace = Pace(self._total_steps, policy_version, self._clock())
        titles = "  ".join(f"{column.title:>{column.width}}" for column in _COLUMNS)
        self.message(f"{'step':>{2 * self._width + 1}}  {titles}  {'eta':>7}")

    def step(self, policy_version: int, values: Mapping[str, Any]) -> None:
        """Write the line of a step."""
        now = self._clock()
        assert self._pace is not None
        self._pace.step(policy_version, now)
        cells = "  ".join(f"{column.text(values):>{column.width}}" for column in _COLUMNS)
        eta = duration(self._pace.seconds_left(now))
        self.message(f"{policy_version:{self._width}d}/{self._total_steps}  {cells}  {eta:>7}")

    def message(self, text: str) -> None:
        """Write any text."""
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        self._file.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing is open."""
