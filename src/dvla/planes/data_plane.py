"""The data plane of a rank: the memory of episode slots, made once and handed to whoever writes and reads it.

All ranks of a node map one memory, in which each sampling rank has slots of its own. So an episode is trained on where it
was rendered, whichever rank trains. The memory is pinned when there is a GPU. A batch simulator whose rank also infers and
trains keeps its observations on the device.
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
    from dvla.planes.slots import SlotField


@dataclass(slots=True)
class DataPlane:
    """The slot memory as this rank sees it."""

    arrays: dict[str, np.ndarray]
    """What lies on the host: all fields, but of slots on a device those that policies see and write."""
    tensors: dict[str, Tensor]
    """All fields."""
    memory: np.ndarray
    device: torch.device

    def close(self) -> None:
        """Unpin; the memory itself goes with the last mapping."""
        unpin(self.memory, self.device)


def plan_slots(
    config: Config, spec: EnvSpec, record_spec: Mapping[str, RecordField], num_slots: int
) -> list[SlotField]:
    """The fields of `num_slots` episode slots."""
    return slot_layout(
        spec,
        num_slots=num_slots,
        max_decisions=config.max_decisions,
        num_action_chunks=config.model.num_action_chunks,
        record={name: (field.shape, str(field.dtype).removeprefix("torch.")) for name, field in record_spec.items()},
    )


def slots_on_device(layout: list[SlotField], pool: BatchPool, device: torch.device) -> DataPlane:
    """Slots of a batch simulator, on its device, for this rank alone."""
    tensors = batch_slots(layout, device)
    pool.attach_tensors(tensors)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    return DataPlane(arrays, tensors, np.empty(0, np.uint8), device)


def slots_of_own(layout: list[SlotField], pool: WorkerPool | BatchPool, device: torch.device) -> DataPlane:
    """Slots that no other rank maps."""
    if isinstance(pool, BatchPool):
        return slots_on_device(layout, pool, device)
    descriptor = create_memory("dvla-slots", layout_bytes(layout))
    return slots_in_memory(layout, descriptor, map_memory(descriptor, layout_bytes(layout)), pool, device)


def slots_in_memory(
    layout: list[SlotField],
    descriptor: int,
    memory: np.ndarray,
    pool: WorkerPool | BatchPool | None,
    device: torch.device,
) -> DataPlane:
    """Slots at the beginning of a host memory, handed to the rank's simulators if it has any.

    Args:
        layout: Their fields.
        descriptor: Of the memory; closed here.
        memory: The same, mapped.
        pool: The simulators.
        device: The rank's.
    """
    memory = memory[: layout_bytes(layout)]
    arrays = slot_arrays(memory, layout)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if isinstance(pool, BatchPool):
        pool.attach_tensors(tensors)
    elif pool is not None:
        pool.attach(descriptor, layout, arrays)
    os.close(descriptor)
    pin(memory, device)
    return DataPlane(arrays, tensors, memory, device)
