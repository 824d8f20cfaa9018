"""What a person in front of rank 0 sees of a run: a live panel in a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

from dvla.telemetry.figures import duration, fixed, short
from dvla.telemetry.lane_names import LANES
from dvla.telemetry.live_view import LiveView, can_redraw
from dvla.telemetry.pace import Pace

logger = logging.getLogger(__name__)


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
    """What a run looks like without a terminal: one line per optimiser step, always the same columns."""

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


class Console(AbstractContextManager["Console"]):
    """Shows a run; harmless to call from any lane.

    The view must never be the reason that a run fails: when its stream goes away (a closed pipe, a lost
    connection), it goes quiet. Leaving the ``with`` block, or `close`, gives the terminal back.

    Args:
        enabled: Without, nothing is shown.
        total_steps: Optimiser steps of the whole run.
        title: Shown above the panel.
        file: Where to; standard output if None.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        enabled: bool,
        total_steps: int,
        *,
        title: str = "D-VLA",
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps, self._clock = total_steps, clock
        self._pace: Pace | None = None
        self._view: PlainView | LiveView | None = None
        if enabled:
            with self._going_quiet():
                file = file or sys.stdout
                self._view = LiveView(file, title, clock) if can_redraw(file) else PlainView(file, clock)

    def phase(self, text: str) -> None:
        """Say what begins now, before or between optimiser steps."""
        self._show(lambda view: view.phase(text))

    def training(self, policy_version: int) -> Pace:
        """Say that optimiser steps begin, with so many done before."""
        self._pace = pace = Pace(self._total_steps, policy_version, self._clock())
        self._show(lambda view: view.training(pace))
        return pace

    def step(self, values: Mapping[str, Any]) -> None:
        """Show an optimiser step: `policy_version`, and values by metric tag."""
        version = int(values["policy_version"])
        pace = self._pace or self.training(version - 1)
        pace.step(version, self._clock())
        self._show(lambda view: view.step(pace, values))

    def message(self, text: str) -> None:
        """Say something that stays to be read."""
        self._show(lambda view: view.message(text))

    def summary(self, values: Mapping[str, Any], folder: Path) -> None:
        """Say how the run ended, given what is in ``summary.json``; may come after `close`."""
        self.message(summary_text(values, folder))

    def close(self) -> None:
        """Give the terminal back; closing twice does no harm."""
        self._show(lambda view: view.close())

    def _show(self, what: Callable[[PlainView | LiveView], None]) -> None:
        if self._view:
            with self._going_quiet():
                what(self._view)

    @contextmanager
    def _going_quiet(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._view = None
            logger.warning("no more output on the console: %s", error)

    def __exit__(self, *_: object) -> None:
        self.close()


def summary_text(values: Mapping[str, Any], folder: Path) -> str:
    """Write the gist of a summary."""
    lines = [
        f"{values['exit']}: {values['policy_version']} optimiser steps, {short(values['episodes'])} episodes "
        f"in {duration(values['wall_s'])}, {short(values['env_steps_per_s_raw'])} env steps/s"
    ]
    if values["error"] and values["error"].startswith("rank "):  # what this rank itself met is said elsewhere
        lines.append(f"error: {values['error']}")
    ends = (
        ("success", values.get("success_first"), values.get("success_last")),
        ("return", values.get("return_first"), values.get("return_last")),
        ("evaluation", values.get("eval_success_before"), values.get("eval_success_after")),
    )
    changes = [f"{label} {fixed(a, 3)} -> {fixed(b, 3)}" for label, a, b in ends if None not in (a, b)]
    lines += [", ".join(changes)] if changes else []
    lines += [
        f"warning at steps {warning['first_step']} to {warning['last_step']}: {warning['text']}"
        for warning in values.get("warnings") or ()
    ]
    return "\n".join([*lines, f"results: {folder}"])
