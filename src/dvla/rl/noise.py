"""Counter-based noise: every random number of a decision is a pure function of its key.

A key names one decision of one episode. Because nothing else enters, the noise of a decision is the same whatever batch,
worker, rank or resume it is made in, and no generator state has to be saved. The mixer is splitmix64 (Steele, Lea, Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the constants of splitmix64 as signed 64-bit integers
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


Integers = TypeVar("Integers", Tensor, np.ndarray)


def _shift_right(x: Integers, bits: int) -> Integers:
    """Logical right shift of int64 (the operator's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Integers) -> Integers:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def decision_keys(seed: int, tickets: Tensor, decisions: Tensor) -> Tensor:
    """Keys (B,) int64 of the decisions numbered `decisions` within the episodes of `tickets` (both (B,) int64, host)."""
    # By NumPy: for a few numbers its operations cost a third of torch's, and they lie between observation and action.
    ticket, decision = tickets.numpy(), decisions.numpy()
    key = _mix(np.full_like(ticket, seed) * _GOLDEN + _MIX_1)
    key = _mix(key + ticket * _GOLDEN)
    return torch.from_numpy(_mix(key + decision * _GOLDEN))


def uniform(keys: Tensor, *shape: int, stream: int = 0) -> Tensor:
    """Uniform noise (B, *shape) float32 in the open interval (0, 1); `stream` tells apart several draws for one key."""
    count, first = math.prod(shape), 1 + (stream << 32)  # streams never overlap, whatever their shapes
    index = torch.arange(first, first + count, device=keys.device)
    bits = _shift_right(_mix(keys[:, None] + index[None, :] * _GOLDEN), 41)  # 23 bits: exact in float32
    return ((bits.float() + 0.5) * 2.0**-23).view(keys.shape[0], *shape)


def normal(keys: Tensor, *shape: int, stream: int = 0) -> Tensor:
    """Standard normal noise (B, *shape) float32 by the Box-Muller transform, of uniform streams 2s and 2s + 1."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(keys, *shape, stream=2 * stream)))
    return radius * torch.cos((2.0 * math.pi) * uniform(keys, *shape, stream=2 * stream + 1))
