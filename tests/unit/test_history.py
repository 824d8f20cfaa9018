"""What is remembered of a run does not grow with it, and is exact while the run is short."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dvla.config import Config
from dvla.rl.health import HEALTH_TAGS, find_warnings
from dvla.rl.history import Course, History
from dvla.telemetry.durations import Durations


def course_of(values: list[float]) -> Course:
    course = Course()
    for value in values:
        course.add(value)
    return course


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (None, None)),
        ([3.0], (3.0, 3.0)),
        ([1.0, 2.0], (1.0, 2.0)),
        ([0.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 6.0, 8.0], (1.0, 7.0)),
        ([float(i) for i in range(15)], (1.0, 13.0)),  # 0.2 * 15 is a little more than 3 in floats
        ([float(i) for i in range(11)], (1.0, 9.0)),  # rounded up
    ],
)
def test_first_and_last_mean(values: list[float], expected: tuple[float | None, float | None]) -> None:
    assert course_of(values).first_last_mean() == expected


def test_first_and_last_mean_of_another_share() -> None:
    assert course_of([1.0, 2.0, 3.0, 4.0]).first_last_mean(fraction=0.5) == (1.5, 3.5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=511), st.data())
def test_a_short_course_is_exact(values: list[float], data: st.DataObject) -> None:
    course, count = course_of(values), data.draw(st.integers(1, len(values)))
    assert (len(course), course.points()) == (len(values), values)
    assert course.mean_of_first(count) == pytest.approx(statistics.fmean(values[:count]), rel=1e-9, abs=1e-6)
    assert course.mean_of_last(count) == pytest.approx(statistics.fmean(values[-count:]), rel=1e-9, abs=1e-6)


@given(st.integers(1, 20_000), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_a_long_course_is_bounded_and_right_but_for_the_borders_of_its_stretches(count: int, seed: int) -> None:
    values = np.random.default_rng(seed).random(count).tolist()
    course = course_of(values)
    assert len(course) == count
    assert len(course.points()) <= 512
    assert course.mean_of_first(count) == pytest.approx(statistics.fmean(values))
    for part in (1 / 3, 0.2):
        wanted = max(1, math.ceil(count * part))
        most = 2 * (1 + count // 256) / wanted  # values of one stretch, of the mean's
        assert course.mean_of_first(wanted) == pytest.approx(statistics.fmean(values[:wanted]), abs=most)
        assert course.mean_of_last(wanted) == pytest.approx(statistics.fmean(values[-wanted:]), abs=most)
    assert Course.from_state(json.loads(json.dumps(course.state()))).state() == course.state()


def batch(step: int) -> dict[str, float | None]:
    """Numbers of a run that gets nowhere, from step 1,000 on without any signal."""
    return dict.fromkeys(HEALTH_TAGS, 0.0) | {
        "rollout/success_rate": 0.4 if step < 1000 else 0.0,
        "rollout/zero_signal_frac": 0.0 if step < 1000 else 1.0,
        "rollout/all_failed_frac": 0.0 if step < 1000 else 1.0,
        "train/advantage_success": None,
        "train/entropy": 2.0,
    }


def test_a_history_of_a_hundred_thousand_batches_is_as_large_as_one_of_a_thousand() -> None:
    history, sizes = History(), {}
    for step in range(100_000):
        history.add(batch(step))
        if step + 1 in (1000, 100_000):
            sizes[step + 1] = len(json.dumps(history.state()))
    assert sizes[100_000] < 1.5 * sizes[1000]
    assert history.num_batches == 100_000
    assert [warning.name for warning in find_warnings(history, Config(), num_tasks=1)] == ["all_groups_failed"]


def test_a_history_goes_on_after_a_checkpoint() -> None:
    whole = History.of(batch(step) for step in range(1002))
    resumed = History.from_state(json.loads(json.dumps(History.of(batch(step) for step in range(700)).state())))
    for step in range(700, 1002):
        resumed.add(batch(step))
    assert resumed.state() == whole.state()


def test_what_was_not_measured_is_no_part_of_the_course() -> None:
    rates = [None, math.nan, 0.5, math.inf, 1.0]
    history = History.of([{}, *({"rollout/success_rate": rate} for rate in rates)])
    assert history.num_batches == 6
    assert history.courses["rollout/success_rate"].points() == [0.5, 1.0]


def test_durations() -> None:
    durations = Durations()
    assert durations.mean() is None
    for seconds in (1.0, 2.0, 6.0):
        durations.add(seconds)
    assert (durations.count, durations.last, durations.mean()) == (3, 6.0, 3.0)
