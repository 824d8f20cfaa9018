"""What each lane did when: spans of time, in a file that ui.perfetto.dev and chrome://tracing open.

A lane notes a span by appending one tuple to a list that only its thread appends to: no lock, and nothing at
all when tracing is off. Times come from the monotonic clock and are tied to the wall clock once, at the
start, so that the traces of several ranks lie on one axis (as well as their hosts' clocks agree).

The format is the JSON of Chrome's Trace Event Format: complete events ("ph": "X") in microseconds, a process
per rank, a thread per lane.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from dvla.telemetry.atomic_file import write_atomically
from dvla.telemetry.lane_names import LANES, lane_of_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


@dataclass(slots=True)
class _Track:
    """The spans of one lane in one thread; appended to by that thread, read by whoever writes the file."""

    lane: str
    events: list[tuple[str, int, int, dict[str, Any]]] = field(default_factory=list)  # name, start, end, args
    num_lost: int = 0


class _Span:
    """A span being timed."""

    __slots__ = ("_args", "_clock_ns", "_limit", "_name", "_start_ns", "_track")

    def __init__(self, track: _Track, limit: int, clock_ns: Callable[[], int], name: str, args: dict[str, Any]) -> None:
        self._track, self._limit, self._clock_ns, self._name, self._args = track, limit, clock_ns, name, args

    def note(self, **args: Any) -> None:
        """Add what is known only now."""
        self._args.update(args)

    def __enter__(self) -> Self:
        self._start_ns = self._clock_ns()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        end_ns = self._clock_ns()
        if error is not None:
            self._args["error"] = error.__name__
        if len(self._track.events) < self._limit:
            self._track.events.append((self._name, self._start_ns, end_ns, self._args))
        else:
            self._track.num_lost += 1


class _NoSpan:
    """Stands in for a span when tracing is off."""

    __slots__ = ()

    def note(self, **args: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_NO_SPAN = _NoSpan()


class Tracer:
    """Records the spans of one rank.

    Args:
        rank: The process number in the trace.
        enabled: Without, every span is the same object that does nothing.
        max_events: Spans kept per lane. Later ones are counted only, and the trace says how many are missing.
        clock_ns: Monotonic clock, in nanoseconds.
        epoch_ns: Wall clock, read once.
    """

    def __init__(
        self,
        rank: int,
        enabled: bool,
        *,
        max_events: int = 500_000,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        epoch_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._rank, self._max_events, self._clock_ns = rank, max_events, clock_ns
        self.enabled = enabled
        self._lane = ""  # as the thread is called
        self._to_epoch_ns = epoch_ns() - clock_ns()
        self._tracks: list[_Track] = []  # appended to under _lock
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def for_lane(self, lane: str) -> Tracer:
        """Make a view whose spans belong to `lane` in any thread: for lanes that take turns on one."""
        view = Tracer.__new__(Tracer)
        view.__dict__.update(self.__dict__, _lane=lane)
        return view

    def span(self, name: str, /, **args: Any) -> _Span | _NoSpan:
        """Time a ``with`` block.

        Args:
            name: What is done, e.g. ``decide``.
            args: Shown with the span; numbers and short strings.
        """
        if not self.enabled:
            return _NO_SPAN
        return _Span(self._track(), self._max_events, self._clock_ns, name, args)

    def _track(self) -> _Track:
        of_thread: dict[str, _Track] = self._of_thread.__dict__
        track = of_thread.get(self._lane)
        if track is None:
            track = _Track(self._lane or lane_of_thread(threading.current_thread().name))
            of_thread[self._lane] = track
            with self._lock:
                self._tracks.append(track)
        return track

    def write(self, path: Path) -> None:
        """Write all spans so far; may be called again and again, while lanes record."""
        write_atomically(path, self._pieces())

    def _pieces(self) -> Iterator[str]:
        with self._lock:
            tracks = [(number, track, list(track.events)) for number, track in enumerate(self._tracks)]
        lost = {track.lane: track.num_lost for _, track, _ in tracks if track.num_lost}
        about = {"max_events_per_lane": self._max_events, "lost_events": lost}
        other = json.dumps({f"rank {self._rank}": about})
        yield f'{{"displayTimeUnit":"ms","otherData":{other},"traceEvents":[\n'
        metadata = [
            (0, "process_name", {"name": f"rank {self._rank}"}),
            (0, "process_sort_index", {"sort_index": self._rank}),
        ]
        if lost:
            metadata.append((0, "process_labels", {"labels": f"not all spans kept, missing: {lost}"}))
        for number, track, _ in tracks:
            order = LANES.index(track.lane) if track.lane in LANES else len(LANES) + number
            metadata.append((number, "thread_name", {"name": track.lane}))
            metadata.append((number, "thread_sort_index", {"sort_index": order}))
        yield ",\n".join(
            json.dumps({"ph": "M", "pid": self._rank, "tid": number, "name": name, "args": args})
            for number, name, args in metadata
        )
        for number, _, events in tracks:
            head = f',\n{{"ph":"X","pid":{self._rank},"tid":{number},"ts":'
            for name, start_ns, end_ns, args in events:
                # Written by hand: a float of microseconds since 1970 would be rounded to a quarter of one.
                timing = f'{_microseconds(start_ns + self._to_epoch_ns)},"dur":{_microseconds(end_ns - start_ns)}'
                yield f'{head}{timing},"name":{json.dumps(name)},"args":{json.dumps(args, default=str)}}}'
        yield "\n]}\n"


def _microseconds(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def merge_traces(sources: Iterable[Path], target: Path) -> None:
    """Join the traces of several ranks into one file."""
    merged: dict[str, Any] = {"displayTimeUnit": "ms", "otherData": {}, "traceEvents": []}
    for source in sources:
        trace = json.loads(source.read_text())
        merged["otherData"] |= trace["otherData"]
        merged["traceEvents"] += trace["traceEvents"]
    write_atomically(target, [json.dumps(merged)])


@dataclass(frozen=True, slots=True)
class Span:
    """A span read back."""

    name: str
    lane: str
    rank: int
    start_s: float
    """Since 1970; good to about a quarter of a microsecond."""
    end_s: float
    args: dict[str, Any]


def load_spans(path: Path) -> list[Span]:
    """Read the spans of a trace, in order of their start."""
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [
        Span(
            name=event["name"],
            lane=lanes[event["pid"], event["tid"]],
            rank=event["pid"],
            start_s=event["ts"] / 1e6,
            end_s=(event["ts"] + event["dur"]) / 1e6,
            args=event["args"],
        )
        for event in events
        if event["ph"] == "X"
    ]
    return sorted(spans, key=lambda span: span.start_s)


def overlap_seconds(spans: Iterable[Span], lane_a: str, lane_b: str) -> float:
    """Time during which both lanes were inside a span, nested and repeated spans counted once.

    The spans are taken as one timeline: pass those of one rank unless ranks together are meant.
    """
    spans = list(spans)
    a, b = (_union([(s.start_s, s.end_s) for s in spans if s.lane == lane]) for lane in (lane_a, lane_b))
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals, in order, that cover the same time."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined
