"""Reads traces back."""

from __future__ import annotations

import json
from collections.abc import Iterable
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


def load_spans(path: Path) -> list[Span]:
    """Read the spans of a trace, in order of their start."""
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = []
    for event in events:
        if event["ph"] == "X":
            rank, lane, start_s = event["pid"], lanes[event["pid"], event["tid"]], event["ts"] / 1e6
            spans.append(Span(event["name"], lane, rank, start_s, start_s + event["dur"] / 1e6, event["args"]))
    return sorted(spans, key=lambda span: span.start_s)


def overlap_seconds(spans: Iterable[Span], lane_a: str, lane_b: str) -> float:
    """Time during which both lanes were inside a span, nested and repeated spans counted once.

    The spans are taken as one timeline: pass those of one rank unless ranks together are meant.
    """
    num_open = {lane_a: 0, lane_b: 0}
    edges = []
    for span in spans:
        if span.lane in num_open:
            edges += [(span.start_s, 1, span.lane), (span.end_s, -1, span.lane)]
    total = before = 0.0
    for now, change, lane in sorted(edges):
        if all(num_open.values()):
            total += now - before
        num_open[lane] += change
        before = now
    return total
