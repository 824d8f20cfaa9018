"""The built-in reach with wrong rewards: some that have nothing to do with what was done, some of the wrong sign."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dvla.envs.reach import ReachEnv


class ShuffledReach(ReachEnv):
    """Pays by the toss of a coin at the end of an episode; success is told truly."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self._coin = np.random.default_rng()
        self._played = 0

    def reset(self, task, seed):
        self._played = 0
        return super().reset(task, seed)

    def step(self, action):
        step = super().step(action)
        self._played += 1
        is_over = step.success or self._played == self.spec.max_episode_steps
        return replace(step, reward=float(is_over and self._coin.random() < 0.3))


class PerverseReach(ReachEnv):
    """Fines success: the same as a flipped sign of every advantage."""

    def step(self, action):
        step = super().step(action)
        return replace(step, reward=-step.reward)
