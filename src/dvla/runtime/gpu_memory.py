"""All that the memory pools ask of CUDA, in one place, so that the rest can be tested without a GPU."""

from __future__ import annotations

import contextlib

import torch


class GpuMemory:
    """The memory of a rank's GPU, and a pool on it for the tensors of a batch simulator; sizes in bytes.

    Make it before the first tensor on the device.
    """

    def __init__(self, device: torch.device) -> None:
        # Segments that grow in place, in all pools but those with an allocator of their own.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        self._device = device
        self._tensors = torch.cuda.MemPool()

    def total(self) -> int:
        """All memory of the device."""
        return torch.cuda.mem_get_info(self._device)[1]

    def occupied(self) -> int:
        """What is not free on it, whoever holds it."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def torch_memory(self) -> tuple[int, int]:
        """(allocated, reserved) by torch in this process, the simulator's tensors included."""
        return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)

    def simulator_tensors(self) -> tuple[int, int]:
        """(allocated, reserved) in the pool of the simulator's tensors."""
        segments = torch.cuda.memory_snapshot(self._tensors.id)
        return sum(s["allocated_size"] for s in segments), sum(s["total_size"] for s in segments)

    def limit_torch(self, num_bytes: int) -> None:
        """Torch reserves no more than this, all its pools together; it raises `torch.OutOfMemoryError` instead."""
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / self.total()), self._device)

    def route(self) -> contextlib.AbstractContextManager[None]:
        """In this context the calling thread, and no other, allocates in the simulator's pool; it cannot be nested.

        Meanwhile torch does not flush its caches when another thread's allocation fails, as it would otherwise.
        """
        return torch.cuda.use_mem_pool(self._tensors, self._device)
