"""A tiny reaching task in the plane, for tests and first steps: no simulator, no torch, microseconds a step.

A point in the square [-1, 1]^2 moves by a tenth of the action; the episode succeeds when it is close to a
target. It has everything the trainer has to deal with (pictures, state, sparse and dense rewards, one or two
instructions) and nothing that costs time.
"""

from __future__ import annotations

import math

import numpy as np

from dvla.envs.errors import EnvironmentSetupError, SimulationError
from dvla.envs.protocol import EnvSpec, Step

_INSTRUCTIONS = (
    "move the point to the target",
    "move the point to the place opposite the target",
)
_STEP_LENGTH = 0.1
_START_DISTANCE = (0.4, 1.0)
"""Initial distance to the place to reach: never solved at the start, never hopeless for a random policy."""
_BACKGROUND = (24, 24, 32)
_TARGET_COLOUR = (230, 60, 50)
_POINT_COLOUR = (70, 150, 255)
_TARGET_SIZE = 0.2
_POINT_SIZE = 0.12


class ReachEnv:
    """A point that has to reach a target, or, as a second task, the target's mirror image through the origin.

    The state is the point's and the target's position; pictures show both as discs, and where to go follows
    from the instruction alone. With the defaults one in ten uniformly random episodes succeeds.

    Args:
        task: Always "reach"; there for the sake of the common constructor.
        cameras: ("top",) for pictures from above, () for the state alone.
        image_size: Height and width of a picture in pixels; None is the same as no cameras.
        max_episode_steps: Control steps of an episode.
        reward_mode: "sparse" (1 within the target's radius, else 0), or "dense" (falls with the distance).
        target_radius: Distance at which the target counts as reached.
        num_tasks: 1, or 2 for both instructions.

    Raises:
        EnvironmentSetupError: An argument is not among those above.
    """

    @staticmethod
    def expected_action_dim(**_: object) -> int:
        """Length of its actions."""
        return 2

    def __init__(
        self,
        task: str = "reach",
        cameras: tuple[str, ...] = ("top",),
        image_size: tuple[int, int] | None = (64, 64),
        max_episode_steps: int = 32,
        reward_mode: str = "sparse",
        target_radius: float = 0.2,
        num_tasks: int = 1,
    ) -> None:
        cameras = tuple(cameras) if image_size is not None else ()
        for key, value, allowed in (
            ("task", task, ("reach",)),
            ("reward_mode", reward_mode, ("sparse", "dense")),
            ("num_tasks", num_tasks, (1, 2)),
            ("cameras", cameras, ((), ("top",))),
        ):
            if value not in allowed:
                raise EnvironmentSetupError(f"{key}={value!r} must be one of: {', '.join(map(str, allowed))}")
        if not 0 < target_radius < _START_DISTANCE[0]:
            raise EnvironmentSetupError(f"target_radius={target_radius} must be above 0 and below {_START_DISTANCE[0]}")
        self.spec = EnvSpec(
            name="reach",
            cameras=cameras,
            image_size=(image_size[0], image_size[1]) if cameras and image_size else (0, 0),
            state_dim=4,
            action_dim=2,
            max_episode_steps=max_episode_steps,
            instructions=_INSTRUCTIONS[:num_tasks],
        )
        self._dense = reward_mode == "dense"
        self._radius = target_radius
        # Python floats: for two numbers they are several times faster than arrays.
        self._x = self._y = self._target_x = self._target_y = self._goal_x = self._goal_y = 0.0
        if cameras:
            height, width = self.spec.image_size
            # Positions of the pixels' centres; y points up.
            self._columns = (np.arange(width) + 0.5) / width * 2 - 1
            self._rows = 1 - (np.arange(height) + 0.5) / height * 2
            self._background = np.full((height, width, 3), _BACKGROUND, np.uint8)

    def reset(self, task: int, seed: int) -> bytes:
        """Place target and point; both are a function of task and seed."""
        if not 0 <= task < len(self.spec.instructions):
            raise IndexError(f"reach has {len(self.spec.instructions)} task(s), no number {task}")
        random = np.random.default_rng((seed, task))
        self._target_x, self._target_y = random.uniform(-0.8, 0.8, 2).tolist()
        sign = 1.0 if task == 0 else -1.0
        self._goal_x, self._goal_y = sign * self._target_x, sign * self._target_y
        distance = random.uniform(*_START_DISTANCE)
        while True:  # until the direction leads to a place in the square, as those towards the origin do
            angle = random.uniform(0, 2 * math.pi)
            self._x = self._goal_x + distance * math.cos(angle)
            self._y = self._goal_y + distance * math.sin(angle)
            if max(abs(self._x), abs(self._y)) <= 1.0:
                return np.array([*self._positions(), self._goal_x, self._goal_y]).tobytes()

    def step(self, action: np.ndarray) -> Step:
        """Move the point; actions beyond [-1, 1] are clipped, and the point stays in the square."""
        dx, dy = action.tolist()
        self._x = _clip(self._x + _STEP_LENGTH * _clip(dx))
        self._y = _clip(self._y + _STEP_LENGTH * _clip(dy))
        distance = self._distance()
        if distance != distance:  # NaN
            raise SimulationError(f"reach: the policy's action is not finite: {action}")
        success = distance <= self._radius
        reward = 1.0 - math.tanh(2.0 * distance) if self._dense else float(success)
        return Step(reward, success, False)

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        """Draw the picture and write the state."""
        state[:] = self._positions()
        if self.spec.cameras:
            image = images[0]
            image[:] = self._background
            self._draw(image, self._target_x, self._target_y, _TARGET_SIZE, _TARGET_COLOUR)
            self._draw(image, self._x, self._y, _POINT_SIZE, _POINT_COLOUR)

    def close(self) -> None:
        """Nothing to free."""

    def _distance(self) -> float:
        return math.hypot(self._x - self._goal_x, self._y - self._goal_y)

    def _positions(self) -> tuple[float, float, float, float]:
        return self._x, self._y, self._target_x, self._target_y

    def _draw(self, image: np.ndarray, x: float, y: float, radius: float, colour: tuple[int, int, int]) -> None:
        """Draw a disc; only the square around it is looked at."""
        columns, rows = self._near(self._columns, x, radius), self._near(self._rows, y, radius)
        inside = (self._columns[columns] - x) ** 2 + (self._rows[rows, None] - y) ** 2 <= radius**2
        image[rows, columns][inside] = colour

    def _near(self, places: np.ndarray, centre: float, radius: float) -> slice:
        """The pixels of an axis that a disc may touch."""
        near = np.flatnonzero(np.abs(places - centre) <= radius * 1.001)  # whatever rounding does at the rim
        return slice(near[0], near[-1] + 1) if len(near) else slice(0, 0)


def _clip(value: float) -> float:
    return -1.0 if value < -1.0 else 1.0 if value > 1.0 else value
