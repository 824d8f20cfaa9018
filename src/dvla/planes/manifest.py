"""The layout of the weights that travel: every trainable parameter at a fixed offset of one contiguous buffer."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One parameter: its full (unsharded) shape and where it lies, in bytes."""

    name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All parameters that travel, in the one order of ``named_parameters`` of the unsharded model."""

    entries: tuple[ManifestEntry, ...]
    dtype: torch.dtype
    num_bytes: int

    def digest(self) -> int:
        """63-bit hash of the whole layout; equal on all ranks of a sound run."""
        text = repr((str(self.dtype), [(e.name, e.shape, e.offset) for e in self.entries]))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def view(self, buffer: Tensor, entry: ManifestEntry) -> Tensor:
        """The parameter `entry` inside a byte buffer (num_bytes,) uint8, sharing its memory."""
        return buffer[entry.offset : entry.offset + entry.num_bytes].view(self.dtype).view(entry.shape)

    def extent(self, entry: ManifestEntry, start: int, stop: int) -> tuple[int, int]:
        """First and last-but-one byte of rows [start, stop) of `entry`; the last row takes the padding behind it along."""
        row = entry.num_bytes // entry.shape[0]
        end = entry.offset + (row * stop if stop < entry.shape[0] else _align(entry.num_bytes))
        return entry.offset + row * start, end


def make_manifest(policy: nn.Module, dtype: torch.dtype) -> Manifest:
    """The manifest of a plain policy whose weights travel as `dtype`; frozen parameters have no place in it."""
    entries, offset = [], 0
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            num_bytes = math.prod(parameter.shape) * dtype.itemsize
            entries.append(ManifestEntry(name, tuple(parameter.shape), offset, num_bytes))
            offset += _align(num_bytes)
    return Manifest(tuple(entries), dtype, offset)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
