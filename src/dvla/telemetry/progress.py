"""Progress of work that is counted: one line that is redrawn in a terminal, a line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from dvla.telemetry.figures import duration
from dvla.telemetry.live_view import can_redraw

_REDRAW_S = 0.2
_LINE_S = 20.0


class Progress:
    """Says how much is done, how it goes and how long it will take.

    Args:
        total: Things to do.
        unit: What they are, in the plural.
        enabled: Without, nothing is shown.
        file: Where to; standard output if None.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        *,
        enabled: bool = True,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._unit, self._enabled, self._clock = total, unit, enabled, clock
        self._file = file or sys.stdout
        self._redraws = can_redraw(self._file)
        self._begun = clock()
        self._next = self._begun + (_REDRAW_S if self._redraws else _LINE_S)
        self._shown = ""

    def update(self, done: int, note: str) -> None:
        """Show the state, unless it was shown a moment ago.

        Args:
            done: Things done.
            note: How it goes, e.g. a success rate.
        """
        now = self._clock()
        if self._enabled and (now >= self._next or done == self._total):
            self._next = now + (_REDRAW_S if self._redraws else _LINE_S)
            left = duration((now - self._begun) / done * (self._total - done)) if done else "?"
            text = f"{done}/{self._total} {self._unit}, {note}, {left} left"
            self._write(f"\r{text:<{len(self._shown)}}" if self._redraws else f"{text}\n")
            self._shown = text

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except (OSError, ValueError):  # the terminal is gone: no reason to stop working
            self._enabled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled and self._redraws and self._shown:
            self._write("\n")
