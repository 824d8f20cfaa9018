"""How long a lane worked and how long it waited.

A lane is at any moment busy, waiting or idle. One thread, the lane's, moves its clock from one to the next;
another may read it at any time. What they share is one immutable tuple, replaced as a whole: a reader never
sees half a change, and a wait that is still going on counts up to the moment of reading.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple

_Activity = Literal["idle", "busy", "waiting"]


class _State(NamedTuple):
    """What counts so far, and what has been going on since when."""

    busy_s: float
    wait_s: float
    items: int
    activity: _Activity
    since: float

    def at(self, now: float, activity: _Activity | None = None) -> _State:
        """Count what has been going on up to `now`, when `activity` follows (None: the same goes on)."""
        busy_s, wait_s, items, before, since = self
        if before == "busy":
            busy_s += now - since
        elif before == "waiting":
            wait_s += now - since
        return _State(busy_s, wait_s, items, activity or before, now)


class LaneUse(NamedTuple):
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
        self.start(busy=False)

    def start(self, *, busy: bool = True) -> None:
        """Begin to count, from zero.

        Args:
            busy: A lane with a thread of its own is busy whenever it does not wait. Lanes that take turns on
                one thread pass False, and say when it is their turn with `busy`.
        """
        self._begun = self._clock()
        self._ended: float | None = None
        self._state = _State(0.0, 0.0, 0, "busy" if busy else "idle", self._begun)
        self._last = LaneUse(0.0, 0.0, 0.0, 0)  # as `delta` read it

    def stop(self) -> None:
        """End the count: what is read later says how it was now."""
        self._switch("idle")
        self._ended = self._state.since

    def busy(self) -> AbstractContextManager[None]:
        """Count a ``with`` block as work, except for the waits inside it."""
        return self._during("busy")

    def waiting(self) -> AbstractContextManager[None]:
        """Count a ``with`` block as waiting, not as the work around it."""
        return self._during("waiting")

    @contextmanager
    def _during(self, activity: _Activity) -> Iterator[None]:
        before = self._state.activity
        self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, activity: _Activity) -> None:
        self._state = self._state.at(self._clock(), activity)

    def add_wait(self, seconds: float) -> None:
        """Count a wait measured elsewhere that has just ended; the work around it is that much less."""
        state = self._state
        self._state = state._replace(wait_s=state.wait_s + seconds, since=state.since + seconds)

    def count(self, items: int = 1) -> None:
        """Count pieces of work done."""
        busy_s, wait_s, before, activity, since = self._state
        self._state = _State(busy_s, wait_s, before + items, activity, since)

    def total(self) -> LaneUse:
        """Read everything since `start`."""
        state = self._state  # before the time: the lane may move on in between
        state = state.at(self._clock() if self._ended is None else self._ended)
        return LaneUse(state.since - self._begun, state.busy_s, state.wait_s, state.items)

    def delta(self) -> LaneUse:
        """Read what is new since the last call, or since `start`."""
        last, now = self._last, self.total()
        self._last = now
        return LaneUse(*map(operator.sub, now, last))
