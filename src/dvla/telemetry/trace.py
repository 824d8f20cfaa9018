"""What each lane did when: spans of time, in a file that ui.perfetto.dev and chrome://tracing open.

A lane notes a span by appending one tuple to a list that only its thread appends to: no lock, and nothing at
all when tracing is off. Times come from the monotonic clock and are tied to the wall clock once, at the
start, so that the traces of several ranks lie on one axis (as well as their hosts' clocks agree).

The format is the JSON of Chrome's Trace Event Format: complete events ("ph": "X") in microseconds, a process
per rank, a thread per lane. Their category ("cat") says what they are: `work`; a `wait`, whose argument `whom` is the lane
that must do something first; a `turn`, of lanes that share a thread. A lane with a thread of its own works whenever it does
not wait, between its spans, too.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dvla.telemetry.atomic_file import write_atomically
from dvla.telemetry.lane_names import LANES, lane_of_thread


@dataclass(slots=True)
class _Track:
    """The spans of one lane in one thread; appended to by that thread, read by whoever writes the file."""

    lane: str
    # category, name, start, end, args
    events: list[tuple[str, str, int, int, dict[str, Any]]] = field(default_factory=list)
    num_lost: int = 0


_NO_SPAN = nullcontext()


class _OpenSpan:
    """A span that goes on. No generator: lanes open thousands a second."""

    __slots__ = ("_args", "_category", "_clock_ns", "_max_events", "_name", "_start_ns", "_track")

    def __init__(
        self,
        track: _Track,
        clock_ns: Callable[[], int],
        max_events: int,
        category: str,
        name: str,
        args: dict[str, Any],
    ) -> None:
        self._track, self._clock_ns, self._max_events = track, clock_ns, max_events
        self._category, self._name, self._args = category, name, args

    def __enter__(self) -> None:
        self._start_ns = self._clock_ns()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._args["error"] = kind.__name__
        if len(self._track.events) < self._max_events:
            self._track.events.append((self._category, self._name, self._start_ns, self._clock_ns(), self._args))
        else:
            self._track.num_lost += 1


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
        self._rank, self._enabled, self._max_events, self._clock_ns = rank, enabled, max_events, clock_ns
        self._to_epoch_ns = epoch_ns() - clock_ns()
        self._lane = ""  # as the thread is called
        self._tracks: dict[tuple[threading.Thread, str], _Track] = {}  # each thread adds its own only

    def for_lane(self, lane: str) -> Tracer:
        """Make a view whose spans belong to `lane` in any thread: for lanes that take turns on one."""
        view = copy.copy(self)
        view._lane = lane
        return view

    def span(self, name: str, /, **args: Any) -> AbstractContextManager[None]:
        """Time a ``with`` block of work.

        Args:
            name: What is done, e.g. ``decide``.
            args: Shown with the span; numbers and short strings.
        """
        return self._span("work", name, args)

    def wait(self, what: str, whom: str) -> AbstractContextManager[None]:
        """Time a ``with`` block in which the lane waits for the lane `whom` to do `what`."""
        return self._span("wait", what, {"whom": whom})

    def turn(self) -> AbstractContextManager[None]:
        """Time a ``with`` block in which it is the lane's turn on a thread that it shares."""
        return self._span("turn", "turn", {})

    def _span(self, category: str, name: str, args: dict[str, Any]) -> AbstractContextManager[None]:
        if not self._enabled:
            return _NO_SPAN
        thread = threading.current_thread()
        track = self._tracks.get((thread, self._lane))
        if track is None:
            track = self._tracks[thread, self._lane] = _Track(self._lane or lane_of_thread(thread.name))
        return _OpenSpan(track, self._clock_ns, self._max_events, category, name, args)

    def write(self, path: Path) -> None:
        """Write all spans so far; may be called again and again, while lanes record."""
        write_atomically(path, self._pieces())

    def _pieces(self) -> Iterator[str]:
        tracks = list(self._tracks.values())
        lost = {track.lane: track.num_lost for track in tracks if track.num_lost}
        process = f"rank {self._rank}"
        about = {process: {"max_events_per_lane": self._max_events, "lost_events": lost}}
        yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
        names: list[tuple[int, str, dict[str, Any]]] = [(0, "process_name", {"name": process})]
        names.append((0, "process_sort_index", {"sort_index": self._rank}))
        if lost:
            names.append((0, "process_labels", {"labels": f"not all spans kept, missing: {lost}"}))
        for number, track in enumerate(tracks):
            order = LANES.index(track.lane) if track.lane in LANES else len(LANES) + number
            names.append((number, "thread_name", {"name": track.lane}))
            names.append((number, "thread_sort_index", {"sort_index": order}))
        yield ",\n".join(
            json.dumps({"ph": "M", "pid": self._rank, "tid": number, "name": name, "args": args})
            for number, name, args in names
        )
        for number, track in enumerate(tracks):
            head = f',\n{{"ph":"X","pid":{self._rank},"tid":{number},"ts":'
            for category, name, start_ns, end_ns, args in list(track.events):  # the lane may be adding
                # Written by hand: a float of microseconds since 1970 would be rounded to a quarter of one.
                timing = f'{_microseconds(start_ns + self._to_epoch_ns)},"dur":{_microseconds(end_ns - start_ns)}'
                what = f'"cat":"{category}","name":{json.dumps(name)}'
                yield f'{head}{timing},{what},"args":{json.dumps(args, default=str)}}}'
        yield "\n]}\n"


def _microseconds(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"
