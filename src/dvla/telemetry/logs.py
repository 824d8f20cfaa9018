"""Logging of one rank: every rank to a file, rank 0 to the terminal too.

A line reads ``HH:MM:SS r03 grpo I message``: time, rank, lane (by the name of its thread), first letter of
the level.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO

from dvla.telemetry.lane_names import lane_of_thread
from dvla.telemetry.redact import redact


class _LaneFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        record.lane = lane_of_thread(record.threadName or "?")
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _CurrentStderr(logging.StreamHandler):
    """Writes to what `sys.stderr` is now: a live view puts itself there, to show lines above its panel."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """The stream of this moment."""
        return sys.stderr


def set_up_logging(rank: int, folder: Path) -> None:
    """Send the log of this process to where it belongs; calling again replaces what was set up before.

    A record with ``extra={"file_only": True}`` is kept from the terminal. Our own loggers report from INFO on,
    those of libraries from WARNING on, and Python's warnings are logged.

    Args:
        rank: Global rank.
        folder: Folder of this attempt, e.g. ``runs/x/logs/attempt_1``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(folder / f"rank{rank:05d}.log", encoding="utf-8")]
    if rank == 0:
        handlers.append(_CurrentStderr())
        handlers[-1].addFilter(lambda record: not getattr(record, "file_only", False))
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler.formatter, _LaneFormatter)]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(
            _LaneFormatter(f"%(asctime)s r{rank:02d} %(lane)s %(levelname).1s %(message)s", "%H:%M:%S")
        )
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("dvla").setLevel(logging.INFO)
    logging.captureWarnings(True)
