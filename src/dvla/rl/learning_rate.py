"""How the learning rate goes through a run."""

from __future__ import annotations

import math
from typing import Literal

LrSchedule = Literal["constant", "linear", "cosine"]


def lr_factor(step: int, *, warmup_steps: int, num_steps: int, schedule: LrSchedule) -> float:
    """Share of the full rate that the optimiser step takes which follows `step` others, in (0, 1].

    After a linear warm-up comes `schedule`; `linear` and `cosine` would reach 0 at `num_steps`, one step after the last, so
    that what noisy gradients did is averaged out in the end.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    part = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return {"constant": 1.0, "linear": 1.0 - part, "cosine": 0.5 * (1.0 + math.cos(math.pi * part))}[schedule]
