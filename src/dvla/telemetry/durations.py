"""How long something took each time: how often, the last time, and on average, however often it was."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Durations:
    """Added to by one thread; another may read."""

    count: int = 0
    total: float = 0.0
    last: float = 0.0

    def add(self, seconds: float) -> None:
        """Take in one more."""
        self.last = seconds
        self.total += seconds
        self.count += 1

    def mean(self) -> float | None:
        """Seconds on average; None before the first."""
        return self.total / self.count if self.count else None
