"""From episode slots to batches: one gather per batch, straight from shared memory to the policy's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dvla.models.policy import Observation

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class SlotTensors:
    """The slot memory as torch tensors that share it.

    Args:
        arrays: The mapped arrays of `dvla.planes.slots`.
        device: Where batches go.
    """

    def __init__(self, arrays: dict[str, np.ndarray], device: torch.device) -> None:
        self.tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self.record_names = [name.removeprefix("record.") for name in arrays if name.startswith("record.")]
        self._device = device

    def gather(self, name: str, slots: Tensor, decisions: Tensor) -> Tensor:
        """Entries (B, ...) of the field `name` at the given slots and decisions (both (B,) int64, host)."""
        return self.tensors[name][slots, decisions].to(self._device, non_blocking=True)

    def observation(self, slots: Tensor, decisions: Tensor) -> Observation:
        """The observations (B, ...) of the given decisions."""
        return Observation(
            images=self.gather("images", slots, decisions),
            state=self.gather("state", slots, decisions),
            task=self.tensors["task"][slots].to(self._device, non_blocking=True),
        )

    def record(self, slots: Tensor, decisions: Tensor) -> dict[str, Tensor]:
        """What the policy remembers of the given decisions."""
        return {name: self.gather(f"record.{name}", slots, decisions) for name in self.record_names}

    def scatter(self, name: str, slots: Tensor, decisions: Tensor, values: Tensor) -> None:
        """Write `values` (B, ...) to the field `name`."""
        self.tensors[name][slots, decisions] = values.to("cpu", self.tensors[name].dtype)
