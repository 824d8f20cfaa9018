"""A robot arm in words of places, for scripted experts: they play in the policy's action space, seeing what no policy sees.

An expert is a generator: every `next` looks at the simulator's true poses and gives the action of this moment, so that
it corrects what noise, slips and contacts do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

Actions: TypeAlias = Iterator[np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Robot:
    """What an expert drives."""

    name: str
    control_freq: int
    """Actions a second."""
    action_names: tuple[str, ...]
    """What each element of an action moves."""


class ScriptedArm(ABC):
    """Turns where the tool ought to be into actions; places are of its centre point, (3,) in metres, in the world.

    Args:
        simulator: Of one environment, just reset.
        pace: Share of the usual speed, above 0.
    """

    OPEN: ClassVar[float]
    """What the gripper's element of an action is for opening."""
    CLOSED: ClassVar[float]

    def __init__(self, simulator: Any, pace: float = 1.0) -> None:
        self.simulator = simulator
        self.pace = pace
        self.gripper = self.OPEN

    @property
    @abstractmethod
    def place(self) -> np.ndarray:
        """Where the tool is."""

    @abstractmethod
    def toward(self, place: np.ndarray, speed: float) -> np.ndarray:
        """One action in the direction of `place`; no element of the move exceeds `speed` times the arm's pace."""

    def go(self, where: Callable[[], Any], *, speed: float = 0.6, within: float = 0.01, steps: int = 40) -> Actions:
        """Move to a place that may move itself, until `within` so many metres of it, or for so many steps at pace 1."""
        for _ in range(round(steps / self.pace)):
            place = np.asarray(where(), dtype=float)
            if np.linalg.norm(place - self.place) < within:
                return
            yield self.toward(place, speed)

    def stay(self, steps: int) -> Actions:
        """Hold still, for the gripper to close or open."""
        place = self.place
        for _ in range(steps):
            yield self.toward(place, 0.6)

    def grasp(self, where: Callable[[], Any], *, above: float = 0.08, grip: float | None = None) -> Actions:
        """Open the gripper over a place, go down and take what is there."""
        self.gripper = self.OPEN
        yield from self.go(lambda: where() + np.array([0, 0, above]), within=0.02)
        yield from self.go(where)
        self.gripper = self.CLOSED if grip is None else grip
        yield from self.stay(3)

    def rise(self, height: float) -> Actions:
        """Go straight up to a height in the world."""
        yield from self.go(lambda: [*self.place[:2], height], within=0.02)

    def bring(self, thing: np.ndarray, to: Any) -> np.ndarray:
        """Where the tool must go for what it holds to come from `thing` to `to`."""
        return self.place + to - thing


def without_end(arm: ScriptedArm, expert: Actions) -> Actions:
    """An expert's actions, then those of an arm that holds still."""
    yield from expert
    while True:
        yield from arm.stay(1)
