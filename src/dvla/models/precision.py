"""Where computation must not be narrower than float32."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x`, in float32 if its dtype is narrower."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
