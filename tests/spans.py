"""Measures on spans, independent of the product's own."""

from __future__ import annotations

from collections.abc import Iterable

from dvla.telemetry.spans import Span


def overlap_seconds(spans: Iterable[Span], lane_a: str, lane_b: str) -> float:
    """Time during which both lanes were inside a span of work, nested and repeated spans counted once.

    The spans are taken as one timeline: pass those of one rank unless ranks together are meant.
    """
    num_open = {lane_a: 0, lane_b: 0}
    edges = []
    for span in spans:
        if span.lane in num_open and span.category == "work":
            edges += [(span.start_s, 1, span.lane), (span.end_s, -1, span.lane)]
    total = before = 0.0
    for now, change, lane in sorted(edges):
        if all(num_open.values()):
            total += now - before
        num_open[lane] += change
        before = now
    return total
