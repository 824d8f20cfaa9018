"""Ctrl-C, SIGTERM and SIGUSR1: the first asks the run to stop at a step it can go on from, the second leaves at once."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

from dvla.planes.semaphore import StopFlag

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SAME_PRESS_S = 3.0  # a terminal's Ctrl-C reaches a rank twice: directly, and again through torchrun


class StopRequest(StopFlag):
    """Set by a signal; the grpo lanes of all ranks agree on it and stop at the same step.

    Python runs a signal's handler on the main thread, once that is back from whatever library it is in: from a collective
    perhaps never. So the handlers do nothing, and a thread reads the signals' numbers from a socket that the interpreter
    writes them to at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first = 0.0

    def install(self) -> None:
        """Handle the signals from now on; main thread only."""
        told, self._teller = socket.socketpair()
        self._teller.setblocking(False)
        signal.set_wakeup_fd(self._teller.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda _number, _frame: None)
        threading.Thread(target=self._listen, args=(told,), name="dvla-signals", daemon=True).start()

    def _listen(self, told: socket.socket) -> None:
        while numbers := told.recv(1):
            if numbers[0] in SIGNALS:
                self._handle(numbers[0])

    def _handle(self, number: int) -> None:
        now = time.monotonic()
        if not self.is_set():
            self._first = now
            self.set()
        elif now - self._first > _SAME_PRESS_S:
            os.write(2, b"dvla: second signal, leaving at once\n")
            os._exit(128 + number)
