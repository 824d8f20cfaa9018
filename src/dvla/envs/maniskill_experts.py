"""Scripted experts for ManiSkill's table-top tasks: they play in the policy's own action space, seeing what no policy sees.

An expert is a generator: every `next` looks at the simulator's true poses and gives the action of this moment, so that
it corrects what noise, slips and contacts do. It drives the Panda in ``pd_ee_delta_pos`` or ``pd_ee_delta_pose``.

ManiSkill's own demonstrations come from motion planning with mplib, which plans in joint space, and which crashes beside
numpy 2; these experts need neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from scipy.spatial.transform import Rotation

ACTION_NAMES = {
    "pd_ee_delta_pos": ("x", "y", "z", "gripper"),
    "pd_ee_delta_pose": ("x", "y", "z", "rx", "ry", "rz", "gripper"),
}
"""The control modes that the experts speak, and what the elements of an action move there."""
_REACH = 0.1
"""Metres, and radians, that an action of 1 asks for."""
_DOWN = Rotation.from_matrix(np.diag([1.0, -1.0, -1.0]))
"""The gripper pointing at the table, in the frame of the robot's base; it closes along its y axis."""
_OPEN, _CLOSED = 1.0, -1.0

Actions: TypeAlias = Iterator[np.ndarray]


class Arm:
    """The Panda in words of places: turns where its tool centre point ought to be into actions."""

    def __init__(self, simulator: Any, pace: float = 1.0) -> None:
        self.simulator = simulator
        self._pace = pace
        self.gripper = _OPEN
        self._turns = simulator.single_action_space.shape[0] == 7
        root = simulator.agent.robot.pose
        self.to_base = Rotation.from_quat(_numbers(root.q), scalar_first=True).inv()
        quarters = round((self.rotation * _DOWN.inv()).as_euler("ZYX")[0] / (np.pi / 2))  # robots differ in them
        self.facing = Rotation.from_euler("Z", quarters * np.pi / 2) * _DOWN
        """Orientation to hold, in the base's frame; without effect in pd_ee_delta_pos."""

    @property
    def place(self) -> np.ndarray:
        """Position (3,) of the tool centre point in the world, metres."""
        return _numbers(self.simulator.agent.tcp.pose.p)

    @property
    def rotation(self) -> Rotation:
        """Its orientation in the base's frame."""
        return self.to_base * _rotation(self.simulator.agent.tcp)

    def toward(self, place: np.ndarray, speed: float) -> np.ndarray:
        """One action in the direction of `place` (3,); no element exceeds `speed` times the arm's pace."""
        move = self.to_base.apply(place - self.place) / _REACH
        move *= min(1.0, speed * self._pace / max(1e-9, np.abs(move).max()))
        # The controller takes rotations with the opposite sign (it scales them by its lower limit).
        turn = -(self.facing * self.rotation.inv()).as_rotvec() / _REACH if self._turns else np.zeros(0)
        turn *= min(1.0, 1.0 / max(1e-9, float(np.linalg.norm(turn))))
        return np.concatenate([move, turn, [self.gripper]]).astype(np.float32)

    def go(self, where: Callable[[], Any], *, speed: float = 0.6, within: float = 0.01, steps: int = 40) -> Actions:
        """Move to a place that may move itself, until `within` so many metres of it, or for so many steps at pace 1."""
        for _ in range(round(steps / self._pace)):
            place = np.asarray(where(), dtype=float)
            if np.linalg.norm(place - self.place) < within:
                return
            yield self.toward(place, speed)

    def stay(self, steps: int) -> Actions:
        """Hold still, for the gripper to close or open."""
        place = self.place
        for _ in range(steps):
            yield self.toward(place, 0.6)

    def grasp(self, where: Callable[[], Any], *, above: float = 0.08, grip: float = _CLOSED) -> Actions:
        """Open the gripper over a place, go down and take what is there."""
        self.gripper = _OPEN
        yield from self.go(lambda: where() + np.array([0, 0, above]), within=0.02)
        yield from self.go(where)
        self.gripper = grip
        yield from self.stay(3)

    def rise(self, height: float) -> Actions:
        """Go straight up to a height above the table."""
        yield from self.go(lambda: [*self.place[:2], height], within=0.02)

    def bring(self, thing: np.ndarray, to: Any) -> np.ndarray:
        """Where the tool must go for what it holds to come from `thing` to `to`."""
        return self.place + to - thing

    def lean(self) -> None:
        """Point the fingers outwards: a hand that points down ends 75 cm from the base, this one reaches 10 cm farther."""
        self.facing = Rotation.from_euler("Y", -0.7) * self.facing


def _push_cube(arm: Arm) -> Actions:
    task = arm.simulator
    arm.gripper = _CLOSED
    yield from arm.go(lambda: _at(task.obj, -0.07, 0, 0.06), within=0.03)
    yield from arm.go(lambda: _at(task.obj, -0.07), within=0.02)
    arm.lean()
    yield from arm.go(lambda: [_at(task.goal_region)[0] - 0.02, *_at(task.obj)[1:]])


def _pull_cube(arm: Arm) -> Actions:
    task = arm.simulator
    arm.gripper = _CLOSED
    yield from arm.go(lambda: _at(task.obj, 0.06, 0, 0.06), within=0.03)
    yield from arm.go(lambda: _at(task.obj, 0.06), within=0.015)
    yield from arm.go(lambda: [_at(task.goal_region)[0] + 0.02, *_at(task.obj)[1:]])


def _pick_cube(arm: Arm) -> Actions:
    task = arm.simulator
    yield from arm.grasp(lambda: _at(task.cube))
    yield from arm.go(lambda: arm.bring(_at(task.cube), _at(task.goal_site)), within=0.0)


def _put_on(arm: Arm, thing: Any, place: Any, height: float) -> Actions:
    """Take a thing and put it so high above the centre of another."""
    yield from arm.grasp(lambda: _at(thing))
    yield from arm.rise(0.09)
    yield from arm.go(lambda: arm.bring(_at(thing), _at(place, 0, 0, height + 0.03)))
    yield from arm.go(lambda: arm.bring(_at(thing), _at(place, 0, 0, height)), within=0.003, speed=0.4)
    arm.gripper = _OPEN
    yield from arm.stay(3)
    yield from arm.rise(0.17)


def _stack_cube(arm: Arm) -> Actions:
    yield from _put_on(arm, arm.simulator.cubeA, arm.simulator.cubeB, 0.041)


def _place_sphere(arm: Arm) -> Actions:
    yield from _put_on(arm, arm.simulator.obj, arm.simulator.bin, 0.025)


def _lift_peg(arm: Arm) -> Actions:
    peg = arm.simulator.peg
    # Held lightly by its near end, the peg swings upright by its own weight; then it is set down straight over its foot.
    yield from arm.grasp(lambda: _on(peg, -0.1), grip=0.24)
    yield from arm.rise(0.25)
    yield from arm.go(lambda: [*_on(peg, 0.12)[:2], 0.21], speed=0.3, within=0.0)


def _poke_cube(arm: Arm) -> Actions:
    task = arm.simulator
    yield from arm.grasp(lambda: _at(task.peg, -0.06))
    yield from arm.go(lambda: arm.bring(_at(task.peg), [_at(task.peg)[0], _at(task.cube)[1], 0.026]), within=0.004)

    def push() -> np.ndarray:
        ahead, aside = (_at(task.goal_region) - _at(task.cube))[0], (_at(task.cube) - _at(task.peg))[1]
        return arm.place + np.array([ahead, aside, 0.0])

    yield from arm.go(push, speed=0.4)


def _pull_cube_tool(arm: Arm) -> Actions:
    task = arm.simulator

    def hook_to(beyond: float, height: float) -> np.ndarray:
        return arm.bring(_on(task.l_shape_tool, 0.175, 0.05), _at(task.cube, beyond, -0.012, height))

    yield from arm.grasp(lambda: _on(task.l_shape_tool, 0.012))
    arm.lean()  # which lifts the heavy end, too
    yield from arm.rise(0.25)
    yield from arm.go(lambda: hook_to(0.075, 0.1), within=0.02, steps=30)
    yield from arm.go(lambda: hook_to(0.065, 0.0), within=0.01, steps=15)
    yield from arm.go(lambda: [-0.3, arm.place[1], 0.03])


EXPERTS: dict[str, Callable[[Arm], Actions]] = {
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


def play(task: str, simulator: Any, pace: float = 1.0) -> Actions:
    """The expert's actions, (4,) or (7,) float32 in [-1, 1], each for the state that `simulator` is in; without end.

    Args:
        task: A key of `EXPERTS`.
        simulator: The task's ``mani_skill.envs.sapien_env.BaseEnv``, just reset, in a control mode of `ACTION_NAMES`.
        pace: Share of the usual speed, above 0.
    """
    arm = Arm(simulator, pace)
    yield from EXPERTS[task](arm)
    while True:
        yield from arm.stay(1)


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
