"""What a person in front of rank 0 sees of a run: a live panel in a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TextIO

from dvla.telemetry.figures import duration, fixed, short
from dvla.telemetry.live_view import LiveView, can_redraw
from dvla.telemetry.pace import Pace
from dvla.telemetry.plain_view import PlainView

logger = logging.getLogger(__name__)


class Console:
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

    def __enter__(self) -> Self:
        return self

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
    ends = {
        label: (values.get(first), values.get(last))
        for label, first, last in (
            ("success", "success_first", "success_last"),
            ("return", "return_first", "return_last"),
            ("evaluation", "eval_success_before", "eval_success_after"),
        )
    }
    changes = [
        f"{label} {fixed(pair[0], 3)} -> {fixed(pair[1], 3)}" for label, pair in ends.items() if None not in pair
    ]
    lines += [", ".join(changes)] if changes else []
    return "\n".join([*lines, f"results: {folder}"])
