"""What a run remembers of its batches, in memory that does not grow: the first, the last, and the course of success."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Batch = Mapping[str, float | None]

FIRST_BATCHES, LAST_BATCHES = 3, 30
"""Batches that are kept as they were."""
_POINTS = 256


class Course:
    """A series of any length: the means of at most 512 stretches of equal length, and of the values after them.

    Up to 511 values every stretch is a value. Then neighbours are joined, so what is read is exact but for the borders
    of stretches.
    """

    def __init__(self) -> None:
        self._width = 1
        self._means: list[float] = []  # of so many values each
        self._sum, self._num_rest = 0.0, 0  # of the values after them

    def __len__(self) -> int:
        """Values so far."""
        return self._width * len(self._means) + self._num_rest

    def add(self, value: float) -> None:
        """Append a finite value."""
        self._sum, self._num_rest = self._sum + value, self._num_rest + 1
        if self._num_rest < self._width:
            return
        self._means.append(self._sum / self._width)
        self._sum, self._num_rest = 0.0, 0
        if len(self._means) == 2 * _POINTS:
            self._means = [(one + other) / 2 for one, other in zip(self._means[::2], self._means[1::2], strict=True)]
            self._width *= 2

    def points(self) -> list[float]:
        """The means, in order of time."""
        return [*self._means, *([self._sum / self._num_rest] if self._num_rest else [])]

    def mean_of_first(self, count: int) -> float:
        """Mean of the first `count` values, of which there are as many."""
        return self._mean(self.points(), self._lengths(), count)

    def mean_of_last(self, count: int) -> float:
        """Mean of the last `count` values, of which there are as many."""
        return self._mean(self.points()[::-1], self._lengths()[::-1], count)

    def first_last_mean(self, fraction: float = 0.2) -> tuple[float | None, float | None]:
        """Mean of the first and of the last values.

        Args:
            fraction: Share of the values each mean takes, in (0, 1]; at least one value, rounded up. Without values both
                means are None.
        """
        if not len(self):
            return None, None
        count = max(1, math.ceil(len(self) * fraction - 1e-9))  # 0.2 * 15 is a little more than 3
        return self.mean_of_first(count), self.mean_of_last(count)

    def _lengths(self) -> list[int]:
        return [self._width] * len(self._means) + [self._num_rest] * bool(self._num_rest)

    @staticmethod
    def _mean(points: Sequence[float], lengths: Sequence[int], count: int) -> float:
        taken = np.diff(np.minimum(np.cumsum(lengths), count), prepend=0)  # the last stretch in part only
        return math.fsum(taken * np.asarray(points)) / count

    def state(self) -> dict[str, Any]:
        """What `from_state` needs."""
        return {"width": self._width, "means": list(self._means), "sum": self._sum, "num_rest": self._num_rest}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """A course that goes on from `state`."""
        course = cls()
        course._width, course._means = state["width"], list(state["means"])
        course._sum, course._num_rest = state["sum"], state["num_rest"]
        return course


class History:
    """The batches of a run, as `dvla.rl.health` judges them."""

    def __init__(self) -> None:
        self.first: list[Batch] = []
        """Up to `FIRST_BATCHES`."""
        self._last: deque[Batch] = deque(maxlen=LAST_BATCHES)
        self.courses = {"rollout/success_rate": Course(), "rollout/return": Course()}
        """Of all batches, by tag; what was not measured is left out."""
        self.num_batches = 0

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> Self:
        """The history that consists of `batches`."""
        history = cls()
        for batch in batches:
            history.add(batch)
        return history

    def add(self, batch: Batch) -> None:
        """Append a batch: metrics by tag; what is missing, None or not finite was not measured."""
        self.num_batches += 1
        if len(self.first) < FIRST_BATCHES:
            self.first.append(batch)
        self._last.append(batch)
        for tag, course in self.courses.items():
            if (value := batch.get(tag)) is not None and math.isfinite(value):
                course.add(value)

    def last(self, count: int = LAST_BATCHES) -> list[Batch]:
        """The last `count` batches, of at most `LAST_BATCHES`."""
        return list(self._last)[-count:]

    def state(self) -> dict[str, Any]:
        """What `from_state` needs."""
        return {
            "num_batches": self.num_batches,
            "first": [dict(batch) for batch in self.first],
            "last": [dict(batch) for batch in self._last],
            "courses": {tag: course.state() for tag, course in self.courses.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """A history that goes on from `state`."""
        history = cls()
        history.num_batches, history.first = state["num_batches"], list(state["first"])
        history._last.extend(state["last"])
        history.courses = {tag: Course.from_state(state["courses"][tag]) for tag in history.courses}
        return history
