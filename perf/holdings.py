"""What processes hold, as the kernel sees it from outside, and whether it grows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from scipy import stats

KINDS = ("rss_mib", "shared_mib", "descriptors", "threads", "segments", "children")
"""Resident memory; the part of it that is shared memory, divided among who maps it; open descriptors; threads; mappings of
shared memory; processes below this one."""
BLOCKS = 10
"""Neighbouring samples depend on each other (memory grows in jumps), so a line is fitted to the means of so many blocks."""


def holdings(process: psutil.Process) -> dict[str, float]:
    """What a process holds, by `KINDS`."""
    folder = Path(f"/proc/{process.pid}")
    kib = {
        key: int(value)
        for key, value in re.findall(
            r"^(Rss|Pss_Shmem): +(\d+) kB$", (folder / "smaps_rollup").read_text(), re.MULTILINE
        )
    }
    # Libraries and files of an address space are private mappings; shared ones ("s") are memory of several processes.
    segments = re.findall(r"^\S+ ...s .*$", (folder / "maps").read_text(), re.MULTILINE)
    return {
        "rss_mib": kib["Rss"] / 1024,
        "shared_mib": kib["Pss_Shmem"] / 1024,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "segments": len(segments),
        "children": len(process.children()),
    }


class Growth(NamedTuple):
    """The line through a series."""

    slope: float
    """Per unit of x."""
    half_width: float
    """Of the 95 % interval of the slope."""


def growth(x: Sequence[float], y: Sequence[float]) -> Growth:
    """Fit a line by least squares to the means of `BLOCKS` blocks of the samples."""
    xs, ys = (np.array([block.mean() for block in np.array_split(np.asarray(v, float), BLOCKS)]) for v in (x, y))
    fit = stats.linregress(xs, ys)
    return Growth(float(fit.slope), float(stats.t.ppf(0.975, BLOCKS - 2) * fit.stderr) if np.ptp(ys) else 0.0)
