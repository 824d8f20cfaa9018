"""The data plane of a rank: the memory of its episode slots, made once and handed to whoever writes and reads it.

Simulators in worker processes need shared memory of the host, pinned when there is a GPU. A batch simulator writes its
observations on the device; there they stay.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dvla.envs.batch_pool import BatchPool, batch_slots
from dvla.planes.slots import create_memory, layout_bytes, map_memory, slot_arrays, slot_layout
from dvla.runtime.device import pin, unpin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from dvla.config import Config
    from dvla.envs.pool import WorkerPool
    from dvla.envs.protocol import EnvSpec
    from dvla.models.policy import RecordField


@dataclass(slots=True)
class DataPlane:
    """The slot memory of this rank."""

    arrays: dict[str, np.ndarray]
    """What lies on the host: all fields, but with a batch simulator those that policies see and write."""
    tensors: dict[str, Tensor]
    """All fields."""
    memory: np.ndarray
    device: torch.device

    def close(self) -> None:
        """Unpin; the memory itself goes with the last mapping."""
        unpin(self.memory, self.device)


def make_data_plane(
    config: Config,
    spec: EnvSpec,
    record_spec: Mapping[str, RecordField],
    pool: WorkerPool | BatchPool,
    device: torch.device,
    *,
    num_slots: int,
) -> DataPlane:
    """Allocate the episode slots and hand them to the simulators."""
    layout = slot_layout(
        spec,
        num_slots=num_slots,
        max_decisions=config.max_decisions,
        num_action_chunks=config.model.num_action_chunks,
        record={name: (field.shape, str(field.dtype).removeprefix("torch.")) for name, field in record_spec.items()},
    )
    if isinstance(pool, BatchPool):
        tensors = batch_slots(layout, device)
        pool.attach_tensors(tensors)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        return DataPlane(arrays, tensors, np.empty(0, np.uint8), device)
    descriptor = create_memory("dvla-slots", layout_bytes(layout))
    memory = map_memory(descriptor, layout_bytes(layout))
    arrays = slot_arrays(memory, layout)
    pool.attach(descriptor, layout, arrays)
    os.close(descriptor)
    pin(memory, device)
    return DataPlane(arrays, {name: torch.from_numpy(array) for name, array in arrays.items()}, memory, device)
