"""How long work on a device takes, and how fast bytes move."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def finish(device: torch.device) -> None:
    """Wait for all work of `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Median wall time of `work` to its end on the device, after one call that does not count."""
    work()
    finish(device)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        finish(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def gigabytes_per_second(work: Callable[[], object], num_bytes: int, device: torch.device) -> float:
    """Bytes that `work` moves, over its median wall time."""
    return num_bytes / median_seconds(work, device) / 1e9
