"""Numbers as people read them in a terminal: short, of steady width, or as pictures made of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

NOTHING = "-"
"""Stands where there is no number."""

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float | None) -> str:
    """Write a time span as m:ss, or h:mm:ss from an hour on."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def fixed(value: float | None, decimals: int) -> str:
    """Write a number of known size, such as a rate of success."""
    return f"{value:.{decimals}f}" if value is not None and math.isfinite(value) else NOTHING


def short(value: float | None) -> str:
    """Write a number of any size with about three digits, in at most seven characters and a sign."""
    if value is None or not math.isfinite(value):
        return NOTHING
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        return f"{value:.1e}"
    if size < 99.95:
        return f"{value:.3g}"
    if size < 99_999.5:
        return f"{value:.0f}"
    unit, name = next(pair for pair in _UNITS if size >= pair[0] * 0.9995)
    return f"{value / unit:.3g}{name}"


def sparkline(
    values: Sequence[float | None], width: int, *, low: float | None = None, high: float | None = None
) -> str:
    """Draw a curve in one line: the newest values on the right, a long history averaged down to `width` characters.

    Args:
        values: In order of time; what is None or not finite is left out.
        width: Characters there are.
        low: Value of the lowest block; the smallest value if None.
        high: Value of the highest block; the largest value if None.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or width < 1:
        return ""
    if len(known) > width:
        edges = [len(known) * i // width for i in range(width + 1)]
        known = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(known) if low is None else low
    high = max(known) if high is None else high
    if high <= low:
        return _BLOCKS[len(_BLOCKS) // 2 - 1] * len(known)
    shares = [(value - low) / (high - low) for value in known]
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, max(0, int(share * len(_BLOCKS))))] for share in shares)


def bar(share: float | None, width: int) -> tuple[str, str]:
    """Draw a share in [0, 1] as a bar: its filled part and the rest."""
    filled = round(min(1.0, max(0.0, share or 0.0)) * width)
    return "━" * filled, "─" * (width - filled)  # told apart without colour, too
