"""Logging of one rank: every rank to a file, rank 0 to the terminal too.

A line reads ``HH:MM:SS r03 grpo I message``: time, rank, lane (by the name of its thread), first letter of
the level.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from dvla.telemetry.lane_names import lane_of_thread

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

_PACKAGE = "dvla"
_HANDLER_PREFIX = "dvla-"


class LaneFormatter(logging.Formatter):
    """Formats records of one rank, tracebacks included."""

    def __init__(self, rank: int) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")
        self._rank = rank

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """Put the prefix before the message."""
        lane = lane_of_thread(record.threadName or "?")
        return f"{record.asctime} r{self._rank:02d} {lane} {record.levelname[0]} {record.message}"


class _CurrentStderr(logging.StreamHandler):
    """Writes to what `sys.stderr` is now: a live view puts itself there, to show lines above its panel."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """The stream of this moment."""
        return sys.stderr


def set_up_logging(rank: int, folder: Path, *, level: int = logging.INFO) -> None:
    """Send the log of this process to where it belongs; calling again replaces what was set up before.

    A record with ``extra={"file_only": True}`` is kept from the terminal. Our own loggers report from `level` on,
    those of libraries from WARNING on, and Python's warnings are
    logged.

    Args:
        rank: Global rank.
        folder: Folder of this attempt, e.g. ``runs/x/logs/attempt_1``.
        level: Lowest level of our own loggers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(folder / f"rank{rank:05d}.log", encoding="utf-8")]
    if rank == 0:
        terminal = _CurrentStderr()
        terminal.addFilter(lambda record: not getattr(record, "file_only", False))
        handlers.append(terminal)
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if (handler.name or "").startswith(_HANDLER_PREFIX)]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.name = _HANDLER_PREFIX + type(handler).__name__
        handler.setFormatter(LaneFormatter(rank))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(_PACKAGE).setLevel(level)
    logging.captureWarnings(True)
