"""Slow environments for the benchmarks of placements and balance; without torch, which workers do not load."""

from __future__ import annotations

import os
import time

import numpy as np

from dvla.envs.protocol import EnvSpec, Step


class DelayedEnv:
    """Sleeps `seconds` in each control step; episodes end after `shortest` to `max_episode_steps` steps, at random."""

    def __init__(self, task, cameras, image_size, max_episode_steps, reward_mode, seconds, shortest=None) -> None:
        self.spec = EnvSpec(
            name="delayed",
            cameras=cameras,
            image_size=image_size if cameras else (0, 0),
            state_dim=1,
            action_dim=1,
            max_episode_steps=max_episode_steps,
            instructions=("wait",),
        )
        self._seconds, self._shortest = seconds, max_episode_steps if shortest is None else shortest
        self._random = np.random.default_rng()
        self._left = 0

    def reset(self, task: int, seed: int) -> bytes:
        """Begin; takes no time."""
        self._left = int(self._random.integers(self._shortest, self.spec.max_episode_steps, endpoint=True))
        return b""

    def step(self, action: np.ndarray) -> Step:
        """Sleep."""
        time.sleep(self._seconds)
        self._left -= 1
        return Step(0.0, False, terminated=self._left == 0)

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        """Nothing to see."""
        state[:] = 0.0

    def close(self) -> None:
        """Nothing to free."""


class SlowRankEnv(DelayedEnv):
    """Like `DelayedEnv`, but on the last rank of a node everything takes `factor` times as long."""

    def __init__(self, task, cameras, image_size, max_episode_steps, reward_mode, seconds, factor) -> None:
        is_slow = int(os.environ["LOCAL_RANK"]) == int(os.environ["LOCAL_WORLD_SIZE"]) - 1
        super().__init__(
            task, cameras, image_size, max_episode_steps, reward_mode, seconds * factor if is_slow else seconds
        )
