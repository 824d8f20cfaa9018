"""Curves as SVG: no script draws them, so that they are there wherever the page is opened."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dvla.telemetry.figures import short
from dvla.telemetry.markup import Html, element, join

MAX_POINTS = 300
"""Longer curves are averaged down to so many points, with a band from the smallest to the largest value behind them."""

_WIDTH, _HEIGHT = 360, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 352, 8, 150  # the area that is drawn in

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """A curve, or single points."""

    name: str
    points: Sequence[Point]
    """In order of x."""
    style: str
    """CSS class: what colour it has."""
    is_dotted: bool = False
    """Points instead of a line."""


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[tuple[float, float, float, float]]:
    """Average points down to `most`: x, mean, smallest and largest y of each."""
    if len(points) <= most:
        return [(x, y, y, y) for x, y in points]
    edges = [len(points) * i // most for i in range(most + 1)]
    found = []
    for a, b in pairwise(edges):
        xs, ys = zip(*points[a:b], strict=True)
        found.append((sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)))
    return found


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two others, at most so many."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((size * factor for factor in (1, 2, 5) if size * factor >= rough), size * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class _Scale:
    """From numbers to places in the picture."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place_x(self, x: float) -> float:
        low, high = self.x
        return round(_LEFT + (_RIGHT - _LEFT) * ((x - low) / (high - low) if high > low else 0.5), 1)

    def place_y(self, y: float) -> float:
        low, high = self.y
        return round(_BOTTOM - (_BOTTOM - _TOP) * (min(max(y, low), high) - low) / (high - low), 1)

    def axes(self) -> Html:
        """Grid and numbers."""
        lines = [
            join(
                element("line", x1=_LEFT, x2=_RIGHT, y1=self.place_y(y), y2=self.place_y(y), class_="grid"),
                element("text", short(y), x=_LEFT - 5, y=self.place_y(y) + 4, text_anchor="end"),
            )
            for y in ticks(*self.y, most=4)
        ]
        whole = [x for x in ticks(*self.x) if x == round(x)]
        for x in whole:
            place = self.place_x(x)
            at = (_RIGHT, "end") if place > _RIGHT - 15 else (place, "middle")  # not beyond the edge
            lines.append(element("text", short(x), x=at[0], y=_BOTTOM + 15, text_anchor=at[1]))
        return join(*lines)


def line_chart(
    title: str, series: Sequence[Series], *, unit: str = "", low: float | None = None, high: float | None = None
) -> Html | None:
    """Curves over optimiser steps; None if there is no point.

    Args:
        title: What is shown.
        series: Those without points are left out.
        unit: Of y.
        low: Lower end of the y axis, if no point lies below.
        high: Upper end, likewise.
    """
    series = [one for one in series if one.points]
    if not series:
        return None
    ys = [y for one in series for _, y in one.points] + [y for y in (low, high) if y is not None]
    bottom, top = min(ys), max(ys)
    if top - bottom <= 1e-12 * max(abs(top), 1e-300):
        size = abs(top) or 1.0
        bottom, top = bottom - (size / 2 if low is None else 0.0), top + size / 2
    xs = [x for one in series for x, _ in one.points]
    scale = _Scale((min(xs), max(xs)), (bottom, top))
    thinned = [thin(one.points) for one in series]
    drawn = [_draw(one, points, scale) for one, points in zip(series, thinned, strict=True)]
    data = [
        {"name": one.name, "points": [[_digits(x), _digits(y)] for x, y, *_ in points]}
        for one, points in zip(series, thinned, strict=True)
    ]
    legend = [_key(f"{one.name} {short(one.points[-1][1])}", one.style) for one in series]
    return _figure(title, unit, join(scale.axes(), *drawn), legend, series=json.dumps(data), x_range=scale.x)


def _draw(one: Series, points: list[tuple[float, float, float, float]], scale: _Scale) -> Html:
    places = [(scale.place_x(x), scale.place_y(y)) for x, y, *_ in points]
    if one.is_dotted or len(places) == 1:
        return join(*(element("circle", cx=x, cy=y, r=3.5, class_=f"dot {one.style}") for x, y in places))
    line = element("polyline", points=" ".join(f"{x},{y}" for x, y in places), class_=f"line {one.style}")
    if len(points) == len(one.points):
        return line
    upper = [(scale.place_x(x), scale.place_y(most)) for x, _, _, most in points]
    lower = [(scale.place_x(x), scale.place_y(least)) for x, _, least, _ in points]
    band = " ".join(f"{x},{y}" for x, y in [*upper, *reversed(lower)])
    return join(element("polygon", points=band, class_=f"band {one.style}"), line)


def stacked_chart(title: str, columns: Sequence[tuple[float, Sequence[float]]], names: Sequence[str]) -> Html | None:
    """Shares of a whole over optimiser steps, at most a hundred columns; None if there are none.

    Args:
        title: What is shown.
        columns: x, and an amount per name; long series are added up.
        names: Of the parts, the lowest first.
    """
    columns = [column for column in columns if sum(column[1]) > 0]
    if not columns:
        return None
    most = min(len(columns), 100)
    edges = [len(columns) * i // most for i in range(most + 1)]
    summed = [
        (columns[b - 1][0], [sum(amounts) for amounts in zip(*(parts for _, parts in columns[a:b]), strict=True)])
        for a, b in pairwise(edges)
    ]
    scale = _Scale((columns[0][0], columns[-1][0]), (0.0, 1.0))
    width = (_RIGHT - _LEFT) / most
    rects = []
    for number, (_, parts) in enumerate(summed):
        whole, below = sum(parts), 0.0
        for part, amount in enumerate(parts):
            if amount > 0:
                top, base = scale.place_y((below + amount) / whole), scale.place_y(below / whole)
                place = {"x": round(_LEFT + number * width, 1), "y": top, "width": round(width + 0.2, 1)}
                rects.append(element("rect", **place, height=round(base - top, 1), style=_shade(part, len(names))))
            below += amount
    total = [sum(parts) for parts in zip(*(parts for _, parts in summed), strict=True)]
    legend = [
        element("span", element("i", style=_shade(part, len(names), "background")), f"{name} {amount / sum(total):.0%}")
        for part, (name, amount) in enumerate(zip(names, total, strict=True))
        if amount
    ]
    shares = [[x, *(_digits(part / sum(parts)) for part in parts)] for x, parts in summed]
    data = [{"name": name, "points": [[row[0], row[1 + n]] for row in shares]} for n, name in enumerate(names)]
    return _figure(title, "share", join(scale.axes(), *rects), legend, series=json.dumps(data), x_range=scale.x)


def _shade(part: int, whole: int, of: str = "fill") -> str:
    """From the colour of the first part to that of the last."""
    mixed = round(100 * part / max(1, whole - 1))
    return f"{of}:color-mix(in oklab,var(--fresh),var(--stale) {mixed}%)"


def _key(text: str, style: str) -> Html:
    return element("span", element("i", class_=f"key {style}"), text)


def _figure(title: str, unit: str, drawn: Html, legend: list[Html], *, series: str, x_range: Point) -> Html:
    picture = element("svg", drawn, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=title)
    name = element("b", title, element("small", f" {unit}") if unit else None)
    return element(
        "figure",
        element("figcaption", name, element("output")),
        picture,
        element("p", *legend, class_="legend"),
        data_series=series,
        data_area=f"{_LEFT} {_RIGHT} {_TOP} {_BOTTOM} {x_range[0]} {x_range[1]}",
    )


def _digits(value: float) -> float:
    """Six digits are enough to read, and half the size."""
    return float(f"{value:.6g}")
