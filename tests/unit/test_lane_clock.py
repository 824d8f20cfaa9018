"""A lane's time adds up, whoever reads it and whenever."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dvla.telemetry.lane_clock import Doing, LaneClock


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_lane_of_its_own_is_busy_unless_it_waits(clock: Clock) -> None:
    lane = LaneClock(clock)
    clock.forward(5)  # before the start: not counted
    lane.start()
    clock.forward(2)
    with lane.waiting():
        clock.forward(6)
    lane.count(3)
    use = lane.total()
    assert (use.wall_s, use.busy_s, use.wait_s, use.items) == (8, 2, 6, 3)
    assert use.busy_frac == 0.25
    assert use.items_per_s == 0.375


def test_lanes_that_take_turns_are_idle_in_between(clock: Clock) -> None:
    lane = LaneClock(clock)
    lane.start(busy=False)
    clock.forward(5)
    with lane.busy():
        clock.forward(1)
        with lane.waiting():
            clock.forward(2)
        clock.forward(1)
    use = lane.total()
    assert (use.wall_s, use.busy_s, use.wait_s) == (9, 2, 2)


def test_work_within_a_wait_counts_as_work(clock: Clock) -> None:
    lane = LaneClock(clock)
    lane.start()
    with lane.waiting():
        clock.forward(1)
        with lane.busy():
            clock.forward(4)
        clock.forward(1)
    assert (lane.total().busy_s, lane.total().wait_s) == (4, 2)


def test_an_error_ends_the_wait(clock: Clock) -> None:
    lane = LaneClock(clock)
    lane.start()

    def fail() -> None:
        with lane.waiting():
            clock.forward(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.forward(2)
    assert (lane.total().busy_s, lane.total().wait_s) == (2, 1)


def test_a_wait_under_way_counts_up_to_the_reading(clock: Clock) -> None:
    lane = LaneClock(clock)
    lane.start()
    with lane.waiting():
        clock.forward(3)
        assert lane.delta().wait_s == 3
        clock.forward(4)
    use = lane.delta()
    assert (use.wall_s, use.wait_s, use.busy_s) == (4, 4, 0)


def test_deltas_are_what_is_new(clock: Clock) -> None:
    lane = LaneClock(clock)
    lane.start()
    clock.forward(2)
    lane.count()
    assert lane.delta().items == 1
    clock.forward(3)
    lane.count(5)
    use = lane.delta()
    assert (use.wall_s, use.busy_s, use.items) == (3, 3, 5)
    assert lane.delta().busy_frac == 0.0  # no time has passed


def test_after_the_stop_nothing_changes(clock: Clock) -> None:
    lane = LaneClock(clock)
    lane.start()
    clock.forward(2)
    lane.stop()
    clock.forward(50)
    assert (lane.total().wall_s, lane.total().busy_s) == (2, 2)


@given(
    events=st.lists(st.tuples(st.sampled_from(["busy", "waiting", "read", "count"]), st.integers(0, 9)), max_size=30)
)
def test_deltas_add_up_to_the_total(events: list[tuple[str, int]]) -> None:
    clock = Clock()
    lane = LaneClock(clock)
    lane.start(busy=False)
    deltas = []
    for kind, amount in events:
        if kind == "read":
            deltas.append(lane.delta())
        elif kind == "count":
            lane.count(amount)
        else:
            with getattr(lane, kind)():
                clock.forward(amount)
        clock.forward(1)
    deltas.append(lane.delta())
    total = lane.total()
    for name in ("wall_s", "busy_s", "wait_s", "items"):
        assert sum(getattr(delta, name) for delta in deltas) == pytest.approx(getattr(total, name))
    assert total.busy_s == sum(amount for kind, amount in events if kind == "busy")


def test_reading_from_another_thread_sees_no_half_change() -> None:
    lane = LaneClock()
    lane.start()
    done = threading.Event()

    def work() -> None:
        for _ in range(3000):
            with lane.waiting():
                lane.count()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        use = lane.total()
        assert use.busy_s + use.wait_s == pytest.approx(use.wall_s, abs=1e-6)
    thread.join()
    assert lane.total().items == 3000


def test_what_a_lane_is_at_can_be_read_and_how_long_it_has_not_got_on(clock: Clock) -> None:
    lane = LaneClock(clock)
    lane.start()
    assert (lane.activity, lane.now) == ("busy", Doing())
    with lane.doing("gradient", "grpo"):
        assert (lane.activity, lane.now) == ("busy", Doing("gradient", "grpo"))
        with lane.waiting("host_free", "param_dist"):
            clock.forward(3)
            assert (lane.activity, lane.now) == ("waiting", Doing("host_free", "param_dist"))
        assert lane.now.what == "gradient"
    assert lane.now == Doing()
    assert (lane.beats, lane.quiet_s()) == (0, 3)  # to wait is no beat
    lane.count(5)
    lane.beat()
    assert (lane.beats, lane.quiet_s()) == (2, 0)


def test_at_what_a_lane_failed_stays_to_be_read(clock: Clock) -> None:
    lane = LaneClock(clock)
    lane.start()

    def fail() -> None:
        with lane.waiting("host_free", "param_dist"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (lane.activity, lane.now) == ("busy", Doing("host_free", "param_dist"))
