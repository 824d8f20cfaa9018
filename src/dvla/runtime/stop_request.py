"""Ctrl-C, SIGTERM and SIGUSR1: the first asks the run to stop at a step it can go on from, the second leaves at once."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from dvla.planes.semaphore import StopFlag

if TYPE_CHECKING:
    from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SAME_PRESS_S = 3.0  # a terminal's Ctrl-C reaches a rank twice: directly, and again through torchrun


class StopRequest(StopFlag):
    """Set by a signal; the grpo lanes of all ranks agree on it and stop at the same step."""

    def __init__(self) -> None:
        super().__init__()
        self._first = 0.0

    def install(self) -> None:
        """Handle the signals from now on; main thread only."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.is_set():
            self._first = now
            self.set()
        elif now - self._first > _SAME_PRESS_S:
            os.write(2, b"dvla: second signal, leaving at once\n")
            os._exit(128 + number)
