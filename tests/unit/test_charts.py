"""Curves show the numbers they are given, however many, and whatever they look like."""

from __future__ import annotations

import math

import pytest
from pages import Page

from dvla.telemetry.charts import MAX_POINTS, Series, line_chart, stacked_chart, thin, ticks
from dvla.telemetry.markup import Html, element, join


def data(chart: Html | None) -> list[dict]:
    (series,) = Page(str(chart)).charts().values()
    return series


def test_text_is_escaped_and_markup_is_not() -> None:
    inner = element("b", "<script>")
    assert element("p", inner, "a & b", None, title='"x"') == (
        "<p title=\"&quot;x&quot;\"><b>&lt;script&gt;</b>a &amp; b</p>"
    )  # fmt: skip
    assert element("line", x1=1, class_="grid", data_x=None) == '<line x1="1" class="grid"></line>'
    assert element("meta", http_equiv="a") == '<meta http-equiv="a">'
    assert isinstance(join("a", inner), Html)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (1, 40, [10, 20, 30, 40]), (-3, 3, [-2, 0, 2]), (2, 2, [2]), (0, 7e-6, None)],
)
def test_ticks_are_round(low: float, high: float, expected: list | None) -> None:
    found = ticks(low, high)
    assert all(low <= tick <= high * (1 + 1e-9) for tick in found)
    assert 1 <= len(found) <= 6
    if expected is not None:
        assert found == pytest.approx(expected)


def test_a_short_curve_keeps_its_points() -> None:
    points = [(1.0, 0.5), (2.0, 0.25), (3.0, 1.0)]
    chart = line_chart("Success", [Series("training", points, "sampling")], low=0, high=1)
    assert data(chart) == [{"name": "training", "points": [[1, 0.5], [2, 0.25], [3, 1]]}]
    (line,) = Page(str(chart)).all("polyline")
    places = [tuple(map(float, pair.split(","))) for pair in line["points"].split()]
    assert places == [(52, 79), (202, 114.5), (352, 8)]  # by hand: the area is 52 to 352, and 8 to 150


def test_ten_thousand_steps_become_few_points_with_a_band() -> None:
    points = [(float(n), float(n % 2)) for n in range(10_000)]
    thinned = thin(points)
    assert len(thinned) == MAX_POINTS
    assert sum(y for _, y, *_ in thinned) / MAX_POINTS == pytest.approx(0.5, abs=0.01)
    assert all((least, most) == (0, 1) for *_, least, most in thinned)
    chart = str(line_chart("x", [Series("y", points, "sampling")]))
    assert len(chart) < 50_000
    assert "band" in chart


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [1e-300, 1e-300], [-1e299, 1e299], [5.0, 5.0]])
def test_odd_values_are_drawn_within_the_picture(values: list[float]) -> None:
    chart = line_chart("x", [Series("y", list(enumerate(values, 1)), "grpo")], low=0)
    for tag in ("circle", "line"):
        for shape in Page(str(chart)).all(tag):
            for name in ("cx", "cy", "x1", "y1"):
                assert math.isfinite(float(shape.get(name, 0)))
                assert 0 <= float(shape.get(name, 0)) <= 360


def test_without_points_there_is_no_chart() -> None:
    assert line_chart("x", [Series("y", [], "grpo")]) is None
    assert stacked_chart("x", [(1, [0, 0])], ["0", "1"]) is None


def test_stacked_shares_add_up() -> None:
    chart = stacked_chart("Staleness", [(1, [3, 1]), (2, [0, 4]), (3, [0, 0])], ["0", "1"])
    assert data(chart) == [{"name": "0", "points": [[1, 0.75], [2, 0]]}, {"name": "1", "points": [[1, 0.25], [2, 1]]}]
    heights = [float(rect["height"]) for rect in Page(str(chart)).all("rect")]
    assert heights == pytest.approx([0.75 * 142, 0.25 * 142, 142], abs=0.2)
    long = stacked_chart("Staleness", [(n, [1, 1]) for n in range(10_000)], ["0", "1"])
    assert len(data(long)[0]["points"]) == 100
