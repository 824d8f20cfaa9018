"""ManiSkill's tasks as environments: CPU simulation, pictures only when they are asked for.

Stepping and rendering are apart. ManiSkill runs in the observation mode "none", in which a step computes
physics, reward and success only, and `observe` renders once, which is what a chunk of actions needs.
Everything heavy is imported by the constructor, so that tools can import this module for its names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dvla.envs.errors import EnvironmentSetupError, SimulationError
from dvla.envs.maniskill_setup import SimulatorOptions, create_simulator, prepare_cameras
from dvla.envs.maniskill_tasks import INSTRUCTIONS
from dvla.envs.protocol import EnvSpec, Step

if TYPE_CHECKING:
    from torch import Tensor

_SEEN_NOT_FELT = frozenset({"bin_pos", "valve_qpos", "valve_qvel", "valve_x", "valve_y"})
"""Poses of visible objects that ManiSkill gives even to policies with a camera; ours have to look."""

_LEAVES_TRACES = frozenset({"MS-HumanoidStand-v1", "MS-HumanoidWalk-v1", "MS-HumanoidRun-v1"})
"""Tasks whose reset forgets a part (their camera's mount): only a new scene starts like the last one."""

_PANDA_TASKS = {f"{name}-v1" for name in ("PushCube", "PickCube", "PullCube", "StackCube", "PlaceSphere", "RollBall")}
_PANDA_ACTIONS = {"pd_ee_delta_pos": 4, "pd_ee_delta_pose": 7, "pd_joint_delta_pos": 8, "pd_joint_pos": 8}


class ManiSkillEnv:
    """One ManiSkill task with one simulator.

    The state vector (see `state_layout`) is what a robot knows without looking: joint positions, the pose of
    its tool centre point in the world, whether it grasps, and goals that pictures do not show. Robots without
    a tool centre point (walkers, hands) give all of their proprioception, velocities included. Poses of
    objects are left to the cameras.

    An initial state depends on the seed alone. What follows is the same to the bit for the same actions, too,
    but for a few tasks full of contacts (objects turned in a hand, a humanoid's grasp), where traces of the
    simulator's previous episode show after some steps.

    Creating one settles a few things for the whole process: see `dvla.envs.maniskill_setup`.

    Args:
        task: ManiSkill's task id.
        cameras: The task's cameras to render; empty for state only, which never renders.
        image_size: Height and width of every picture in pixels.
        max_episode_steps: Control steps of an episode; None for ManiSkill's own limit.
        reward_mode: "sparse" (1 in states of success), or "dense", ManiSkill's "normalized_dense" in [0, 1].
        control_mode: ManiSkill's controller. Actions in [-1, 1] are scaled to its range where that differs.
        meshes: "light" draws with decimated meshes (`dvla.envs.light_meshes`), "full" with ManiSkill's own.
        privileged_state: Give ManiSkill's full state, with poses of objects: for baselines without cameras.
        instruction: What to tell the policy, if not the sentence in `dvla.envs.maniskill_tasks`.
        render_backend: "cpu", or "gpu" to draw on an NVIDIA GPU by Vulkan; physics stays on the CPU.

    Raises:
        EnvironmentSetupError: The task cannot be set up as asked for; the message names the remedy.
    """

    def __init__(
        self,
        task: str = "PushCube-v1",
        cameras: tuple[str, ...] = ("base_camera",),
        image_size: tuple[int, int] = (64, 64),
        max_episode_steps: int | None = None,
        reward_mode: str = "sparse",
        control_mode: str = "pd_ee_delta_pos",
        meshes: str = "light",
        privileged_state: bool = False,
        instruction: str | None = None,
        render_backend: str = "cpu",
    ) -> None:
        import torch

        self._seed_torch = torch.manual_seed
        self._inference_mode = torch.inference_mode  # a step is 20 % faster when autograd keeps no books
        self._options = SimulatorOptions(
            task=task,
            cameras=tuple(cameras),
            image_size=(image_size[0], image_size[1]),
            control_mode=control_mode,
            reward_mode=reward_mode,
            meshes=meshes,
            privileged_state=privileged_state,
            render_backend=render_backend,
        )
        self._privileged_state = privileged_state
        with self._inference_mode():
            self._simulator = create_simulator(self._options)
            self._info = self._simulator.get_info()
            self._observation = self._simulator.get_obs(self._info)
            parts = self._state_parts()
        self._own_sparse_reward = self._simulator.reward_mode == "none"
        if self._own_sparse_reward and "success" not in self._info:
            raise EnvironmentSetupError(f"{task} knows no success, so it has no sparse reward")
        self._ranges = _action_ranges(task, control_mode, self._simulator.single_action_space)
        self.state_layout: tuple[tuple[str, int], ...] = tuple((name, part.size) for name, part in parts)
        """Name and length of the state vector's parts, in order."""
        if instruction is None and task not in INSTRUCTIONS:
            raise EnvironmentSetupError(f"there is no instruction for {task}: give one with instruction=...")
        self.spec = EnvSpec(
            name=f"maniskill/{task}",
            cameras=self._options.cameras,
            image_size=self._options.image_size if cameras else (0, 0),
            state_dim=sum(length for _, length in self.state_layout),
            action_dim=sum(reach.size for _, _, reach in self._ranges),
            max_episode_steps=max_episode_steps or _own_step_limit(task),
            instructions=(instruction or INSTRUCTIONS[task],),
            gripper_open=_gripper_open(self._simulator),
        )

    @staticmethod
    def expected_action_dim(task: str, control_mode: str = "pd_ee_delta_pos", **_: Any) -> int | None:
        """Length of the actions of tasks that are known to use the Panda with its gripper."""
        return _PANDA_ACTIONS.get(control_mode) if task in _PANDA_TASKS else None

    def reset(self, task: int, seed: int) -> bytes:
        """Begin an episode; `seed` is taken modulo 2**32, the range of the simulator's generator."""
        if task != 0:
            raise IndexError(f"{self.spec.name} has one task, number 0, not {task}")
        seed %= 2**32
        with self._inference_mode(), self._options.meshes_in_use():
            self._observation, self._info = self._simulator.reset(
                seed=seed, options={"reconfigure": self._options.task in _LEAVES_TRACES}
            )
            if self._info["reconfigure"] and self._options.cameras:  # the scene was built anew
                prepare_cameras(self._simulator, self._options.cameras)
            state = self._simulator.get_state()[0].numpy().astype(np.float32)
        self._seed_torch(seed)  # a few tasks draw random numbers while they step
        return self._finite(state, "initial state").tobytes()

    def step(self, action: np.ndarray) -> Step:
        """Advance by one control step; values beyond [-1, 1] are clipped."""
        if not np.isfinite(action).all():
            raise SimulationError(f"{self.spec.name}: the policy's action is not finite: {action}")
        with self._inference_mode():
            result = self._simulator.step(self._to_controllers(action))
            self._observation, reward, _, _, self._info = result
            success = bool(self._info.get("success", False))
            failure = bool(self._info.get("fail", False))
            reward = float(success) - float(failure) if self._own_sparse_reward else float(reward)
        if not np.isfinite(reward):
            raise SimulationError(f"{self.spec.name}: the reward is {reward}; the simulation has diverged")
        return Step(reward, success, failure)

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        """Render the chosen cameras once and write pictures and state vector."""
        with self._inference_mode():
            if self._options.cameras:
                pictures = self._simulator.get_sensor_images()
                for image, camera in zip(images, self._options.cameras, strict=True):
                    image[:] = pictures[camera]["rgb"][0].numpy()
            parts = [part for _, part in self._state_parts()]
        np.concatenate(parts, out=state, casting="same_kind")
        self._finite(state, "state")

    def close(self) -> None:
        """Free the simulator."""
        self._simulator.close()

    def _to_controllers(self, action: np.ndarray) -> Any:
        """Scale an action in [-1, 1] to the controllers' ranges; several robots take a dictionary."""
        parts, start = {}, 0
        for name, centre, reach in self._ranges:
            parts[name] = centre + reach * np.clip(action[start : start + reach.size], -1.0, 1.0)
            start += reach.size
        return parts if len(parts) > 1 else parts.popitem()[1]

    def _state_parts(self) -> list[tuple[str, np.ndarray]]:
        """Return the parts of the state vector by name, each flat."""
        if self._privileged_state:
            return [("state", self._observation[0].numpy())]
        simulator = self._simulator
        extra: dict[str, Tensor] = simulator._get_obs_extra(self._info)
        parts: dict[str, Any] = {}
        several = getattr(simulator.agent, "agents_dict", None)
        for name, agent in (several or {"": simulator.agent}).items():
            prefix = f"{name}." if several else ""
            own = agent.get_proprioception()
            tool = _tool_pose(agent)
            if tool is None and not any("tcp" in key for key in extra):
                parts |= {prefix + key: value for key, value in _flat(own)}
            else:
                parts[prefix + "qpos"] = own["qpos"]
                if not any("tcp" in key for key in extra):
                    parts[prefix + "tcp_pose"] = tool
        parts |= {key: value for key, value in _flat(extra) if key not in _SEEN_NOT_FELT}
        if not any("goal" in key for key in extra):
            # What ManiSkill hides from the cameras marks a goal, and nothing else tells the policy where.
            parts |= {f"{goal.name}_pos": goal.pose.p for goal in simulator._hidden_objects}
        return [(name, value.reshape(-1).numpy().astype(np.float32)) for name, value in parts.items()]

    def _finite(self, values: np.ndarray, what: str) -> np.ndarray:
        if not np.isfinite(values).all():
            raise SimulationError(f"{self.spec.name}: the {what} is not finite; the simulation has diverged")
        return values


def _gripper_open(simulator: Any) -> float | None:
    """What opens the gripper, if the action's last element is one: in ManiSkill's controllers the upper end of its range."""
    controllers = getattr(getattr(simulator.agent, "controller", None), "controllers", {})
    return 1.0 if [*controllers][-1:] == ["gripper"] else None


def _own_step_limit(task: str) -> int:
    from mani_skill.utils.registration import REGISTERED_ENVS

    return REGISTERED_ENVS[task].max_episode_steps


def _action_ranges(task: str, control_mode: str, space: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return for each robot its name and the centre and reach of its controller's range."""
    boxes = space.spaces if hasattr(space, "spaces") else {"": space}
    for box in boxes.values():
        if not (np.isfinite(box.low).all() and np.isfinite(box.high).all()):
            raise EnvironmentSetupError(
                f"control_mode={control_mode!r} of {task} has no limits, so actions in [-1, 1] cannot be "
                "scaled to it: use one of the delta modes"
            )
    return [(name, (box.high + box.low) / 2, (box.high - box.low) / 2) for name, box in boxes.items()]


def _tool_pose(agent: Any) -> Tensor | None:
    """Return position and quaternion (1, 7) of a robot's tool centre point, if it has one."""
    if hasattr(agent, "tcp_pose"):
        return agent.tcp_pose.raw_pose
    return agent.tcp.pose.raw_pose if hasattr(agent, "tcp") else None


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Tensor]]:
    """List the leaves of nested dictionaries with dotted names."""
    leaves: list[tuple[str, Tensor]] = []
    for key, value in tree.items():
        leaves += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return leaves
