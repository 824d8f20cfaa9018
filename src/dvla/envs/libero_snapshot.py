"""Snapshots of a LIBERO simulator: put it back to a moment it was in, to the bit, in a millisecond.

What changes while robosuite runs is MuJoCo's data, a few arrays of the model (furniture is placed, and lamps are
switched on, in the model), NumPy's global generator, and plain attributes of robosuite's objects: clocks, goals of the
controller, buffers of the robot, last values of sensors. A snapshot has a copy of each. References between objects are
neither kept nor restored: they do not change as long as the simulator is the same.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

MUTABLE_MODEL = ("body_pos", "body_quat", "site_rgba")
"""Arrays of the model that LIBERO changes; found by comparing all arrays in all 130 tasks."""


class Snapshot:
    """A simulator's present moment."""

    def __init__(self, simulator: Any) -> None:
        import mujoco

        model = simulator.sim.model._model
        self._data = mujoco.MjData(model)
        mujoco.mj_copyData(self._data, model, simulator.sim.data._data)
        self._model = {name: getattr(model, name).copy() for name in MUTABLE_MODEL}
        self._random = np.random.get_state()  # noqa: NPY002 - the generator LIBERO uses
        self._attributes = [
            (part, {name: copy.deepcopy(value) for name, value in vars(part).items() if _is_plain(value)})
            for part in _parts(simulator)
        ]

    def restore(self, simulator: Any) -> None:
        """Put the simulator this was taken of back to that moment."""
        import mujoco

        model = simulator.sim.model._model
        mujoco.mj_copyData(simulator.sim.data._data, model, self._data)
        for name, value in self._model.items():
            getattr(model, name)[:] = value
        np.random.set_state(self._random)  # noqa: NPY002
        for part, attributes in self._attributes:
            vars(part).update(copy.deepcopy(attributes))


def _parts(simulator: Any) -> list[Any]:
    """The objects of robosuite that have a state."""
    robots = simulator.robots
    return [
        simulator,
        *simulator._observables.values(),
        *(part for robot in robots for part in (robot, robot.controller, robot.gripper)),
    ]


def _is_plain(value: Any) -> bool:
    """Whether a value holds no reference to another object with a state of its own."""
    from robosuite.utils.buffers import Buffer

    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, np.ndarray, np.generic, Buffer))
