"""Scripted experts (`dvla.envs.scripted_arm`) for LIBERO's tasks that ask to put one thing somewhere.

They drive robosuite's OSC_POSE controller, as LIBERO's policies do, and hold the hand as it is at the start: over a thing,
closing along the world's y axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial.transform import Rotation

from dvla.config import ConfigError
from dvla.envs.scripted_arm import Actions, Robot, ScriptedArm, without_end

if TYPE_CHECKING:
    from dvla.envs.libero import LiberoEnv

ACTION_NAMES = ("x", "y", "z", "rx", "ry", "rz", "gripper")
_REACH, _TURN = 0.05, 0.5
"""Metres, and radians, that an action of 1 asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Put:
    """How the expert plays the tasks of a suite."""

    tasks: tuple[int, ...]
    """Those that it solves in at least three of four initial states."""
    grip_at: tuple[float, float, float]
    """The point of the thing that it takes, from its middle, metres."""
    drop: float
    """Metres above the place at which it lets go."""


EXPERTS = {
    "libero_object": Put(tasks=(0, 2, 3, 4, 5, 6, 7, 8, 9), grip_at=(0.0, 0.0, 0.0), drop=0.12),
    "libero_spatial": Put(tasks=(0, 1, 2, 3), grip_at=(0.0, 0.05, 0.02), drop=0.03),  # a bowl by its rim
}
"""Suites to their expert."""


class Panda(ScriptedArm):
    """robosuite's arm."""

    OPEN, CLOSED = -1.0, 1.0

    def __init__(self, simulator: Any, pace: float = 1.0) -> None:
        super().__init__(simulator, pace)
        (self._robot,) = simulator.robots
        self._facing = self._rotation

    @property
    def place(self) -> np.ndarray:
        """Where the point between the finger tips is."""
        return np.array(self.simulator.sim.data.site_xpos[self._robot.eef_site_id])

    @property
    def _rotation(self) -> Rotation:
        return Rotation.from_matrix(self.simulator.sim.data.site_xmat[self._robot.eef_site_id].reshape(3, 3))

    def toward(self, place: np.ndarray, speed: float) -> np.ndarray:
        """One action in the direction of `place`."""
        move = (place - self.place) / _REACH
        move *= min(1.0, speed * self.pace / max(1e-9, np.abs(move).max()))
        turn = (self._facing * self._rotation.inv()).as_rotvec() / _TURN
        return np.concatenate([move, turn.clip(-1, 1), [self.gripper]]).astype(np.float32)

    def at(self, thing: str) -> np.ndarray:
        """Where one of the task's objects is, (3,)."""
        return np.array(self.simulator.sim.data.body_xpos[self.simulator.obj_body_id[thing]])

    def put(self, thing: str, place: str, how: Put) -> Actions:
        """Take a thing and let it go above another."""
        yield from self.grasp(lambda: self.at(thing) + how.grip_at, above=0.1)
        yield from self.stay(4)
        height = self.place[2] + 0.2
        yield from self.rise(height)

        def above() -> np.ndarray:
            goal = self.bring(self.at(thing), self.at(place))
            goal[2] = height
            return goal

        yield from self.go(above, within=0.02, steps=60)
        yield from self.go(lambda: self.bring(self.at(thing), self.at(place) + np.array([0.0, 0.0, how.drop])))
        self.gripper = self.OPEN
        yield from self.stay(4)
        yield from self.rise(height)


def expert_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The environment's arguments that the expert needs: those asked for.

    Raises:
        ConfigError: There is no expert for them.
    """
    suite = arguments["task"]
    tasks: tuple[int, ...] = tuple(arguments.get("tasks") or ())
    if suite not in EXPERTS:
        raise ConfigError(f"there is no expert for env.task={suite}; there are experts for {' and '.join(EXPERTS)}")
    if len(tasks) != 1 or tasks[0] not in EXPERTS[suite].tasks:
        raise ConfigError(
            f"env.options.tasks={list(tasks)}: name the one task of {suite} to record, one that has an expert: "
            + ", ".join(map(str, EXPERTS[suite].tasks))
        )
    return arguments


def robot(env: LiberoEnv) -> Robot:
    """What the expert drives."""
    (arm,) = env._simulator.robots
    return Robot(name=arm.name.lower(), control_freq=int(env._simulator.control_freq), action_names=ACTION_NAMES)


def play(env: LiberoEnv, pace: float = 1.0) -> Actions:
    """The expert's actions, (7,) float32 in [-1, 1], each for the state that `env` is in; without end.

    Args:
        env: Just reset, with the arguments of `expert_arguments`.
        pace: Share of the usual speed, above 0.
    """
    arm = Panda(env._simulator, pace)
    ((_, thing, place),) = arm.simulator.parsed_problem["goal_state"]
    place = place.removesuffix("_contain_region")  # of a basket, whose middle it is
    return without_end(arm, arm.put(thing, place, EXPERTS[env.spec.name.removeprefix("libero/")]))
