"""The lanes of some optimiser steps as a picture: a row per lane and rank, and one for who bounds the step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dvla.telemetry.charts import ticks
from dvla.telemetry.critical_lane import Analysis, LaneOfRank, Segment, lanes_between
from dvla.telemetry.markup import Html, element, join
from dvla.telemetry.spans import Span

_COLUMNS = 4000  # what is shorter than one of them is drawn as one, or merged with its like
_ROW = 26  # pixels
_MAX_RANKS = 8
_MAX_STEPS = 3

_KINDS = {
    "collect": "sampling",
    "decide": "inference",
    **dict.fromkeys(("gradient", "optimise", "value"), "grpo"),
    **dict.fromkeys(("publish", "gather", "hand over", "apply"), "weights"),
    **dict.fromkeys(("checkpoint", "agree"), "between"),
}
"""What a span of work is drawn as; a new version is of one colour on all lanes it passes."""
_LEGEND = {
    "sampling": "sampling: collect",
    "inference": "inference: decide",
    "grpo": "grpo: gradient, optimise",
    "weights": "weights: publish, gather, hand over, apply",
    "between": "other work",
    "simulators": "simulators",
    "waiting": "waits",
}


def swimlanes(spans: Sequence[Span], steps: Sequence[tuple[float, int]], analysis: Analysis) -> Html:
    """Draw the last few of `steps` (see `critical_lane.steps_of`).

    Args:
        spans: Of all lanes and ranks, in order of their start.
        steps: Two or more, of those that were analysed.
        analysis: Says who bounds the steps.
    """
    shown = list(steps)[-_MAX_STEPS - 1 :]
    start_s, end_s = shown[0][0], shown[-1][0]
    lanes = lanes_between(spans, start_s, end_s)
    ranks = sorted({rank for rank, _ in lanes})
    rows = {key: found for key, found in lanes.items() if key[0] in ranks[:_MAX_RANKS]}
    window = _Window(start_s, end_s)
    bounds = [
        (max(a, start_s), min(b, end_s), _bound_class(who), f"{who} bounds the step")
        for a, b, who in analysis.critical
        if b > start_s and a < end_s
    ]
    drawn = [join(*window.row(0, bounds))]
    drawn += [
        join(*window.row(number, [_stretch(segment) for segment in found]))
        for number, found in enumerate(rows.values(), start=1)
    ]
    height = _ROW * (len(rows) + 1)
    marks = [
        element("line", x1=x, x2=x, y1=0, y2=height, class_="step")
        for x in (window.column(when) for when, _ in shown[1:-1])
    ]
    picture = element(
        "svg",
        *drawn,
        *marks,
        viewBox=f"0 0 {_COLUMNS} {height}",
        height=height,
        preserveAspectRatio="none",
        role="img",
        aria_label="what each lane did when",
    )
    middles = [((a[0] + b[0]) / 2, f"step {b[1]}") for a, b in pairwise(shown)]
    labels = [_label(name, len(ranks) > 1) for name in rows]
    legend = [
        element("span", element("i", class_=f"key {kind}"), text)
        for kind, text in _LEGEND.items()
        if f'class="{kind}"' in join(*drawn)
    ]
    hidden = f" The first {_MAX_RANKS} of {len(ranks)} ranks are shown." if len(ranks) > _MAX_RANKS else ""
    return join(
        element(
            "div",
            element("div", element("div", "bounds the step"), *labels, class_="names"),
            element(
                "div",
                element(
                    "div",
                    window.texts(middles),
                    picture,
                    window.time_axis(),
                    class_="timeline",
                ),
                class_="scroll",
            ),
            class_="swimlanes",
        ),
        element("p", *legend, class_="legend"),
        element(
            "p",
            element("label", "wider ", element("input", type="range", class_="zoom", min=1, max=30, value=1)),
            hidden,
            " Pointing at a piece says what it is. The whole trace: traces/ in ui.perfetto.dev.",
            class_="note",
        ),
    )


class _Window:
    """The time that is drawn."""

    def __init__(self, start_s: float, end_s: float) -> None:
        self._start_s, self._seconds = start_s, end_s - start_s

    def column(self, when: float) -> float:
        return round(_COLUMNS * (when - self._start_s) / self._seconds, 1)

    def texts(self, places: Sequence[tuple[float, str]], is_fine: Sequence[bool] | None = None) -> Html:
        """Words above or below the picture, each in the middle of its place; fine ones are left out while it is narrow."""
        spans = [
            element(
                "span",
                text,
                style=f"left:{100 * (when - self._start_s) / self._seconds:.2f}%",
                class_="fine" if fine else None,
            )
            for (when, text), fine in zip(places, is_fine or [False] * len(places), strict=True)
        ]
        return element("div", *spans, class_="places")

    def time_axis(self) -> Html:
        """Times since the first moment; fine ones are for a wide picture."""
        coarse, fine = (ticks(0, self._seconds, most=most)[1:-1] for most in (5, 30))
        words = [(self._start_s + x, f"{1000 * x:.4g} ms") for x in fine]
        return self.texts(words, is_fine=[all(abs(x - y) > 1e-9 for y in coarse) for x in fine])

    def row(self, number: int, stretches: Sequence[tuple[float, float, str, str]]) -> list[Html]:
        """The stretches of one lane (start, end, class, what it is); like ones next to each other become one."""
        merged: list[tuple[float, float, str, str, int]] = []
        for start_s, end_s, kind, title in stretches:
            start, end = self.column(start_s), self.column(end_s)
            if merged and merged[-1][2] == kind and start - merged[-1][1] < 1:
                merged[-1] = (merged[-1][0], end, kind, title, merged[-1][4] + 1)
            elif end - start >= 1 or (kind != "waiting" and not (merged and start - merged[-1][0] < 1)):
                merged.append((start, end, kind, title, 1))
        return [self._rect(number, *one) for one in merged]

    def _rect(self, number: int, start: float, end: float, kind: str, title: str, count: int) -> Html:
        thickness = 4 if kind == "waiting" else _ROW - 8
        ms = 1000 * self._seconds * (end - start) / _COLUMNS
        what = title if count == 1 else f"{title} and {count - 1} like it"
        return element(
            "rect",
            element("title", f"{what}: {ms:.3g} ms"),
            x=start,
            y=number * _ROW + (_ROW - thickness) / 2,
            width=round(max(1.0, end - start), 1),
            height=thickness,
            class_=kind,
        )


def _stretch(segment: Segment) -> tuple[float, float, str, str]:
    start, end, activity, span = segment
    if activity == "idle":
        return start, end, "waiting", "another lane's turn"
    if activity == "waiting" and span is not None:
        return start, end, "waiting", f"waits for {span.name}"
    if span is None:
        return start, end, "between", "work between spans"
    told = ", ".join(f"{name} {value}" for name, value in span.args.items())
    return start, end, _KINDS.get(span.name, "between"), f"{span.name} ({told})" if told else span.name


def _bound_class(who: str) -> str:
    return {"param_dist": "weights", "other": "between"}.get(who, who)


def _label(lane: LaneOfRank, with_rank: bool) -> Html:
    rank, name = lane
    return element("div", name, element("small", f" {rank}") if with_rank else None, title=f"rank {rank}, {name}")
