"""Processes in simulated time, as coroutines: they work on what they share with others, and wait for bells.

A process is a generator. It yields `Work`, and goes on when that is done, or `Wait`, and goes on when the bell rings or the
time is over. Nothing happens between two yields, so what was looked at before a wait still holds when it begins.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeAlias


class NothingHappensError(RuntimeError):
    """All processes wait for each other."""


@dataclass(slots=True, eq=False)
class Bell:
    """What processes wait for; kept by `Kernel.ring`."""

    waiting: list[tuple[_Task, int]] = field(default_factory=list)


class Resource:
    """Serves any number at once, each at full speed up to `capacity` of them, beyond that all equally slower."""

    def __init__(self, capacity: float = math.inf) -> None:
        self._capacity = capacity
        self._served = self._since = 0.0  # seconds of full speed that each present one has had, and up to when
        self._present: list[tuple[float, int, _Task]] = []  # by what they leave at

    def enter(self, now: float, seconds: float, number: int, task: _Task) -> None:
        """Begin to serve `task` for `seconds` of full speed."""
        self._advance(now)
        heapq.heappush(self._present, (self._served + seconds, number, task))

    def next_end(self) -> float:
        """When the next one is served, if none comes before that; infinite while there is none."""
        return self._since + (self._present[0][0] - self._served) / self._speed() if self._present else math.inf

    def leave(self, now: float) -> _Task:
        """Who is served at `now`, which is `next_end`."""
        self._advance(now)
        self._served, _, task = heapq.heappop(self._present)
        return task

    def _speed(self) -> float:
        return min(1.0, self._capacity / len(self._present))

    def _advance(self, now: float) -> None:
        if self._present:
            self._served += (now - self._since) * self._speed()
        self._since = now


@dataclass(frozen=True, slots=True)
class Work:
    """Take `seconds` of a resource."""

    resource: Resource
    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a bell, at most so many seconds."""

    bell: Bell
    seconds: float = math.inf


Process: TypeAlias = Generator[Work | Wait, None, None]


@dataclass(slots=True, eq=False)
class _Task:
    process: Process
    waits: int = 0
    """How often it has gone on: a ring or time-out that was meant for an earlier wait is void."""


class Kernel:
    """Lets processes go on in the order of time; those of one moment in the order they were called.

    Args:
        resources: All that processes work on.
    """

    def __init__(self, resources: list[Resource]) -> None:
        self.now = 0.0
        self._resources = resources
        self._count = itertools.count()
        self._ready: deque[_Task] = deque()
        self._timers: list[tuple[float, int, _Task, int]] = []

    def start(self, process: Process) -> None:
        """Begin a process."""
        self._ready.append(_Task(process))

    def ring(self, bell: Bell) -> None:
        """Wake all that wait for `bell` now."""
        waiting, bell.waiting = bell.waiting, []
        for task, waits in waiting:
            self._wake(task, waits)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Go on until it is over.

        Raises:
            NothingHappensError: It never will be.
        """
        while not is_over():
            if self._ready:
                self._go_on(self._ready.popleft())
                continue
            resource = min(self._resources, key=Resource.next_end)
            end = resource.next_end()
            if self._timers and self._timers[0][0] <= end:
                self.now, _, task, waits = heapq.heappop(self._timers)
                self._wake(task, waits)
            elif end < math.inf:
                self.now = end
                self._ready.append(resource.leave(end))
            else:
                raise NothingHappensError(f"after {self.now:.3f} simulated seconds all lanes wait for each other")

    def _wake(self, task: _Task, waits: int) -> None:
        if task.waits == waits:
            task.waits += 1
            self._ready.append(task)

    def _go_on(self, task: _Task) -> None:
        request = next(task.process, None)
        if isinstance(request, Work):
            request.resource.enter(self.now, request.seconds, next(self._count), task)
        elif isinstance(request, Wait):
            request.bell.waiting.append((task, task.waits))
            if request.seconds < math.inf:
                timer = (self.now + request.seconds, next(self._count), task, task.waits)
                heapq.heappush(self._timers, timer)
