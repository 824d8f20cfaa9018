"""ManiSkill's tasks as environments, on the CPU in worker processes; a GPU's are `dvla.envs.maniskill_batch`.

Everything heavy is imported by the constructor, so that tools can import this module for its names.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np

from dvla.envs.errors import SimulationError
from dvla.envs.maniskill_setup import SimulatorOptions
from dvla.envs.protocol import Step

if TYPE_CHECKING:
    import torch

    from dvla.envs.maniskill_batch import ManiSkillBatchEnv

_PANDA_TASKS = {f"{name}-v1" for name in ("PushCube", "PickCube", "PullCube", "StackCube", "PlaceSphere", "RollBall")}
_PANDA_ACTIONS = {"pd_ee_delta_pos": 4, "pd_ee_delta_pose": 7, "pd_joint_delta_pos": 8, "pd_joint_pos": 8}


class ManiSkillEnv:
    """One ManiSkill task with one simulator: a batch of one, on arrays of the host.

    Creating one settles a few things for the whole process: see `dvla.envs.maniskill_setup`.

    Args:
        *args, **options: The fields of `SimulatorOptions`.

    Raises:
        EnvironmentSetupError: The task cannot be set up as asked for; the message names the remedy.
    """

    __signature__ = inspect.signature(SimulatorOptions)  # read by `dvla.envs.registry`

    def __init__(self, *args: Any, **options: Any) -> None:
        import torch

        from dvla.envs.maniskill_batch import ManiSkillBatchEnv

        torch.set_num_threads(1)  # tensors of a few numbers: more threads only wait for each other
        self._torch = torch
        settings = SimulatorOptions(*args, **options)
        device = torch.device("cpu" if settings.sim_backend == "cpu" else "cuda")
        self._batch = ManiSkillBatchEnv(settings, num_envs=1, device=device)
        self.spec = self._batch.spec
        self.state_layout = self._batch.state_layout

    @staticmethod
    def batch(num_envs: int, device: torch.device, **options: Any) -> ManiSkillBatchEnv:
        """N environments in this process; the options are those of one."""
        from dvla.envs.maniskill_batch import ManiSkillBatchEnv

        return ManiSkillBatchEnv(SimulatorOptions(**options), num_envs=num_envs, device=device)

    @staticmethod
    def expected_action_dim(task: str, control_mode: str = "pd_ee_delta_pos", **_: Any) -> int | None:
        """Length of the actions of tasks that are known to use the Panda with its gripper."""
        return _PANDA_ACTIONS.get(control_mode) if task in _PANDA_TASKS else None

    def reset(self, task: int, seed: int) -> bytes:
        """Begin an episode; `seed` is taken modulo 2**32, the range of the simulator's generator."""
        initial = self._batch.reset(0, task, seed)
        self._torch.manual_seed(seed % 2**32)  # a few tasks draw random numbers while they step
        return initial

    def step(self, action: np.ndarray) -> Step:
        """Advance by one control step; values beyond [-1, 1] are clipped."""
        if not np.isfinite(action).all():
            raise SimulationError(f"{self.spec.name}: the policy's action is not finite: {action}")
        outcome = self._batch.step(self._torch.as_tensor(action, device=self._batch.device)[None])
        reward = float(outcome.reward)
        if not np.isfinite(reward):
            raise SimulationError(f"{self.spec.name}: the reward is {reward}; the simulation has diverged")
        return Step(reward, bool(outcome.success), bool(outcome.terminated))

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        """Render the chosen cameras once and write pictures and state vector."""
        pictures, felt = self._batch.observe()
        images[:] = pictures[0].cpu().numpy()
        state[:] = felt[0].cpu().numpy()
        if not np.isfinite(state).all():
            raise SimulationError(f"{self.spec.name}: the state is not finite; the simulation has diverged")

    def close(self) -> None:
        """Free the simulator."""
        self._batch.close()
