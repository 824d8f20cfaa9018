"""Anonymous shared memory as the planes make it, pinned for a while."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dvla.planes.slots import create_memory, map_memory
from dvla.runtime.device import pin, unpin

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import torch


def shared_memory(num_bytes: int) -> np.ndarray:
    """(num_bytes,) uint8 of a memfd, all pages there, all ones."""
    descriptor = create_memory("dvla-check", num_bytes)
    memory = map_memory(descriptor, num_bytes)
    os.close(descriptor)
    memory[:] = 1
    return memory


@contextmanager
def pinned(memory: np.ndarray, device: torch.device) -> Iterator[None]:
    """Keep `memory` page-locked."""
    pin(memory, device)
    try:
        yield
    finally:
        unpin(memory, device)
