"""Environments for programs that know gymnasium: ``gymnasium.make("dvla.envs.gymnasium_env:dvla/PushCube-v1")``.

Importing this module registers ``dvla/reach-v0``, ``dvla/<task>`` for ManiSkill's tasks, such as ``dvla/PushCube-v1``, and
``dvla/<suite>-v0`` for LIBERO's. Keyword arguments of ``make`` are those of the environment, ``cameras=()`` for one.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from dvla.envs.maniskill_tasks import INSTRUCTIONS
from dvla.envs.protocol import Environment
from dvla.envs.registry import environment_class

_LIBERO_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90", "libero_130")


class GymnasiumEnv(gymnasium.Env):
    """An environment of D-VLA behind gymnasium's interface, which draws at every step, not once a chunk.

    Observations are what `dvla.robot_policy.RobotPolicy` takes: each camera's picture under its name, ``state`` and
    ``prompt``, the instruction. ``info`` has ``success``. An episode is truncated after the environment's own number of steps.

    Args:
        name: As `env.name`: ``reach``, ``maniskill``, ``libero`` or ``package.module:Class``.
        render_mode: ``rgb_array`` to have `render` give the cameras' pictures side by side.
        terminate_on_success: End an episode at its first success.
        **arguments: Of the environment.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 - as the base class declares it
        "render_modes": ["rgb_array"],
        "render_fps": 20,
    }

    def __init__(
        self, name: str, render_mode: str | None = None, terminate_on_success: bool = True, **arguments: Any
    ) -> None:
        self._env: Environment = environment_class(name)(**arguments)
        spec = self._env.spec
        if render_mode is not None and not (render_mode == "rgb_array" and spec.cameras):
            raise ValueError(f"render_mode={render_mode!r}: only 'rgb_array', and that with cameras")
        self.render_mode, self._terminate_on_success = render_mode, terminate_on_success
        self._images = np.zeros((len(spec.cameras), *spec.image_size, 3), np.uint8)
        self._state = np.zeros(spec.state_dim, np.float32)
        self._task = self._num_steps = 0
        parts: dict[str, spaces.Space] = {
            camera: spaces.Box(0, 255, (*spec.image_size, 3), np.uint8) for camera in spec.cameras
        }
        if spec.state_dim:
            parts["state"] = spaces.Box(-np.inf, np.inf, (spec.state_dim,), np.float32)
        words = spec.instructions
        parts["prompt"] = spaces.Text(max(map(len, words)), charset="".join(sorted(set("".join(words)))))
        self.observation_space = spaces.Dict(parts)
        self.action_space = spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict]:
        """Begin an episode.

        Args:
            seed: Of the initial state, as in D-VLA's tickets; None draws one.
            options: ``task``: which instruction to play; else one is drawn.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(len(self._env.spec.instructions)))
        self._task, self._num_steps = (options or {}).get("task", drawn), 0
        self._env.reset(self._task, int(self.np_random.integers(2**31)) if seed is None else seed)
        return self._observe(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Advance by one control step."""
        outcome = self._env.step(np.asarray(action, np.float32))
        self._num_steps += 1
        terminated = outcome.terminated or (outcome.success and self._terminate_on_success)
        truncated = not terminated and self._num_steps >= self._env.spec.max_episode_steps
        return self._observe(), outcome.reward, terminated, truncated, {"success": outcome.success}

    def render(self) -> np.ndarray | None:
        """The pictures of the last observation side by side, (H, cameras * W, 3) uint8."""
        return np.concatenate(self._images, axis=1) if self.render_mode else None

    def close(self) -> None:
        """Free the simulator."""
        self._env.close()

    def _observe(self) -> dict[str, Any]:
        spec = self._env.spec
        self._env.observe(self._images, self._state)
        seen: dict[str, Any] = dict(zip(spec.cameras, self._images.copy(), strict=True))
        return (
            seen | ({"state": self._state.copy()} if spec.state_dim else {}) | {"prompt": spec.instructions[self._task]}
        )


def _register(identity: str, name: str, task: str) -> None:
    gymnasium.register(f"dvla/{identity}", f"{__name__}:GymnasiumEnv", kwargs={"name": name, "task": task})


_register("reach-v0", "reach", "reach")
for _task in INSTRUCTIONS:
    _register(_task, "maniskill", _task)
for _suite in _LIBERO_SUITES:
    _register(f"{_suite}-v0", "libero", _suite)
