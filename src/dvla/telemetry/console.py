"""What a person in front of rank 0 sees of a run: a live panel in a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from dvla.telemetry.figures import duration, fixed, short
from dvla.telemetry.plain_view import PlainView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import TextIO

    from dvla.telemetry.live_view import LiveView

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
        self._file = sys.stdout if file is None else file
        self._view: PlainView | LiveView | None = None
        self._is_training = False
        if not enabled:
            return
        with self._going_quiet():
            if self._file.isatty():
                from dvla.telemetry.live_view import LiveView, can_redraw

                if can_redraw(self._file):
                    self._view = LiveView(self._file, title, total_steps, clock)
            self._view = self._view or PlainView(self._file, total_steps, clock)

    def phase(self, text: str) -> None:
        """Say what begins now, before or between optimiser steps."""
        if self._view:
            with self._going_quiet():
                self._view.phase(text)

    def training(self, policy_version: int) -> None:
        """Say that optimiser steps begin, with so many done before."""
        self._is_training = True
        if self._view:
            with self._going_quiet():
                self._view.training(policy_version)

    def step(self, values: Mapping[str, Any]) -> None:
        """Show an optimiser step: `policy_version`, and values by metric tag."""
        version = int(values["policy_version"])
        if not self._is_training:
            self.training(version - 1)
        if self._view:
            with self._going_quiet():
                self._view.step(version, values)

    def message(self, text: str) -> None:
        """Show a text."""
        if self._view:
            with self._going_quiet():
                self._view.message(text)

    def summary(self, values: Mapping[str, Any], folder: Path) -> None:
        """Say how the run ended, in a few lines; may come after `close`.

        Args:
            values: As in ``summary.json``.
            folder: The run folder.
        """
        if self._view:
            with self._going_quiet():
                self._view.message(summary_text(values, folder))

    def close(self) -> None:
        """Give the terminal back; closing twice does no harm."""
        if self._view:
            with self._going_quiet():
                self._view.close()

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
    if values["error"]:
        lines.append(f"error: {values['error']}")
    changes = [
        f"{label} {fixed(values.get(first), 3)} -> {fixed(values.get(last), 3)}"
        for label, first, last in (
            ("success", "success_first", "success_last"),
            ("return", "return_first", "return_last"),
            ("evaluation", "eval_success_before", "eval_success_after"),
        )
        if values.get(first) is not None and values.get(last) is not None
    ]
    if changes:
        lines.append(", ".join(changes))
    lines.append(f"results: {folder}")
    return "\n".join(lines)
