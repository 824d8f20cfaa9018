"""Environments that tell the time: for `bench_sampler.py`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from dvla.envs.maniskill import ManiSkillEnv
from dvla.envs.protocol import EnvSpec, Step


class FrameEnv:
    """Large pictures that cost nothing; measures the time from a complete observation to its action.

    The state is (seconds of the last round trip, control steps). The picture is written in one place only, since drawing
    is the simulator's affair and what is measured is everything else.
    """

    def __init__(self, task, cameras, image_size, max_episode_steps, reward_mode) -> None:
        self.spec = EnvSpec(
            name="frames",
            cameras=cameras,
            image_size=image_size if cameras else (0, 0),
            state_dim=2,
            action_dim=7,
            max_episode_steps=max_episode_steps,
            instructions=("wait",),
        )
        self._observed, self._round_trip, self._steps = 0.0, 0.0, 0

    def reset(self, task: int, seed: int) -> bytes:
        """Begin."""
        self._round_trip, self._steps = 0.0, 0
        return b""

    def step(self, action: np.ndarray) -> Step:
        """Take the time of the first step of a chunk."""
        if self._observed:
            self._round_trip, self._observed = time.monotonic() - self._observed, 0.0
        self._steps += 1
        return Step(0.0, False, False)

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        """Note the time when all is written."""
        state[:] = self._round_trip, self._steps
        if images.size:
            images[..., 0, 0, 0] = self._steps % 256
        self._observed = time.monotonic()

    def close(self) -> None:
        """Nothing to free."""


class TimedManiSkill(ManiSkillEnv):
    """ManiSkill that writes down, in ``$BENCH_FOLDER/<process>``, the seconds spent in it and when it was last left."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seconds = np.memmap(Path(os.environ["BENCH_FOLDER"]) / str(os.getpid()), np.float64, "w+", shape=(2,))

    def step(self, action: np.ndarray) -> Step:
        """Step and count."""
        begin = time.monotonic()
        result = super().step(action)
        self._count(begin)
        return result

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        """Observe and count."""
        begin = time.monotonic()
        super().observe(images, state)
        self._count(begin)

    def _count(self, begin: float) -> None:
        self._seconds[1] = time.monotonic()
        self._seconds[0] += self._seconds[1] - begin
