"""What all lanes share: a loop on a named thread that steps until the run stops, and accounts for its time."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from dvla.planes.semaphore import StopFlag, Stopped

if TYPE_CHECKING:
    from dvla.telemetry.lane_clock import LaneClock
    from dvla.telemetry.trace import Tracer


class ErrorBoard:
    """The first error of any lane of this rank, kept; later ones are consequences and only logged."""

    def __init__(self, stop: StopFlag) -> None:
        self._stop = stop
        self._lock = threading.Lock()
        self.first: tuple[str, BaseException] | None = None
        """(lane, exception)."""

    def report(self, lane: str, error: BaseException) -> None:
        """Record an error and stop all lanes of the rank."""
        with self._lock:
            if self.first is None:
                self.first = (lane, error)
        self._stop.set()


class Lane(ABC):
    """A lane of a rank. `step` does one piece of work; `run` repeats it on a thread of its own."""

    name: str

    def __init__(self, clock: LaneClock, tracer: Tracer) -> None:
        self.clock = clock
        self.tracer = tracer

    @abstractmethod
    def step(self) -> None:
        """Do one piece of work, waiting for what it needs.

        Raises:
            Stopped: The run is stopping, or this lane has nothing more to do.
        """

    def start(self, errors: ErrorBoard) -> threading.Thread:
        """Run the lane on its thread until the run stops; its first error stops the run."""

        def loop() -> None:
            try:
                while True:
                    self.step()
            except Stopped:
                pass
            except BaseException as error:
                errors.report(self.name, error)

        thread = threading.Thread(target=loop, name=f"dvla-{self.name}", daemon=True)
        thread.start()
        return thread
