"""ManiSkill's tasks as a batch: one simulator with N environments on a GPU, or with a single one on the CPU.

Stepping and rendering are apart. ManiSkill runs in the observation mode "none", in which a step computes
physics, reward and success only, and `observe` renders once, which is what a chunk of actions needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dvla.envs.batch_protocol import BatchStep
from dvla.envs.errors import EnvironmentSetupError, SimulationError
from dvla.envs.maniskill_setup import SimulatorOptions, create_simulator, explained, prepare_cameras
from dvla.envs.maniskill_tasks import INSTRUCTIONS
from dvla.envs.protocol import EnvSpec

if TYPE_CHECKING:
    from torch import Tensor

_SEEN_NOT_FELT = frozenset({"bin_pos", "valve_qpos", "valve_qvel", "valve_x", "valve_y"})
"""Poses of visible objects that ManiSkill gives even to policies with a camera; ours have to look."""

_LEAVES_TRACES = frozenset({"MS-HumanoidStand-v1", "MS-HumanoidWalk-v1", "MS-HumanoidRun-v1"})
"""Tasks whose reset forgets a part (their camera's mount): only a new scene starts like the last one."""

_PLACE_TOLERANCE = 1e-4
"""On a GPU every environment has its own place in one large scene, and rounds its coordinates accordingly."""

_REMEMBERED_STATES = 4096
"""Initial states kept for comparison: far more than there are groups under way."""


class ManiSkillBatchEnv:
    """N environments of one ManiSkill task, all in one simulator; see `SimulatorOptions` for the state vector and more.

    Args:
        options: What to simulate; with `sim_backend` "cpu" there is one environment only.
        num_envs: N.
        device: Where the tensors lie, and on which GPU to simulate and draw.

    Raises:
        EnvironmentSetupError: The task cannot be set up as asked for; the message names the remedy.
    """

    def __init__(self, options: SimulatorOptions, *, num_envs: int, device: torch.device) -> None:
        if num_envs > 1 and options.task in _LEAVES_TRACES:
            raise EnvironmentSetupError(f"{options.task} cannot be reset alone: use env.options.sim_backend=cpu")
        task, self._options = options.task, options
        with torch.inference_mode():  # a step is 20 % faster when autograd keeps no books
            self._simulator = create_simulator(options, num_envs, device)
            self.num_envs, self.device = num_envs, self._simulator.device
            self._info = self._simulator.get_info()
            self._observation = self._simulator.get_obs(self._info)
            with explained(options):
                parts = self._state_parts()
        self._own_sparse_reward = self._simulator.reward_mode == "none"
        if self._own_sparse_reward and "success" not in self._info:
            raise EnvironmentSetupError(f"{task} knows no success, so it has no sparse reward")
        self._ranges = [
            (name, torch.from_numpy(centre).to(self.device), torch.from_numpy(reach).to(self.device))
            for name, centre, reach in action_ranges(task, options.control_mode, self._simulator.single_action_space)
        ]
        self._initial_states: dict[int, np.ndarray] = {}
        self.state_layout: tuple[tuple[str, int], ...] = tuple((name, part.shape[1]) for name, part in parts)
        """Name and length of the state vector's parts, in order."""
        if options.instruction is None and task not in INSTRUCTIONS:
            raise EnvironmentSetupError(f"there is no instruction for {task}: give one by env.options.instruction")
        self.spec = EnvSpec(
            name=f"maniskill/{task}",
            cameras=options.cameras,
            image_size=options.image_size if options.cameras else (0, 0),
            state_dim=sum(length for _, length in self.state_layout),
            action_dim=sum(reach.numel() for _, _, reach in self._ranges),
            max_episode_steps=options.max_episode_steps or _own_step_limit(task),
            instructions=(options.instruction or INSTRUCTIONS[task],),
            gripper_open=_gripper_open(self._simulator),
        )

    def reset(self, env: int, task: int, seed: int) -> bytes:
        """Begin an episode on one environment; `seed` is taken modulo 2**32, the range of the simulator's generator."""
        if task != 0:
            raise IndexError(f"{self.spec.name} has one task, number 0, not {task}")
        seed %= 2**32
        with torch.inference_mode(), self._options.meshes_in_use():
            targets = _cloned(self._simulator.agent.get_controller_state())
            # Some draws go by the environment's number: with one seed for all numbers they are the same on each.
            self._observation, self._info = self._simulator.reset(
                seed=[seed] * self.num_envs,
                options={
                    "env_idx": torch.tensor([env], device=self.device),
                    "reconfigure": self._options.task in _LEAVES_TRACES,
                },
            )
            if self._info["reconfigure"] and self._options.cameras:  # the scene was built anew
                prepare_cameras(self._simulator, self._options.cameras)
            if self.num_envs > 1:
                self._restore_targets(targets, besides=env)
            state = self._simulator.get_state()[env].cpu().numpy().astype(np.float32)
        if not np.isfinite(state).all():
            raise SimulationError(f"{self.spec.name}: the initial state is not finite; the simulation has diverged")
        return self._canonical(seed, state).tobytes()

    def step(self, actions: Tensor) -> BatchStep:
        """Advance by one control step; values beyond [-1, 1] are clipped."""
        with torch.inference_mode():
            result = self._simulator.step(self._to_controllers(actions))
            self._observation, reward, _, _, self._info = result
            success, failure = self._flag("success"), self._flag("fail")
            if self._own_sparse_reward:
                reward = success.float() - failure.float()
        return BatchStep(reward, success, failure)

    def observe(self) -> tuple[Tensor, Tensor]:
        """Render the chosen cameras once; the state vector."""
        with torch.inference_mode():
            state = torch.cat([part for _, part in self._state_parts()], 1)
            if not self._options.cameras:
                return torch.empty((self.num_envs, 0, 0, 0, 3), dtype=torch.uint8, device=self.device), state
            pictures = self._simulator.get_sensor_images()
            return torch.stack([pictures[camera]["rgb"] for camera in self._options.cameras], 1), state

    def close(self) -> None:
        """Free the simulator."""
        self._simulator.close()

    def _to_controllers(self, actions: Tensor) -> Any:
        """Scale actions (N, A) in [-1, 1] to the controllers' ranges; several robots take a dictionary."""
        parts, start = {}, 0
        for name, centre, reach in self._ranges:
            parts[name] = centre + reach * actions[:, start : start + reach.numel()].clip(-1.0, 1.0)
            start += reach.numel()
        return parts if len(parts) > 1 else parts.popitem()[1]

    def _flag(self, name: str) -> Tensor:
        """An entry (N,) of ManiSkill's information, false where the task has none."""
        value = torch.as_tensor(self._info.get(name, False), device=self.device).bool()
        return value.expand(self.num_envs)

    def _state_parts(self) -> list[tuple[str, Tensor]]:
        """Return the parts of the state vector by name, each (N, length)."""
        if self._options.privileged_state:
            return [("state", self._observation)]
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
        return [
            (name, value.reshape(len(value), -1).float().expand(self.num_envs, -1)) for name, value in parts.items()
        ]

    def _restore_targets(self, before: Any, *, besides: int) -> None:
        """Give the controllers of all environments but one their targets back.

        ManiSkill restarts them all when it resets one; those that follow a target of their own would lose it.
        """
        agent = self._simulator.agent
        other = torch.arange(self.num_envs, device=self.device) != besides
        agent.set_controller_state(_where(other, before, agent.get_controller_state()))

    def _canonical(self, seed: int, state: np.ndarray) -> np.ndarray:
        """The state in which `seed` began on whichever environment was first, if this is the same but for rounding."""
        if self.num_envs == 1:
            return state
        first = self._initial_states.setdefault(seed, state)
        if len(self._initial_states) > _REMEMBERED_STATES:
            del self._initial_states[next(iter(self._initial_states))]
        return first if np.allclose(first, state, rtol=0.0, atol=_PLACE_TOLERANCE) else state


def action_ranges(task: str, control_mode: str, space: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return for each robot its name and the centre and reach of its controller's range.

    Raises:
        EnvironmentSetupError: The range has no end.
    """
    boxes = space.spaces if hasattr(space, "spaces") else {"": space}
    for box in boxes.values():
        if not (np.isfinite(box.low).all() and np.isfinite(box.high).all()):
            raise EnvironmentSetupError(
                f"control_mode={control_mode!r} of {task} has no limits, so actions in [-1, 1] cannot be "
                "scaled to it: use one of the delta modes"
            )
    return [(name, (box.high + box.low) / 2, (box.high - box.low) / 2) for name, box in boxes.items()]


def _gripper_open(simulator: Any) -> float | None:
    """What opens the gripper, if the action's last element is one: in ManiSkill's controllers the upper end of its range."""
    controllers = getattr(getattr(simulator.agent, "controller", None), "controllers", {})
    return 1.0 if [*controllers][-1:] == ["gripper"] else None


def _own_step_limit(task: str) -> int:
    from mani_skill.utils.registration import REGISTERED_ENVS

    return REGISTERED_ENVS[task].max_episode_steps


def _tool_pose(agent: Any) -> Tensor | None:
    """Return position and quaternion (N, 7) of a robot's tool centre point, if it has one."""
    if hasattr(agent, "tcp_pose"):
        return agent.tcp_pose.raw_pose
    return agent.tcp.pose.raw_pose if hasattr(agent, "tcp") else None


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Tensor]]:
    """List the leaves of nested dictionaries with dotted names."""
    leaves: list[tuple[str, Tensor]] = []
    for key, value in tree.items():
        leaves += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return leaves


def _cloned(tree: Any) -> Any:
    return {key: _cloned(value) for key, value in tree.items()} if isinstance(tree, dict) else tree.clone()


def _where(rows: Tensor, one: Any, other: Any) -> Any:
    """Rows of nested dictionaries of tensors: from `one` where `rows` (N,) is true, else from `other`."""
    if isinstance(one, dict):
        return {key: _where(rows, one[key], other[key]) for key in one}
    return torch.where(rows[:, None], one, other)
