"""The contract between D-VLA and a simulator that runs many environments at once, on the rank's own device.

A class of environments (see `dvla.envs.protocol`) offers it by a static method ``batch(num_envs, device, **arguments)``,
where the arguments are those of its constructor. Nothing leaves the device: actions, rewards and pictures are tensors there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dvla.envs.protocol import EnvSpec


@dataclass(frozen=True, slots=True)
class BatchStep:
    """Outcome of one control step of N environments, on the device; the fields are those of `dvla.envs.protocol.Step`."""

    reward: Tensor
    """(N,) floating point."""
    success: Tensor
    """(N,) bool."""
    terminated: Tensor
    """(N,) bool."""


@runtime_checkable
class BatchEnvironment(Protocol):
    """N environments that step together, each with an episode of its own; one thread at a time uses them."""

    spec: EnvSpec
    num_envs: int
    device: torch.device

    def reset(self, env: int, task: int, seed: int) -> bytes:
        """Begin an episode on environment `env` alone; the same (task, seed) gives the same initial state on each of them.

        Returns:
            The bytes of its initial state, as `dvla.envs.protocol.Environment.reset` does.
        """

    def step(self, actions: Tensor) -> BatchStep:
        """Advance all by one control step. `actions`: (N, action_dim) float32; beyond [-1, 1] clipped. Renders nothing."""

    def observe(self) -> tuple[Tensor, Tensor]:
        """Render all: images (N, cameras, H, W, 3) uint8 RGB and state (N, state_dim) float32."""

    def close(self) -> None:
        """Free the simulator."""
