"""Spans come out as they went in, on one time axis, and the file is what the viewers expect."""

from __future__ import annotations

import itertools
import json
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spans import overlap_seconds

from dvla.telemetry.lane_clock import LaneClock
from dvla.telemetry.spans import Span, read_spans
from dvla.telemetry.trace import Tracer


class Ticks:
    """A clock that is what it was set to, and moves on by hand."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


def make(clock: Ticks, rank: int = 0, *, epoch_ns: int = 0, max_events: int = 100) -> Tracer:
    return Tracer(rank, True, max_events=max_events, clock_ns=clock, epoch_ns=lambda: epoch_ns + clock())


def in_lane(lane: str, work: object) -> None:
    thread = threading.Thread(target=work, name=f"dvla-{lane}")
    thread.start()
    thread.join()


def test_spans_carry_lane_time_and_arguments(tmp_path: Path) -> None:
    clock = Ticks(5_000)
    tracer = make(clock, rank=3, epoch_ns=1_000_000_000)

    def work() -> None:
        with tracer.span("decide", size=4, version=7):
            clock.now_ns += 2_000_000

    in_lane("inference", work)
    tracer.write(tmp_path / "traces" / "rank00003.json")
    (span,) = read_spans(tmp_path / "traces" / "rank00003.json")
    assert (span.name, span.lane, span.rank) == ("decide", "inference", 3)
    assert span.args == {"size": 4, "version": 7}
    assert span.start_s == pytest.approx(1.000005)
    assert span.end_s - span.start_s == pytest.approx(0.002)


def test_the_file_is_trace_event_json(tmp_path: Path) -> None:
    clock = Ticks()
    tracer = make(clock, rank=1, epoch_ns=1_700_000_000_123_456_789)

    def work() -> None:
        with tracer.span("work"):
            pass

    for lane in ("param_dist", "sampling"):
        in_lane(lane, work)
    path = tmp_path / "trace.json"
    tracer.write(path)
    text = path.read_text()
    trace = json.loads(text)
    assert '"ts":1700000000123456.789' in text  # to the nanosecond
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(event["pid"] == 1 for event in events)
    by_name = {(event["name"], event["tid"]): event.get("args") for event in events}
    assert by_name["process_name", 0] == {"name": "rank 1"}
    order = {by_name["thread_name", tid]["name"]: by_name["thread_sort_index", tid]["sort_index"] for tid in (0, 1)}
    assert order["sampling"] < order["param_dist"]


def test_disabled_records_nothing_and_hands_out_one_object(tmp_path: Path) -> None:
    tracer = Tracer(0, False)
    first, second = tracer.span("a", size=1), tracer.for_lane("grpo").span("b")
    assert first is second
    with first:
        pass
    tracer.write(tmp_path / "trace.json")
    assert read_spans(tmp_path / "trace.json") == []


def test_an_error_ends_the_span_and_is_named(tmp_path: Path) -> None:
    tracer = make(Ticks())
    with pytest.raises(KeyError), tracer.span("work"):
        raise KeyError
    tracer.write(tmp_path / "trace.json")
    assert read_spans(tmp_path / "trace.json")[0].args == {"error": "KeyError"}


def test_memory_is_bounded_and_the_loss_is_told(tmp_path: Path) -> None:
    tracer = make(Ticks(), max_events=3)
    for number in range(10):
        with tracer.span(f"work {number}"):
            pass
    path = tmp_path / "trace.json"
    tracer.write(path)
    assert [span.name for span in read_spans(path)] == ["work 0", "work 1", "work 2"]
    about = json.loads(path.read_text())["otherData"]["rank 0"]
    assert about == {"max_events_per_lane": 3, "lost_events": {"main": 7}}
    assert "not all spans kept" in path.read_text()


def test_writing_again_adds_what_is_new(tmp_path: Path) -> None:
    tracer, path = make(Ticks()), tmp_path / "trace.json"
    for count in (1, 2):
        with tracer.span("work"):
            pass
        tracer.write(path)
        assert len(read_spans(path)) == count
    assert list(tmp_path.iterdir()) == [path]


def test_lanes_that_share_a_thread(tmp_path: Path) -> None:
    tracer = make(Ticks())
    for lane in ("sampling", "grpo", "sampling"):
        with tracer.for_lane(lane).span("work"):
            pass
    with tracer.span("work"):
        pass
    tracer.write(tmp_path / "trace.json")
    lanes = [span.lane for span in read_spans(tmp_path / "trace.json")]
    assert sorted(lanes) == ["grpo", "main", "sampling", "sampling"]


def test_ranks_share_one_axis(tmp_path: Path) -> None:
    spans = []
    for rank, (clock_ns, epoch_ns) in enumerate([(10**9, 10**15), (7, 10**15 + 10**9 - 7)]):
        clock = Ticks(clock_ns)
        tracer = make(clock, rank, epoch_ns=epoch_ns)
        with tracer.span("work"):
            clock.now_ns += 1_000
        tracer.write(tmp_path / f"rank{rank:05d}.json")
        spans += read_spans(tmp_path / f"rank{rank:05d}.json")
    assert [span.rank for span in spans] == [0, 1]
    assert spans[0].start_s == spans[1].start_s


def test_threads_record_side_by_side(tmp_path: Path) -> None:
    tracer = Tracer(0, True)
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait(10)
        for _ in range(500):
            with tracer.span("work"):
                pass

    threads = [threading.Thread(target=work, name=f"dvla-{lane}") for lane in "abcd"]
    for thread in threads:
        thread.start()
    for _ in range(5):
        tracer.write(tmp_path / "trace.json")  # while they record
        read_spans(tmp_path / "trace.json")
    for thread in threads:
        thread.join()
    tracer.write(tmp_path / "trace.json")
    spans = read_spans(tmp_path / "trace.json")
    assert {lane: sum(span.lane == lane for span in spans) for lane in "abcd"} == dict.fromkeys("abcd", 500)


def spans_of(lane: str, intervals: list[tuple[float, float]]) -> list[Span]:
    return [Span("work", lane, 0, start, end, {}) for start, end in intervals]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([(0, 10)], [(4, 6)], 2),
        ([(0, 5)], [(5, 9)], 0),
        ([(0, 2), (4, 6)], [(1, 5)], 2),
        ([(0, 10), (2, 3)], [(1, 4), (1, 2)], 3),  # nested ones count once
        ([], [(1, 4)], 0),
    ],
)
def test_overlap_by_hand(a: list, b: list, expected: float) -> None:
    assert overlap_seconds(spans_of("a", a) + spans_of("b", b), "a", "b") == expected


_INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


@given(a=_INTERVALS, b=_INTERVALS)
def test_overlap_counts_the_common_seconds(a: list, b: list) -> None:
    def covered(intervals: list) -> set[int]:
        return set(itertools.chain.from_iterable(range(start, end) for start, end in intervals))

    assert overlap_seconds(spans_of("a", a) + spans_of("b", b), "a", "b") == len(covered(a) & covered(b))


def test_every_span_is_documented() -> None:
    repository = Path(__file__).parents[2]
    sources = [path.read_text() for path in (repository / "src" / "dvla").rglob("*.py")]
    opened = {name for text in sources for name in re.findall(r"""tracer\.span\(\s*"([^"]+)\"""", text)}
    text = (repository / "docs" / "metrics.md").read_text().split("## Spans of a trace")[1]
    assert opened == set(re.findall(r"^\| \w+ \| `([^`]+)`", text, flags=re.MULTILINE))


def test_waits_and_turns_are_told_from_work(tmp_path: Path) -> None:
    tracer = make(Ticks())
    clock = LaneClock(tracer=tracer.for_lane("grpo"))
    clock.start(busy=False)
    with clock.busy(), tracer.for_lane("grpo").span("gradient"), clock.waiting("a finished group", "sampling"):
        pass
    with clock.doing("collective: gradient", "grpo"):  # work, which has a span of its own
        pass
    tracer.write(tmp_path / "trace.json")
    spans = read_spans(tmp_path / "trace.json")
    assert {(span.category, span.name, span.lane) for span in spans} == {
        ("turn", "turn", "grpo"),
        ("work", "gradient", "grpo"),
        ("wait", "a finished group", "grpo"),
    }
    (wait,) = (span for span in spans if span.category == "wait")
    assert wait.args == {"whom": "sampling"}


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents":[{"ph":"X"}]}', '{"traceEvents":3}', "[" * 100_000])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=r"trace\.json is no trace"):
        read_spans(tmp_path / "trace.json")
