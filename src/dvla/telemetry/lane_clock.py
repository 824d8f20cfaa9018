"""How long a lane worked and how long it waited, at what it is, and when it last got on.

A lane is at any moment busy, waiting or idle. One thread, the lane's, moves its clock from one to the next;
another may read it at any time. What they share is one immutable tuple, replaced as a whole: a reader never
sees half a change, and a wait that is still going on counts up to the moment of reading.

A lane that gets on beats: with every piece of work it counts, and by itself within long ones. To wait anew is no beat.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple

from dvla.telemetry.trace import Tracer

_Activity = Literal["stopped", "idle", "busy", "waiting"]
_NO_SPAN = nullcontext()


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


class Doing(NamedTuple):
    """At what a lane is."""

    what: str = ""
    whom: str = ""
    """The name of the lane that must do something before this one goes on, on this rank or another."""
    is_patient: bool = False
    """Whether nobody can tell how long it may take without a beat."""


class LaneClock:
    """Accounts for the time of one lane.

    `start`, `busy`, `waiting`, `doing`, `count`, `beat` and `stop` are for whoever runs the lane, one thread at a time; all
    else may be called from another thread, `delta` from one only.

    Args:
        clock: Monotonic clock, in seconds.
        tracer: Records waits, and the turns of lanes that share a thread.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, tracer: Tracer | None = None) -> None:
        self._clock, self._tracer = clock, tracer or Tracer(0, enabled=False)
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
        self.now = Doing()
        """At what the lane is."""
        self._beats = 0, self._clock()  # how many, and when the last one was

    def stop(self) -> None:
        """End the count: what is read later says how it was now."""
        self._switch("stopped")

    def busy(self) -> AbstractContextManager[None]:
        """Count a ``with`` block as work, except for the waits inside it."""
        return self._during("busy", Doing(), self._tracer.turn())

    def waiting(self, what: str = "", whom: str = "", *, is_patient: bool = False) -> AbstractContextManager[None]:
        """Count a ``with`` block as waiting for `whom` to do `what`, not as the work around it."""
        return self._during("waiting", Doing(what, whom, is_patient), self._tracer.wait(what, whom))

    def doing(self, what: str, whom: str = "", *, is_patient: bool = False) -> AbstractContextManager[None]:
        """Say what a ``with`` block does; a collective is the work of this lane, for which it needs `whom` on other ranks."""
        return self._during(None, Doing(what, whom, is_patient))

    @contextmanager
    def _during(
        self, activity: _Activity | None, doing: Doing, span: AbstractContextManager[None] = _NO_SPAN
    ) -> Iterator[None]:
        before, at_what = self._state[1], self.now
        self.now = doing
        if activity is not None:
            self._switch(activity)
        try:
            with span:
                yield
            self.now = at_what  # at what a lane failed stays to be read
            if doing.is_patient:
                self.beat()
        finally:
            if activity is not None:
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
        self.beat()

    def beat(self) -> None:
        """Show that the lane gets on."""
        self._beats = self._beats[0] + 1, self._clock()

    @property
    def activity(self) -> str:
        """Busy, waiting, idle or stopped."""
        return self._state[1]

    @property
    def beats(self) -> int:
        """Beats so far."""
        return self._beats[0]

    def quiet_s(self) -> float:
        """Seconds since the last beat."""
        return self._clock() - self._beats[1]

    def total(self) -> LaneUse:
        """Read everything since `start`."""
        return self._read()[0]

    def delta(self) -> LaneUse:
        """Read what is new since the last call, or since `start`."""
        last, self._last = self._last, self.total()
        return LaneUse(*map(operator.sub, self._last, last))
