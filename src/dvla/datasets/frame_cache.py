"""The decoded pictures of a dataset, in a file that the ranks of a node share and that no one can see.

The system keeps in memory what there is room for. The file loses its name as soon as it is made: it is gone when the last rank
is, whatever ends it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from dvla.config import ConfigError
from dvla.datasets.recorded import DatasetError, RecordedDataset
from dvla.models.resize import resize

if TYPE_CHECKING:
    from dvla.runtime.world import World


def cache_frames(
    dataset: RecordedDataset,
    *,
    image_size: tuple[int, int],
    folder: str | None,
    max_gib: float,
    world: World,
    note: Callable[[int], None],
) -> np.ndarray:
    """Decode all pictures, once a node.

    Args:
        dataset: Whose.
        image_size: Height and width to resize them to.
        folder: Where the file goes; None for the system's folder for temporary files.
        max_gib: Size it may have.
        world: The ranks; collective over all.
        note: Called with the number of episodes decoded.

    Returns:
        (steps, cameras, height, width, 3) uint8, read-only.

    Raises:
        ConfigError: They need more room than there is, or a picture cannot be read; raised on every rank.
    """
    shape = (dataset.num_steps, len(dataset.cameras), *image_size, 3)
    size = int(np.prod(shape))
    if not size:
        return np.zeros(shape, np.uint8)
    if size > max_gib * 2**30:
        raise ConfigError(
            f"the decoded pictures of {dataset.name} take {size / 2**30:.1f} GiB, data.cache_gib is {max_gib:g}: raise it, or "
            "lower data.image_size"
        )
    descriptor, fault = None, None
    if world.local_rank == 0:
        try:
            descriptor = _write(dataset, shape, folder, note)
        except DatasetError as error:
            fault = str(error)
        except OSError as error:
            where = folder or tempfile.gettempdir()
            fault = f"data.cache: {size / 2**30:.1f} GiB of pictures do not go to {where} ({error.strerror})"
    said: list[tuple[int, int | None, str | None]] = [(0, None, None)] * world.world_size
    dist.all_gather_object(said, (os.getpid(), descriptor, fault), group=world.control_pg)
    frames = None
    process, own, _ = said[world.node * world.local_world_size]
    if not any(fault for _, _, fault in said):
        frames = np.memmap(f"/proc/{process}/fd/{own}", np.uint8, "r", shape=shape)
    dist.barrier(group=world.control_pg)
    if descriptor is not None:
        os.close(descriptor)
    if frames is None:
        raise DatasetError(next(fault for _, _, fault in said if fault))
    return frames


def _write(dataset: RecordedDataset, shape: tuple[int, ...], folder: str | None, note: Callable[[int], None]) -> int:
    """Decode into a new file without a name, whose descriptor is returned."""
    descriptor, path = tempfile.mkstemp(prefix="dvla-frames-", dir=folder)  # for this user only
    try:
        Path(path).unlink()
        os.posix_fallocate(descriptor, 0, int(np.prod(shape)))  # a full disk is found now, not by a bus error later
        frames = np.memmap(f"/proc/self/fd/{descriptor}", np.uint8, "r+", shape=shape)
        row = 0
        for done, episode in enumerate(dataset.episodes):
            for pictures in episode.read_pictures():
                if pictures.shape[1:3] != shape[2:4]:
                    pictures = resize(torch.from_numpy(pictures), (shape[2], shape[3]), "bicubic").numpy()
                frames[row] = pictures
                row += 1
            note(done + 1)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise
