"""Scripted experts (`dvla.envs.scripted_arm`) for ManiSkill's table-top tasks.

They drive the Panda in ``pd_ee_delta_pos`` or ``pd_ee_delta_pose``.

ManiSkill's own demonstrations come from motion planning with mplib, which plans in joint space, and which crashes beside
numpy 2; these experts need neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial.transform import Rotation

from dvla.config import ConfigError
from dvla.envs.scripted_arm import Actions, Robot, ScriptedArm, without_end

if TYPE_CHECKING:
    from dvla.envs.maniskill import ManiSkillEnv

ACTION_NAMES = {
    "pd_ee_delta_pos": ("x", "y", "z", "gripper"),
    "pd_ee_delta_pose": ("x", "y", "z", "rx", "ry", "rz", "gripper"),
}
"""The control modes that the experts speak, and what the elements of an action move there."""
_REACH = 0.1
"""Metres, and radians, that an action of 1 asks for."""
_DOWN = Rotation.from_matrix(np.diag([1.0, -1.0, -1.0]))
"""The gripper pointing at the table, in the frame of the robot's base; it closes along its y axis."""


class Panda(ScriptedArm):
    """ManiSkill's arm."""

    OPEN, CLOSED = 1.0, -1.0

    def __init__(self, simulator: Any, pace: float = 1.0) -> None:
        super().__init__(simulator, pace)
        self._turns = simulator.single_action_space.shape[0] == 7
        root = simulator.agent.robot.pose
        self.to_base = Rotation.from_quat(_numbers(root.q), scalar_first=True).inv()
        quarters = round((self.rotation * _DOWN.inv()).as_euler("ZYX")[0] / (np.pi / 2))  # robots differ in them
        self.facing = Rotation.from_euler("Z", quarters * np.pi / 2) * _DOWN
        """Orientation to hold, in the base's frame; without effect in pd_ee_delta_pos."""

    @property
    def place(self) -> np.ndarray:
        """Where the tool centre point is."""
        return _numbers(self.simulator.agent.tcp.pose.p)

    @property
    def rotation(self) -> Rotation:
        """Its orientation in the base's frame."""
        return self.to_base * _rotation(self.simulator.agent.tcp)

    def toward(self, place: np.ndarray, speed: float) -> np.ndarray:
        """One action in the direction of `place`."""
        move = self.to_base.apply(place - self.place) / _REACH
        move *= min(1.0, speed * self.pace / max(1e-9, np.abs(move).max()))
        # The controller takes rotations with the opposite sign (it scales them by its lower limit).
        turn = -(self.facing * self.rotation.inv()).as_rotvec() / _REACH if self._turns else np.zeros(0)
        turn *= min(1.0, 1.0 / max(1e-9, float(np.linalg.norm(turn))))
        return np.concatenate([move, turn, [self.gripper]]).astype(np.float32)

    def lean(self) -> None:
        """Point the fingers outwards: a hand that points down ends 75 cm from the base, this one reaches 10 cm farther."""
        self.facing = Rotation.from_euler("Y", -0.7) * self.facing


def _push_cube(arm: Panda) -> Actions:
    task = arm.simulator
    arm.gripper = arm.CLOSED
    yield from arm.go(lambda: _at(task.obj, -0.07, 0, 0.06), within=0.03)
    yield from arm.go(lambda: _at(task.obj, -0.07), within=0.02)
    arm.lean()
    yield from arm.go(lambda: [_at(task.goal_region)[0] - 0.02, *_at(task.obj)[1:]])


def _pull_cube(arm: Panda) -> Actions:
    task = arm.simulator
    arm.gripper = arm.CLOSED
    yield from arm.go(lambda: _at(task.obj, 0.06, 0, 0.06), within=0.03)
    yield from arm.go(lambda: _at(task.obj, 0.06), within=0.015)
    yield from arm.go(lambda: [_at(task.goal_region)[0] + 0.02, *_at(task.obj)[1:]])


def _pick_cube(arm: Panda) -> Actions:
    task = arm.simulator
    yield from arm.grasp(lambda: _at(task.cube))
    yield from arm.go(lambda: arm.bring(_at(task.cube), _at(task.goal_site)), within=0.0)


def _put_on(arm: Panda, thing: Any, place: Any, height: float) -> Actions:
    """Take a thing and put it so high above the centre of another."""
    yield from arm.grasp(lambda: _at(thing))
    yield from arm.rise(0.09)
    yield from arm.go(lambda: arm.bring(_at(thing), _at(place, 0, 0, height + 0.03)))
    yield from arm.go(lambda: arm.bring(_at(thing), _at(place, 0, 0, height)), within=0.003, speed=0.4)
    arm.gripper = arm.OPEN
    yield from arm.stay(3)
    yield from arm.rise(0.17)


def _stack_cube(arm: Panda) -> Actions:
    yield from _put_on(arm, arm.simulator.cubeA, arm.simulator.cubeB, 0.041)


def _place_sphere(arm: Panda) -> Actions:
    yield from _put_on(arm, arm.simulator.obj, arm.simulator.bin, 0.025)


def _lift_peg(arm: Panda) -> Actions:
    peg = arm.simulator.peg
    # Held lightly by its near end, the peg swings upright by its own weight; then it is set down straight over its foot.
    yield from arm.grasp(lambda: _on(peg, -0.1), grip=0.24)
    yield from arm.rise(0.25)
    yield from arm.go(lambda: [*_on(peg, 0.12)[:2], 0.21], speed=0.3, within=0.0)


def _poke_cube(arm: Panda) -> Actions:
    task = arm.simulator
    yield from arm.grasp(lambda: _at(task.peg, -0.06))
    yield from arm.go(lambda: arm.bring(_at(task.peg), [_at(task.peg)[0], _at(task.cube)[1], 0.026]), within=0.004)

    def push() -> np.ndarray:
        ahead, aside = (_at(task.goal_region) - _at(task.cube))[0], (_at(task.cube) - _at(task.peg))[1]
        return arm.place + np.array([ahead, aside, 0.0])

    yield from arm.go(push, speed=0.4)


def _pull_cube_tool(arm: Panda) -> Actions:
    task = arm.simulator

    def hook_to(beyond: float, height: float) -> np.ndarray:
        return arm.bring(_on(task.l_shape_tool, 0.175, 0.05), _at(task.cube, beyond, -0.012, height))

    yield from arm.grasp(lambda: _on(task.l_shape_tool, 0.012))
    arm.lean()  # which lifts the heavy end, too
    yield from arm.rise(0.25)
    yield from arm.go(lambda: hook_to(0.075, 0.1), within=0.02, steps=30)
    yield from arm.go(lambda: hook_to(0.065, 0.0), within=0.01, steps=15)
    yield from arm.go(lambda: [-0.3, arm.place[1], 0.03])


EXPERTS: dict[str, Callable[[Panda], Actions]] = {
    "PushCube-v1": _push_cube,
    "PullCube-v1": _pull_cube,
    "PickCube-v1": _pick_cube,
    "StackCube-v1": _stack_cube,
    "PlaceSphere-v1": _place_sphere,
    "LiftPegUpright-v1": _lift_peg,
    "PokeCube-v1": _poke_cube,
    "PullCubeTool-v1": _pull_cube_tool,
}
"""ManiSkill's task id to its expert."""

MUST_TURN = frozenset({"PullCubeTool-v1"})
"""Tasks whose expert has to turn the hand, so that it plays in pd_ee_delta_pose only."""


def expert_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The environment's arguments that the expert of ``task`` needs, from those asked for.

    Raises:
        ConfigError: There is no expert for them.
    """
    task = arguments["task"]
    if task not in EXPERTS:
        raise ConfigError(f"there is no expert for env.task={task}; there are experts for {', '.join(EXPERTS)}")
    mode = arguments.get("control_mode", next(iter(ACTION_NAMES)))
    modes = [name for name in ACTION_NAMES if name == "pd_ee_delta_pose" or task not in MUST_TURN]
    if mode not in modes:
        raise ConfigError(f"env.options.control_mode={mode}: the expert of {task} plays in {' or '.join(modes)}")
    return arguments | {"control_mode": mode}


def robot(env: ManiSkillEnv) -> Robot:
    """What the expert drives."""
    simulator = env._batch._simulator
    return Robot(
        name=simulator.agent.uid,
        control_freq=int(simulator.control_freq),
        action_names=ACTION_NAMES[simulator.control_mode],
    )


def play(env: ManiSkillEnv, pace: float = 1.0) -> Actions:
    """The expert's actions, (4,) or (7,) float32 in [-1, 1], each for the state that `env` is in; without end.

    Args:
        env: Just reset, with the arguments of `expert_arguments`.
        pace: Share of the usual speed, above 0.
    """
    simulator = env._batch._simulator
    arm = Panda(simulator, pace)
    return without_end(arm, EXPERTS[env.spec.name.removeprefix("maniskill/")](arm))


def _numbers(values: Any) -> np.ndarray:
    return values[0].cpu().numpy().astype(float)


def _at(actor: Any, *offset: float) -> np.ndarray:
    """Position (3,) of an actor, and from there along the axes of the world."""
    return _numbers(actor.pose.p) + np.array([*offset, 0.0, 0.0, 0.0][:3])


def _on(actor: Any, *offset: float) -> np.ndarray:
    """Position (3,) of an actor, and from there along its own axes."""
    return _at(actor) + _rotation(actor).apply([*offset, 0.0, 0.0][:3])


def _rotation(actor: Any) -> Rotation:
    return Rotation.from_quat(_numbers(actor.pose.q), scalar_first=True)
