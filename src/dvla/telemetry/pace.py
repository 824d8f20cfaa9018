"""How fast optimiser steps come, and when the last of them will."""

from __future__ import annotations

from collections import deque

_WINDOW = 20  # steps the estimate looks back on: a run changes its speed as episodes get shorter


class Pace:
    """Estimates the time left.

    Args:
        total_steps: Optimiser steps of the whole run.
        policy_version: Steps done when the clock starts.
        now: The time then, in seconds.
    """

    def __init__(self, total_steps: int, policy_version: int, now: float) -> None:
        self.total_steps, self.policy_version = total_steps, policy_version
        self._marks: deque[tuple[int, float]] = deque([(policy_version, now)], maxlen=_WINDOW + 1)

    def step(self, policy_version: int, now: float) -> None:
        """Take note of a step."""
        self.policy_version = policy_version
        self._marks.append((policy_version, now))

    def seconds_left(self, now: float) -> float | None:
        """Estimate the time left; None before the first step."""
        (first, begin), (last, end) = self._marks[0], self._marks[-1]
        if last <= first:
            return None
        seconds_a_step = (end - begin) / (last - first)
        # Between steps the time runs down, but not while an evaluation, say, holds up the next one.
        since = min(now - end, seconds_a_step)
        return max(0.0, (self.total_steps - last) * seconds_a_step - since)
