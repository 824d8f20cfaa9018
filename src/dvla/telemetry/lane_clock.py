"""How long a lane worked and how long it waited.

A lane is at any moment busy, waiting or idle. One thread, the lane's, moves its clock from one to the next;
another may read it at any time. What they share is one immutable tuple, replaced as a whole: a reader never
sees half a change, and a wait that is still going on counts up to the moment of reading.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class _Activity(Enum):
    idle = auto()
    busy = auto()
    waiting = auto()


class _State(NamedTuple):
    busy_s: float
    wait_s: float
    items: int
    activity: _Activity
    since: float

    def at(self, now: float, activity: _Activity | None = None) -> _State:
        """Count what has been going on up to `now`, when `activity` follows (None: the same goes on)."""
        busy_s, wait_s, items, before, since = self
        if before is _Activity.busy:
            busy_s += now - since
        elif before is _Activity.waiting:
            wait_s += now - since
        return _State(busy_s, wait_s, items, activity or before, now)


@dataclass(frozen=True, slots=True)
class LaneUse:
    """What a lane did in some stretch of time."""

    wall_s: float
    busy_s: float
    wait_s: float
    items: int

    @property
    def busy_frac(self) -> float:
        """Share of the time the lane worked, in [0, 1]; the rest is the lane's bubble."""
        return min(1.0, max(0.0, self.busy_s / self.wall_s)) if self.wall_s > 0 else 0.0

    @property
    def items_per_s(self) -> float:
        """Pieces of work done per second."""
        return self.items / self.wall_s if self.wall_s > 0 else 0.0


class LaneClock:
    """Accounts for the time of one lane.

    `start`, `busy`, `waiting`, `add_wait`, `count` and `stop` are for whoever runs the lane, one thread at a
    time; `total` and `delta` may be called from another thread, `delta` from one only.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._state = _State(0.0, 0.0, 0, _Activity.idle, clock())
        self._begun = self._read_at = self._state.since
        self._ended: float | None = None
        self._last = self._state

    def start(self, *, busy: bool = True) -> None:
        """Begin to count, from zero.

        Args:
            busy: A lane with a thread of its own is busy whenever it does not wait. Lanes that take turns on
                one thread pass False, and say when it is their turn with `busy`.
        """
        now = self._clock()
        self._state = _State(0.0, 0.0, 0, _Activity.busy if busy else _Activity.idle, now)
        self._begun = self._read_at = now
        self._ended = None
        self._last = self._state

    def stop(self) -> None:
        """End the count: what is read later says how it was now."""
        self._switch(_Activity.idle)
        self._ended = self._state.since

    def _switch(self, activity: _Activity) -> _Activity:
        before = self._state
        self._state = before.at(self._clock(), activity)
        return before.activity

    def busy(self) -> _During:
        """Count a ``with`` block as work, except for the waits inside it."""
        return _During(self, _Activity.busy)

    def waiting(self) -> _During:
        """Count a ``with`` block as waiting, not as the work around it."""
        return _During(self, _Activity.waiting)

    def add_wait(self, seconds: float) -> None:
        """Count a wait measured elsewhere that has just ended; the work around it is that much less."""
        busy_s, wait_s, items, activity, since = self._state
        self._state = _State(busy_s, wait_s + seconds, items, activity, since + seconds)

    def count(self, items: int = 1) -> None:
        """Count pieces of work done."""
        busy_s, wait_s, before, activity, since = self._state
        self._state = _State(busy_s, wait_s, before + items, activity, since)

    def total(self) -> LaneUse:
        """Read everything since `start`."""
        state = self._state  # before the time: the lane may move on in between
        now = self._now()
        state = state.at(now)
        return LaneUse(now - self._begun, state.busy_s, state.wait_s, state.items)

    def delta(self) -> LaneUse:
        """Read what is new since the last call, or since `start`."""
        state = self._state  # before the time: the lane may move on in between
        now = self._now()
        state = state.at(now)
        last, self._last = self._last, state
        wall_s, self._read_at = now - self._read_at, now
        return LaneUse(wall_s, state.busy_s - last.busy_s, state.wait_s - last.wait_s, state.items - last.items)

    def _now(self) -> float:
        return self._clock() if self._ended is None else self._ended


class _During:
    """A ``with`` block of one activity; what went on before goes on after it."""

    __slots__ = ("_activity", "_before", "_lane")

    def __init__(self, lane: LaneClock, activity: _Activity) -> None:
        self._lane, self._activity = lane, activity

    def __enter__(self) -> None:
        self._before = self._lane._switch(self._activity)

    def __exit__(self, *_: object) -> None:
        self._lane._switch(self._before)
