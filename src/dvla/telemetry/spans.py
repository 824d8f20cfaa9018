"""Reads the traces of a run back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """A span read back; times in seconds since 1970, good to about a quarter of a microsecond."""

    name: str
    lane: str
    rank: int
    start_s: float
    end_s: float
    args: dict[str, Any]
    category: str = "work"
    """`work`, `wait` or `turn`, see `dvla.telemetry.trace`."""


def read_spans(path: Path) -> list[Span]:
    """Read the spans of a trace, in order of their start.

    Raises:
        ValueError: The file is no trace.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        lanes = {(x["pid"], x["tid"]): str(x["args"]["name"]) for x in events if x["name"] == "thread_name"}
        spans = []
        for event in events:
            if event["ph"] == "X":
                rank, start_s = int(event["pid"]), event["ts"] / 1e6
                lane, end_s = lanes[event["pid"], event["tid"]], start_s + event["dur"] / 1e6
                spans.append(Span(str(event["name"]), lane, rank, start_s, end_s, dict(event["args"]), event["cat"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no trace of D-VLA ({type(error).__name__}: {error})") from error
    return sorted(spans, key=lambda span: span.start_s)
