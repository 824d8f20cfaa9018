"""Numbers, curves and bars as text, and the time left."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dvla.telemetry.figures import bar, duration, fixed, short, sparkline
from dvla.telemetry.pace import Pace


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (90061, "25:01:01"),
        (None, "-"),
        (-3, "0:00"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.5, "0.5"),
        (-12.345, "-12.3"),
        (99.94, "99.9"),
        (99.96, "100"),
        (1234.4, "1234"),
        (99_999.6, "100k"),
        (1_234_567, "1.23M"),
        (2.4e-6, "2.4e-06"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_short(value: float | None, text: str) -> None:
    assert short(value) == text


@given(value=st.floats(1e-99, 1e14))
def test_short_is_short_and_close(value: float) -> None:
    text = short(value)
    assert len(text) <= 7
    units = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    number = float(text[:-1]) * units[text[-1]] if text[-1] in units else float(text)
    assert number == pytest.approx(value, rel=0.06 if value < 1e-3 else 0.006)


def test_fixed() -> None:
    assert (fixed(0.12345, 3), fixed(None, 3), fixed(math.inf, 1)) == ("0.123", "-", "-")


def test_sparkline_by_hand() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.5, 1.0, None, 7.0], 8, low=0.0, high=1.0) == "▁▅██"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"  # averaged down
    assert sparkline([3, 3], 5) == "▄▄"
    assert sparkline([], 5) == sparkline([math.nan], 5) == sparkline([1], 0) == ""


@given(values=st.lists(st.one_of(st.none(), st.floats()), max_size=60), width=st.integers(0, 20))
def test_sparkline_fits(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) <= width


def test_bar() -> None:
    assert bar(0.5, 4) == ("━━", "──")
    assert bar(None, 3) == ("", "───")
    assert bar(1.2, 2) == ("━━", "")


def test_time_left() -> None:
    pace = Pace(total_steps=100, policy_version=40, now=1000.0)
    assert pace.seconds_left(1000.0) is None
    pace.step(41, 1010.0)
    assert pace.seconds_left(1010.0) == 590.0
    assert pace.seconds_left(1013.0) == 587.0
    assert pace.seconds_left(1500.0) == 580.0  # an evaluation in between
    for step in range(42, 101):
        pace.step(step, 1010.0 + step - 41)  # ten times faster now
    assert pace.seconds_left(2000.0) == 0.0
    pace = Pace(total_steps=100, policy_version=0, now=0.0)
    for step in range(1, 51):
        pace.step(step, float(min(step, 20) * 10 + max(0, step - 20)))
    assert pace.seconds_left(230.0) == pytest.approx(50.0)  # only the last steps count
