"""A version of the weights as its difference from the one before: exact, and small where most of the bits stay.

In bf16, steps of a small learning rate are below the resolution of most parameters, which then do not change at all. For every
block of words the message holds one bit a word, set where the word differs, and then the words that do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

BLOCK = 1 << 22
"""Words compared at a time: bounds what this needs beside the message."""
_WORDS = {2: torch.int16, 4: torch.int32}  # compared as integers: a NaN equals itself, 0 is not -0


def encode(new: Sequence[Tensor], old: Sequence[Tensor], itemsize: int) -> Tensor:
    """What turns `old` into `new`.

    Args:
        new: Parts of a host buffer, uint8, whole words each.
        old: The same parts of another.
        itemsize: Bytes of a word, 2 or 4.

    Returns:
        The message, uint8; longer than the parts when nearly all has changed.
    """
    parts = []
    for after, before in zip(_blocks(new, itemsize), _blocks(old, itemsize), strict=True):
        changed = after != before
        parts += [torch.from_numpy(np.packbits(changed.numpy())), after[changed].view(torch.uint8)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def decode(message: Tensor, out: Sequence[Tensor], old: Sequence[Tensor], itemsize: int) -> None:
    """Write to the parts `out` what `message` makes of the parts `old`, as in `encode`.

    Raises:
        ValueError: The message is of other parts.
    """
    at = 0
    for after, before in zip(_blocks(out, itemsize), _blocks(old, itemsize), strict=True):
        size = -(-len(after) // 8)
        bits = message[at : at + size].numpy()
        changed = torch.from_numpy(np.unpackbits(bits, count=len(after)).view(bool))
        at += size
        size = int(changed.sum()) * itemsize
        after.copy_(before)
        if at + size <= len(message):
            after[changed] = _words(message[at : at + size].clone(), itemsize)  # a copy lies at a multiple of itemsize
        at += size
    if at != len(message):
        raise ValueError(f"a difference of {len(message)} bytes was sent where {at} belong")


def _blocks(parts: Sequence[Tensor], itemsize: int) -> Iterator[Tensor]:
    for part in parts:
        yield from _words(part, itemsize).split(BLOCK)


def _words(part: Tensor, itemsize: int) -> Tensor:
    return part.view(_WORDS[itemsize])
