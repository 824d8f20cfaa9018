"""All that depends on the kind of device; the rest of the program is the same on CPU and GPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from dvla.config import ConfigError, Device

if TYPE_CHECKING:
    import numpy as np


def choose_device(wanted: Device, local_rank: int, local_world_size: int) -> torch.device:
    """The device of a rank; `auto` takes a GPU if there is one for it.

    Raises:
        ConfigError: A GPU is asked for that this rank cannot have.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is Device.cpu or (wanted is Device.auto and gpus == 0):
        return torch.device("cpu")
    if local_world_size > gpus:  # every rank sees this, so that none waits for another that has left
        raise ConfigError(
            f"device={wanted.name}: {local_world_size} processes on this node, but it shows {gpus} GPUs: start one "
            "process per GPU, or set device=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """Process-group backend of the learner on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def compute_threads(wanted: int | None, local_world_size: int) -> int:
    """Torch compute threads of each rank: an equal share of the cores it may use, at least one."""
    return wanted or max(1, len(os.sched_getaffinity(0)) // local_world_size)


def pin(array: np.ndarray, device: torch.device) -> None:
    """Page-lock host memory that a GPU copies from or to; on a CPU there is nothing to do.

    Raises:
        RuntimeError: The driver refuses, most often because of the memory-lock limit.
    """
    if device.type != "cuda" or array.nbytes == 0:
        return
    status = torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0)
    if int(status) != 0:
        raise RuntimeError(
            f"cannot page-lock {array.nbytes / 2**20:.0f} MiB of host memory (CUDA error {int(status)}): raise the "
            "memory-lock limit (`ulimit -l unlimited`)"
        )


def unpin(array: np.ndarray, device: torch.device) -> None:
    """Undo `pin` before the memory is unmapped."""
    if device.type == "cuda" and array.nbytes:
        torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)


def finish_copies(device: torch.device) -> None:
    """Wait for asynchronous copies of the calling thread's stream, before another thread reads what they wrote."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def use_own_stream(device: torch.device) -> None:
    """Give the calling thread a stream of its own, so that lanes on one GPU do not queue behind each other."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
