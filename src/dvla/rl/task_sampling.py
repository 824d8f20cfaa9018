"""Which task the next group plays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_FLOOR = 0.1
"""Weight of a task that always succeeds, beside one that always fails with weight 1: nothing is forgotten."""
_MEMORY = 0.8
"""Weight of the past in a task's running success rate; a task's last five groups count most."""


def choose_task(rule: str, group: int, draw: float, success: Sequence[float]) -> int:
    """The task of group number `group`.

    Args:
        rule: "uniform", "in_order" (the suite's order, again and again), or "failure_rate" (the less a task succeeds,
            the more often it is played).
        group: Number of the group.
        draw: Uniform in [0, 1); "in_order" does not need it.
        success: Running success rate of every task.
    """
    if rule == "in_order":
        return group % len(success)
    weights = np.ones(len(success)) if rule == "uniform" else np.maximum(1.0 - np.asarray(success), _FLOOR)
    shares = np.cumsum(weights) / weights.sum()
    return min(int(np.searchsorted(shares, draw, side="right")), len(success) - 1)


def running_success(before: float, success_rate: float) -> float:
    """A task's running success rate after one more group with `success_rate`."""
    return _MEMORY * before + (1.0 - _MEMORY) * success_rate
