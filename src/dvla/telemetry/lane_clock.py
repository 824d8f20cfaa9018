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

_Activity = Literal["stopped", "idle", "busy", "waiting"]


class LaneUse(NamedTuple):
    """What a lane did in some stretch of time."""

    wall_s: float = 0.0
    busy_s: float = 0.0
    wait_s: float = 0.0
    items: int = 0

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

    `start`, `busy`, `waiting`, `count` and `stop` are for whoever runs the lane, one thread at a time; `total` and
    `delta` may be called from another thread, `delta` from one only.

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
        self._last = LaneUse()  # as `delta` read it
        # What counts so far, and what has been going on since when.
        self._state: tuple[LaneUse, _Activity, float] = LaneUse(), "busy" if busy else "idle", self._clock()

    def stop(self) -> None:
        """End the count: what is read later says how it was now."""
        self._switch("stopped")

    def busy(self) -> AbstractContextManager[None]:
        """Count a ``with`` block as work, except for the waits inside it."""
        return self._during("busy")

    def waiting(self) -> AbstractContextManager[None]:
        """Count a ``with`` block as waiting, not as the work around it."""
        return self._during("waiting")

    @contextmanager
    def _during(self, activity: _Activity) -> Iterator[None]:
        before = self._state[1]
        self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, activity: _Activity) -> None:
        use, now = self._read()
        self._state = use, activity, now

    def _read(self) -> tuple[LaneUse, float]:
        """What counts up to now, and now."""
        use, activity, since = self._state  # before the time: the lane may move on in between
        now = self._clock()
        if activity != "stopped":
            busy_s = use.busy_s + (now - since if activity == "busy" else 0)
            wait_s = use.wait_s + (now - since if activity == "waiting" else 0)
            use = LaneUse(use.wall_s + now - since, busy_s, wait_s, use.items)
        return use, now

    def count(self, items: int = 1) -> None:
        """Count pieces of work done."""
        use, activity, since = self._state
        self._state = use._replace(items=use.items + items), activity, since

    def total(self) -> LaneUse:
        """Read everything since `start`."""
        return self._read()[0]

    def delta(self) -> LaneUse:
        """Read what is new since the last call, or since `start`."""
        last, self._last = self._last, self.total()
        return LaneUse(*map(operator.sub, self._last, last))
