"""From episode slots to batches: straight from shared memory to the policy's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dvla.models.policy import Observation

if TYPE_CHECKING:
    from torch import Tensor


_LARGE = 1 << 16
"""Bytes from which an entry goes to a GPU by a copy of its own: it is then read where the simulator wrote it."""


class SlotTensors:
    """Batches out of the slot memory, and into it.

    Args:
        tensors: The slot memory by field (`dvla.planes.data_plane`).
        device: Where batches go.
        with_images: Whether the policy looks at pictures; if not, observations have those of no camera.
    """

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, *, with_images: bool = True) -> None:
        self.tensors = tensors
        self.record_names = [name.removeprefix("record.") for name in tensors if name.startswith("record.")]
        self._device, self._with_images = device, with_images

    def gather(self, name: str, slots: Tensor, decisions: Tensor) -> Tensor:
        """Entries (B, ...) of the field `name` at the given slots and decisions (both (B,) int64, host).

        A single entry is not copied on the host at all. Copies to a GPU may be under way when this returns: wait with
        `dvla.runtime.device.finish_copies` before the slots are given away.
        """
        source = self.tensors[name]
        if len(slots) == 1:
            return source[int(slots[0]), int(decisions[0])].unsqueeze(0).to(self._device, non_blocking=True)
        entry = source.shape[2:]
        if source.device == self._device or entry.numel() * source.itemsize < _LARGE:
            return source[slots, decisions].to(self._device, non_blocking=True)
        batch = torch.empty(len(slots), *entry, dtype=source.dtype, device=self._device)
        for row, slot, decision in zip(batch, slots.tolist(), decisions.tolist(), strict=True):
            row.copy_(source[slot, decision], non_blocking=True)
        return batch

    def observation(self, slots: Tensor, decisions: Tensor) -> Observation:
        """The observations (B, ...) of the given decisions."""
        return Observation(
            images=self.gather("images", slots, decisions)
            if self._with_images
            else self.tensors["images"].new_empty(
                len(slots), 0, *self.tensors["images"].shape[3:], device=self._device
            ),
            state=self.gather("state", slots, decisions),
            task=self.tensors["task"][slots].to(self._device, non_blocking=True),
        )

    def record(self, slots: Tensor, decisions: Tensor) -> dict[str, Tensor]:
        """What the policy remembers of the given decisions."""
        return {name: self.gather(f"record.{name}", slots, decisions) for name in self.record_names}

    def scatter(self, name: str, slots: Tensor, decisions: Tensor, values: Tensor) -> None:
        """Write `values` (B, ...) to the field `name`."""
        target = self.tensors[name]
        if len(slots) == 1:
            target[int(slots[0]), int(decisions[0])].copy_(values[0])
        else:
            target[slots, decisions] = values.to(target.device, target.dtype)
