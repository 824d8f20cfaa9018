"""Which lane bounds a step: spans made by hand, with answers computed by hand."""

from __future__ import annotations

import pytest

from dvla.telemetry.critical_lane import analyse, describe, last_steps, segments, steps_of
from dvla.telemetry.spans import Span


def work(lane: str, name: str, start: float, end: float, *, rank: int = 0, **args) -> Span:
    return Span(name, lane, rank, start, end, args)


def wait(lane: str, what: str, whom: str, start: float, end: float, *, rank: int = 0) -> Span:
    return Span(what, lane, rank, start, end, {"whom": whom}, "wait")


def turn(lane: str, start: float, end: float) -> Span:
    return Span("turn", lane, 0, start, end, {}, "turn")


def optimise(end: float, version: int, *, rank: int = 0) -> Span:
    return work("grpo", "optimise", end - 1, end, rank=rank, version=version)


GROUPS = "a finished group or evaluation"
# Two optimiser steps, 0 to 10 and 10 to 20, of one rank with 4 environments.
#   grpo      waits for groups 0-6, works 6-10; waits 10-18, works 18-20
#   sampling  collects 1-2 (one of 4 episodes), 12-13; else waits for simulators
#   inference decides 2-4 for 2 (and 1 more queued) of the 4 episodes, 13-18 for all 4; else waits for requests
ONE_RANK = [
    optimise(0, 0),
    wait("grpo", GROUPS, "sampling", 0, 6),
    work("grpo", "gradient", 6, 8),
    optimise(10, 1),
    wait("grpo", GROUPS, "sampling", 10, 18),
    optimise(20, 2),
    work("sampling", "collect", -1, 0, workers=1, running=4),
    wait("sampling", "4 simulators or their actions", "inference", 0, 1),
    work("sampling", "collect", 1, 2, workers=1, running=4),
    wait("sampling", "3 simulators or their actions", "inference", 2, 12),
    work("sampling", "collect", 12, 13, workers=1, running=4),
    wait("sampling", "4 simulators or their actions", "inference", 13, 20),
    wait("inference", "requests", "sampling", -1, 2),
    work("inference", "decide", 2, 4, size=2, queued=1),
    wait("inference", "requests", "sampling", 4, 13),
    work("inference", "decide", 13, 18, size=4, queued=0),
    wait("inference", "requests", "sampling", 18, 20),
]


def analysed(spans: list[Span]):
    result = analyse(spans, steps_of(spans))
    assert result is not None
    return result


def test_one_rank_by_hand() -> None:
    result = analysed(ONE_RANK)
    assert (result.start_s, result.end_s, result.num_steps, result.first_version) == (0, 20, 2, 1)
    # simulators: 0-1 whole, 1-2 three of four episodes, 2-4 one of four, 4-6 whole; 10-12 whole, 12-13 three quarters
    simulators = 1 + 0.75 + 2 * 0.25 + 2 + 2 + 0.75
    expected = {"grpo": 6, "simulators": simulators, "inference": 2 * 0.75 + 5, "sampling": 0.25 + 0.25}
    assert result.bounds == pytest.approx({who: seconds / 20 for who, seconds in expected.items()})
    assert next(iter(result.bounds)) == "simulators"
    shares = {share.lane: share for share in result.lanes}
    assert shares["grpo"].busy == pytest.approx(6 / 20)
    assert shares["grpo"].waits == pytest.approx({GROUPS: 14 / 20})
    assert shares["sampling"].busy == pytest.approx(2 / 20)
    assert shares["sampling"].waits == pytest.approx({"simulators or their actions": 18 / 20})
    assert shares["inference"].busy == pytest.approx(7 / 20)
    assert result.overlaps == pytest.approx(
        {("sampling", "inference"): 0, ("sampling", "grpo"): 0, ("inference", "grpo"): 0}
    )
    assert result.critical[:2] == [(0, 2, "simulators"), (2, 4, "inference")]


def test_answers_within_a_collection_leave_it_what_it_is() -> None:
    answers = [work("sampling", "handle", start, start + 0.5) for start in (1, 1.5, 12, 12.5)]
    assert analysed(sorted([*ONE_RANK, *answers], key=lambda span: span.start_s)) == analysed(ONE_RANK)


def test_lanes_at_work_together_overlap() -> None:
    result = analysed(
        [
            optimise(0, 0),
            optimise(10, 1),
            work("sampling", "collect", 0, 4),
            work("param_dist", "gather", 3, 5),
            wait("grpo", GROUPS, "sampling", 2, 8),
        ]
    )
    # grpo works 0-2 and 8-10
    assert result.overlaps == pytest.approx(
        {("sampling", "grpo"): 0.2, ("sampling", "param_dist"): 0.1, ("grpo", "param_dist"): 0}
    )


def test_a_chain_of_waits_ends_at_the_lane_that_works() -> None:
    # The learner waits for a host buffer, that for the replica, which decides.
    result = analysed(
        [
            optimise(0, 0),
            wait("grpo", "host_free", "param_dist", 0, 9),
            optimise(10, 1),
            wait("param_dist", "staging_free", "inference", -1, 7),
            work("param_dist", "hand over", 7, 9),
            wait("param_dist", "published", "grpo", 9, 10),
            work("inference", "decide", -1, 7, size=1),
        ]
    )
    assert result.bounds == pytest.approx({"inference": 0.7, "param_dist": 0.2, "grpo": 0.1})


def test_learners_that_wait_for_each_other_wait_for_the_slow_ones_groups() -> None:
    agree = "collective: agree on micro-batches and a stop"
    slow = [
        optimise(0, 0, rank=1),
        wait("grpo", GROUPS, "sampling", 0, 6, rank=1),
        wait("grpo", agree, "grpo", 6, 7, rank=1),
        optimise(8, 1, rank=1),
        wait("sampling", "4 simulators or their actions", "inference", -1, 10, rank=1),
    ]
    result = analysed([optimise(0, 0), wait("grpo", agree, "grpo", 0, 7), optimise(8, 1), *slow])
    # 0-6: rank 0 waits for rank 1, that for its simulators; 6-7: both in the collective; 7-8: both work
    assert result.bounds == pytest.approx({"simulators": 6 / 8, "grpo": 2 / 8})


def test_lanes_on_ranks_of_their_own() -> None:
    result = analysed(
        [
            optimise(0, 0),
            wait("grpo", GROUPS, "sampling", 0, 8),
            optimise(10, 1),
            work("sampling", "collect", -1, 0, rank=1, workers=1, running=2),
            wait("sampling", "2 simulators or their actions", "inference", 0, 10, rank=1),
            work("inference", "decide", 2, 6, rank=2, size=1, queued=0),
            work("inference", "decide", 9, 10, rank=2, size=1, queued=0),
            wait("inference", "requests", "sampling", -1, 2, rank=2),
            wait("inference", "requests", "sampling", 6, 9, rank=2),
        ]
    )
    assert result.bounds == pytest.approx({"simulators": 0.6, "inference": 0.2, "grpo": 0.2})


def test_lanes_that_take_turns() -> None:
    result = analysed(
        [
            turn("grpo", 0, 20),
            optimise(1, 0),
            wait("grpo", "a finished group", "sampling", 1, 8),
            optimise(11, 1),
            turn("sampling", 1, 6),
            turn("sampling", 12, 13),
            work("sampling", "collect", 1, 6, running=4),
            wait("sampling", "4 simulators", "", 1, 5),
            turn("inference", 6, 8),
            work("inference", "decide", 6, 8, size=2, queued=0),
        ]
    )
    # sampling handles what the simulators have done 5-6; during inference's turn nothing is simulated
    assert result.bounds == pytest.approx({"simulators": 0.4, "sampling": 0.1, "inference": 0.2, "grpo": 0.3})
    shares = {share.lane: share.busy for share in result.lanes}
    assert shares == pytest.approx({"sampling": 0.1, "inference": 0.2, "grpo": 0.3})


def test_what_is_nobodys_is_other() -> None:
    disk = [optimise(0, 0), wait("grpo", "until the last checkpoint is written", "", 0, 3), optimise(4, 1)]
    assert analysed(disk).bounds == pytest.approx({"other": 0.75, "grpo": 0.25})
    ended = [
        optimise(0, 0),
        wait("grpo", GROUPS, "sampling", 0, 3),
        optimise(4, 1),
        work("sampling", "collect", -2, -1),
    ]
    assert analysed(ended).bounds == pytest.approx({"other": 0.75, "grpo": 0.25})


def test_segments_have_no_gaps() -> None:
    spans = [
        work("grpo", "outer", 0, 10, rank=0),
        wait("grpo", "w", "grpo", 2, 4),
        work("grpo", "inner", 5, 7),
        work("grpo", "later", 12, 13),
    ]
    found = [(s.start_s, s.end_s, s.activity, s.span.name if s.span else None) for s in segments(spans)]
    assert found == [
        (0, 2, "busy", "outer"),
        (2, 4, "waiting", "w"),
        (4, 5, "busy", "outer"),
        (5, 7, "busy", "inner"),
        (7, 10, "busy", "outer"),
        (10, 12, "busy", None),
        (12, 13, "busy", "later"),
    ]
    assert segments([]) == []


def test_without_two_steps_there_is_nothing_to_say() -> None:
    assert analyse([], []) is None
    assert analyse([optimise(1, 1)], steps_of([optimise(1, 1)])) is None


def test_only_the_last_steps_of_a_long_trace() -> None:
    spans = [optimise(10 * n, n) for n in range(1, 6)] + [work("sampling", "collect", n, n + 1) for n in range(50)]
    assert [version for _, version in last_steps(spans, 1000)] == [1, 2, 3, 4, 5]
    assert [version for _, version in last_steps(spans, 25)] == [3, 4, 5]
    assert [version for _, version in last_steps(spans, 1)] == [4, 5]


def test_the_text_names_the_lane_and_what_helps() -> None:
    text = "\n".join(describe(analysed(ONE_RANK)))
    assert "Optimiser steps 1 to 2 took 20 s. simulators bounds them 35 % of the time" in text
    assert "grpo 30 %" in text
    assert "render.meshes=light" in text
    assert "inference is busy 35 % and waits 65 % for requests." in text
    assert "sampling is busy 10 % and waits 90 % for simulators or their actions." in text
