"""Balance: groups go where they are finished first, batches wait only while it pays, environments climb to the best pace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dvla.lanes.balance import BatchTimes, EnvLimit, GroupPace, deal_groups


def test_equal_ranks_take_turns():
    assert deal_groups(5, [0, 0, 0], [2.0, 2.0, 2.0], turn=1) == [1, 2, 0, 1, 2]
    assert deal_groups(4, [3, 3], [0.0, 0.0], turn=0) == [0, 1, 0, 1]  # nothing measured yet


def test_small_differences_move_nothing():
    assert deal_groups(6, [0, 0], [1.0, 1.15], turn=0) == [0, 1, 0, 1, 0, 1]


def test_a_rank_three_times_slower_gets_a_quarter():
    dealt = deal_groups(8, [0, 0], [1.0, 3.0], turn=0)
    assert dealt.count(1) == 2
    # The slow one takes 6 s for its two, the other 6 s for its six; by turns it would have been 12 s.


def test_a_rank_that_is_behind_is_spared_until_it_has_caught_up():
    assert deal_groups(3, [0, 4], [1.0, 1.0], turn=1) == [0, 0, 0]
    assert deal_groups(1, [2, 2], [1.0, 1.0], turn=1) == [1]


def test_an_unmeasured_rank_counts_as_the_mean():
    assert deal_groups(1, [1, 0, 0], [1.0, 3.0, 0.0], turn=2) == [2]
    assert deal_groups(1, [0, 0, 0], [1.0, 3.0, 0.0], turn=2) == [0]


@given(
    count=st.integers(0, 40),
    ranks=st.lists(st.tuples(st.integers(0, 9), st.floats(0.01, 100)), min_size=1, max_size=8),
    turn=st.integers(0, 1000),
)
def test_dealing_never_ends_later_than_taking_turns(count, ranks, turn):
    loads, seconds = [load for load, _ in ranks], [pace for _, pace in ranks]

    def end(dealt):
        return max(((loads[rank] + dealt.count(rank)) * seconds[rank] for rank in set(dealt)), default=0.0)

    dealt = deal_groups(count, loads, seconds, turn)
    assert len(dealt) == count
    assert set(dealt) <= set(range(len(ranks)))
    in_turn = [number % len(ranks) for number in range(turn, turn + count)]
    assert end(dealt) <= 1.2 * end(in_turn) + 1e-9


def test_pace_counts_only_the_time_in_which_there_are_groups():
    pace = GroupPace()
    pace.begin(10.0)
    pace.begin(10.5)
    pace.end(14.0)
    assert pace.seconds == 4.0
    pace.end(16.0)
    assert pace.seconds == pytest.approx(0.7 * 4.0 + 0.3 * 2.0)
    assert pace.num_open == 0
    pace.begin(100.0)  # idle until now
    pace.end(103.4)
    assert pace.seconds == pytest.approx(0.7 * 3.4 + 0.3 * 3.4)


def test_times_of_calls_are_split_into_a_fixed_cost_and_one_per_request():
    times = BatchTimes()
    assert times.costs() is None
    assert times.largest_batch(64) == 64
    assert times.worth_waiting_s(1, 0.5) == 0.5
    for size in (1, 8, 4, 2, 8, 1):
        times.note(size, 0.010 + 0.002 * size)
    fixed, each = times.costs()
    assert fixed == pytest.approx(0.010, rel=1e-6)
    assert each == pytest.approx(0.002, rel=1e-6)
    # A request that joins saves 10 ms; four that wait for it lose what they wait.
    assert times.worth_waiting_s(4, 0.5) == pytest.approx(0.0025, rel=1e-6)
    # In a batch of 45 the fixed cost is a tenth: 10 ms of 10 + 90.
    assert times.largest_batch(64) == 45
    assert times.largest_batch(16) == 16


def test_calls_of_one_size_tell_nothing():
    times = BatchTimes()
    for _ in range(50):
        times.note(4, 0.02)
    assert times.costs() is None


def test_old_calls_are_forgotten():
    times = BatchTimes()
    for size in (1, 2, 3, 4) * 50:
        times.note(size, 1.0 + size)
    for size in (1, 2, 3, 4) * 50:
        times.note(size, 0.1 + 0.01 * size)
    assert times.costs()[0] == pytest.approx(0.1, rel=0.01)


def climb(limit, pace_of, looks):
    return [limit.limit, *(limit.look(pace_of(limit.limit)) for _ in range(looks))]


def test_the_number_of_environments_climbs_to_the_best_pace():
    seen = climb(EnvLimit(1, 32), lambda envs: -((envs - 12) ** 2) + 1000.0, 200)
    resting = max(set(seen[100:]), key=seen[100:].count)
    assert 9 <= resting <= 16


def test_all_environments_stay_in_flight_when_fewer_are_no_better():
    for pace_of in (lambda envs: float(envs), lambda envs: 100.0):
        seen = climb(EnvLimit(2, 16), pace_of, 200)
        assert seen.count(16) > 0.85 * len(seen)
        assert min(seen) >= 12  # a probe is a quarter less, and goes back


def test_a_rank_that_may_not_change_does_not():
    assert set(climb(EnvLimit(8, 8), lambda envs: 1.0, 50)) == {8}
