"""The contract between a simulator and D-VLA: implement `Environment` to train in your own.

An environment is one simulator that plays one episode at a time. It lives in a worker process (never in the trainer's),
so it may use any library and block as it likes. Steps and pictures are apart: `step` never renders, `observe` renders
straight into the shared-memory arrays it is given, and is called once per action chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """What the trainer must know of an environment; equal for all environments of a run."""

    name: str
    """Shown in logs and results, e.g. ``maniskill/PushCube-v1``."""
    cameras: tuple[str, ...]
    """Camera names in the order of the images' camera axis; empty for an environment without images."""
    image_size: tuple[int, int]
    """(height, width) in pixels, the same for every camera; (0, 0) without cameras."""
    state_dim: int
    """Length of the proprioceptive state vector; 0 when there is none."""
    action_dim: int
    """Length of one control step's action; every element lies in [-1, 1]."""
    max_episode_steps: int
    """Control steps after which an episode is cut."""
    instructions: tuple[str, ...]
    """One language instruction per task; a task id is an index into this tuple."""
    num_initial_states: tuple[int, ...] = ()
    """Initial states that the simulator lists, by task: seed s begins number s modulo this. Empty when it has no list."""
    gripper_open: float | None = None
    """Value (1 or -1) of the last action element that opens the gripper; None when there is no gripper."""


@dataclass(frozen=True, slots=True)
class Step:
    """Outcome of one control step."""

    reward: float
    success: bool
    """The task is accomplished in the state after this step."""
    terminated: bool
    """The episode cannot go on (failure, fall, simulator's own end). Success alone need not set it: whether success
    ends an episode is the run's choice (``env.terminate_on_success``)."""


@runtime_checkable
class Environment(Protocol):
    """One simulator playing one episode at a time.

    It is made by ``MyEnv(task=…, cameras=(…), image_size=(height, width), max_episode_steps=…, reward_mode="sparse" or
    "dense", **env.options)``, with the values of the same keys of the config. A static method ``expected_action_dim`` of the
    same arguments may tell the length of its actions (or None) without starting anything, to find mistakes early.
    """

    spec: EnvSpec

    def reset(self, task: int, seed: int) -> bytes:
        """Begin an episode of task `task`; the same (task, seed) gives the same initial state, on every instance.

        Returns:
            The bytes of the initial simulator state; their hash shows that all members of a group started alike.
        """

    def step(self, action: np.ndarray) -> Step:
        """Advance by one control step. `action`: (action_dim,) float32 in [-1, 1]. Renders nothing."""

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        """Write the present observation. `images`: (cameras, H, W, 3) uint8 RGB; `state`: (state_dim,) float32."""

    def close(self) -> None:
        """Free the simulator."""
