"""What all lanes share: a loop on a named thread that steps until the run stops, and accounts for its time."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from dvla.planes.semaphore import StopFlag, Stopped
from dvla.runtime.failure import Failure, note_lane

if TYPE_CHECKING:
    from collections.abc import Callable

    from dvla.telemetry.lane_clock import LaneClock
    from dvla.telemetry.trace import Tracer


logger = logging.getLogger(__name__)


class ErrorBoard:
    """The first error of any lane of this rank, kept; later ones are consequences and only logged.

    Args:
        stop: The rank's stop flag.
        rank: This rank.
        tell: Told of the first error before the lanes stop, and of one that turns out to have come before it.
    """

    def __init__(
        self, stop: StopFlag, rank: int = 0, tell: Callable[[Failure, BaseException], None] | None = None
    ) -> None:
        self._stop, self._rank, self._tell = stop, rank, tell
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self.first: BaseException | None = None
        """Says in which lane it happened."""

    def report(self, lane: str, error: BaseException) -> None:
        """Record an error and stop all lanes of the rank."""
        note_lane(error, lane)
        failure = Failure.of(self._rank, error)
        later: BaseException | None = error
        try:
            with self._lock:
                if self._failure is None or failure.order < self._failure.order:
                    self._failure, self.first, later = failure, error, self.first
                    if self._tell is not None:
                        self._tell(failure, error)
            if later is not None:
                logger.warning("not the first error:", exc_info=later, extra={"file_only": True})
        finally:
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
