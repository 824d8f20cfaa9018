"""The reaching task as a batch of torch tensors: what `dvla.envs.reach.ReachEnv` does, to the bit, with sparse rewards."""

from __future__ import annotations

import numpy as np
import torch

from dvla.envs.batch_protocol import BatchStep
from dvla.envs.protocol import Step
from dvla.envs.reach import _BACKGROUND, _POINT_COLOUR, _POINT_SIZE, _TARGET_COLOUR, _TARGET_SIZE, ReachEnv


class BatchReach:
    """N points; `wall` ends the episode of a point that touches it. Counts what it is asked to do."""

    def __init__(self, num_envs, device, wall=False, **options):
        self._one = ReachEnv(**options)
        self.spec, self.num_envs, self.device = self._one.spec, num_envs, torch.device(device)
        self._wall = wall
        self._places = torch.zeros(num_envs, 6, dtype=torch.float64, device=device)  # point, target, goal
        self._columns, self._rows = (
            torch.from_numpy(np.ascontiguousarray(axis)).to(device) for axis in (self._one._columns, self._one._rows)
        )
        self.num_steps = self.num_pictures = 0
        self.fault = None

    def reset(self, env, task, seed):
        initial = self._one.reset(task, seed)
        self._places[env] = torch.from_numpy(np.frombuffer(initial, np.float64).copy())
        return initial

    def step(self, actions):
        assert actions.dtype == torch.float32
        assert actions.shape == (self.num_envs, 2)
        self.num_steps += 1
        point, goal = self._places[:, :2], self._places[:, 4:]
        point.copy_((point + 0.1 * actions.double().clip(-1, 1)).clip(-1, 1))
        success = torch.hypot(*(point - goal).unbind(1)) <= self._one._radius
        terminated = (point.abs() >= 1).any(1) if self._wall else torch.zeros_like(success)
        reward = success.float()
        if self.fault == "reward":
            reward[1] = torch.nan
        return BatchStep(reward, success, terminated)

    def observe(self):
        self.num_pictures += 1
        images = torch.empty(self.num_envs, 1, *self.spec.image_size, 3, dtype=torch.uint8, device=self.device)
        images[:] = torch.tensor(_BACKGROUND)
        places = self._places[:, :4, None, None]
        for x, y, size, colour in ((2, 3, _TARGET_SIZE, _TARGET_COLOUR), (0, 1, _POINT_SIZE, _POINT_COLOUR)):
            disc = (self._columns - places[:, x]) ** 2 + (self._rows[:, None] - places[:, y]) ** 2 <= size**2
            images[:, 0][disc] = torch.tensor(colour, dtype=torch.uint8)
        state = self._places[:, :4].float()
        return images, torch.full_like(state, torch.inf) if self.fault == "state" else state

    def close(self):
        self._places = torch.empty(0)


class WalledReach(ReachEnv):
    """One of these points, for worker processes, and as `env.name` for runs; they are simulated on the run's device."""

    def __init__(self, wall=False, sim_backend="cpu", **options):
        super().__init__(**options)
        self._wall = wall

    @staticmethod
    def batch(num_envs, device, sim_backend="gpu", **options):
        return BatchReach(num_envs, device, **options)

    def step(self, action):
        step = super().step(action)
        return Step(step.reward, step.success, self._wall and max(abs(self._x), abs(self._y)) >= 1.0)
