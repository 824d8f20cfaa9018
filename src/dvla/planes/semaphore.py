"""Semaphores that lanes meet at: bounded, named, selectable, and open to a stop.

Each is an ``eventfd`` in semaphore mode, so that a lane can wait for several of them and for sockets in one ``poll``, and a
waiting thread holds no lock and no GIL. Every wait ends at once when the run stops, and gives up with the names of who
waited for what when its time is over.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818 - not an error: the run ends and waits must not go on
    """The run is stopping; a lane that gets this leaves its loop."""


class WaitTimeoutError(TimeoutError):
    """A lane waited longer than it may; the message names the lane, the semaphore and the time."""


class StopFlag:
    """Set once when the lanes must stop; wakes every wait of the rank."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_set = False  # a bare flag: it is set from signal handlers, where a lock could be held already

    def fileno(self) -> int:
        """Descriptor that is readable for ever once the flag is set."""
        return self._fd

    def __del__(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def set(self) -> None:
        """Stop all waits, now and later."""
        self._is_set = True
        os.eventfd_write(self._fd, 1)  # never read, so it stays readable

    def is_set(self) -> bool:
        """Whether the run is stopping."""
        return self._is_set


class Semaphore:
    """A counting semaphore between threads of one rank.

    Args:
        name: Its name in design and diagnostics.
        initial: Permits at the start.
        stop: The rank's stop flag.
        timeout_s: How long `acquire` waits before it gives up.
    """

    def __init__(self, name: str, initial: int, stop: StopFlag, timeout_s: float) -> None:
        self.name = name
        self._stop = stop
        self._timeout_s = timeout_s
        self._fd = os.eventfd(initial, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._poll.register(stop.fileno(), select.POLLIN)

    def __del__(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def fileno(self) -> int:
        """Descriptor that is readable while a permit is free."""
        return self._fd

    def release(self, count: int = 1) -> None:
        """Add `count` permits."""
        if count:
            os.eventfd_write(self._fd, count)

    def try_acquire(self) -> bool:
        """Take a permit if one is free; never waits."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return False
        return True

    def acquire(self, waiting_for: str = "") -> None:
        """Take a permit, waiting for one if needed; only one thread at a time may wait.

        Raises:
            Stopped: The run is stopping.
            WaitTimeoutError: No permit came in time.
        """
        if not self.acquire_within(self._timeout_s):
            lane = threading.current_thread().name.removeprefix("dvla-")
            raise WaitTimeoutError(
                f"lane {lane} waited {self._timeout_s:.0f} s for semaphore `{self.name}`"
                + (f" ({waiting_for})" if waiting_for else "")
                + "; raise runtime.wait_timeout_s if the work can take that long"
            )

    def acquire_within(self, seconds: float) -> bool:
        """Take a permit within `seconds`; False when none came.

        Raises:
            Stopped: The run is stopping.
        """
        deadline = time.monotonic() + seconds
        while True:
            if self._stop.is_set():
                raise Stopped
            if self.try_acquire():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._poll.poll(left * 1e3 + 1)

    def value(self) -> int:
        """Free permits, for diagnostics."""
        with open(f"/proc/self/fdinfo/{self._fd}") as info:  # noqa: PTH123 - a kernel file, not a path of ours
            for line in info:
                if line.startswith("eventfd-count:"):
                    return int(line.split()[1], 16)
        raise RuntimeError("this kernel shows no eventfd counts")


class Selectable(Protocol):
    """Anything with a descriptor: a semaphore, a stop flag, a socket."""

    def fileno(self) -> int:
        """The descriptor."""


def wait_any(sources: Sequence[Selectable], seconds: float) -> list[Selectable]:
    """Wait until one of `sources` is readable; takes nothing. Those that are: none, if none became so within `seconds`."""
    poll = select.poll()
    for source in sources:
        poll.register(source.fileno(), select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1e3)}
    return [source for source in sources if source.fileno() in ready] if ready else []


class Channel(Generic[T]):
    """A bounded queue whose semaphore counts the items; first in, first out."""

    def __init__(self, name: str, capacity: int, stop: StopFlag, timeout_s: float) -> None:
        self.semaphore = Semaphore(name, 0, stop, timeout_s)
        self._capacity = capacity
        self._items: deque[T] = deque()

    def __len__(self) -> int:
        """Items waiting."""
        return len(self._items)

    def put(self, item: T) -> None:
        """Append an item and wake the consumer.

        Raises:
            OverflowError: More items than the protocol can produce: a fault of the program, not of the load.
        """
        if len(self._items) >= self._capacity:
            raise OverflowError(f"channel `{self.semaphore.name}` holds {self._capacity} items already")
        self._items.append(item)
        self.semaphore.release()

    def get(self, waiting_for: str = "") -> T:
        """Take the oldest item, waiting for one; raises as `Semaphore.acquire`."""
        self.semaphore.acquire(waiting_for)
        return self._items.popleft()

    def get_within(self, seconds: float) -> T | None:
        """Take the oldest item if one comes within `seconds`."""
        return self._items.popleft() if self.semaphore.acquire_within(seconds) else None

    def try_get(self) -> T | None:
        """Take the oldest item if there is one; never waits."""
        return self._items.popleft() if self.semaphore.try_acquire() else None
