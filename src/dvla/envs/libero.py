"""LIBERO's suites as environments: one object plays all tasks of a suite, pictures only when they are asked for."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from dvla.envs.errors import EnvironmentSetupError, SimulationError
from dvla.envs.libero_setup import (
    CAMERAS,
    STEP_LIMITS,
    Renderer,
    Suite,
    choose_backend,
    create_simulator,
    import_simulator,
    reset_simulator,
)
from dvla.envs.libero_snapshot import Snapshot
from dvla.envs.protocol import EnvSpec, Step

_NO_OP = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)
_LARGEST_IMAGE = 4096

logger = logging.getLogger(__name__)


class LiberoEnv:
    """One LIBERO suite; a task id is the index of a task in the suite, and its simulator is kept until the task changes.

    Everything is as in LIBERO's own pipeline, to the bit, and so as policies for LIBERO know it: pictures turned by
    180 degrees; a state of the gripper's position (3), its orientation as axis times angle (3) and the two finger
    positions; actions of position (3), rotation (3) and gripper (-1 opens); and, after a step, an observation of the
    world as it was when that step began.

    Initial states depend on (task, seed) alone, and what follows is the same to the bit for the same actions. NumPy's
    global generator is seeded at every reset, because LIBERO draws from it. Beginning the same episode again, as the
    members of a group do, costs a millisecond.

    Args:
        task: The suite: libero_spatial, libero_object, libero_goal, libero_10, libero_90, or libero_130 for all.
        cameras: "agentview" and "wrist"; empty for state only, which needs no renderer.
        image_size: Height and width of every picture in pixels.
        max_episode_steps: Control steps of an episode, the settling not counted; None for the suite's usual limit.
        reward_mode: "sparse", 1 in states of success; LIBERO has no other.
        reflections: Draw reflections; without them drawing in software is faster, but looks a little different.
        msaa: Smooth edges; likewise.
        meshes: "full", or "light" to draw with decimated meshes (`dvla.envs.libero_meshes`): in software four times as
            fast, and nearly the same picture. The simulation is the same to the bit.
        settle_steps: Steps without motion after a reset, in which objects come to rest.
        render_backend: "osmesa" (in software), "egl" (on the GPU, if there is one), or "auto".
        render_device: CUDA index of the GPU that "egl" draws on; None for the first, or MUJOCO_EGL_DEVICE_ID.
        tasks: Indices in the suite of the only tasks to play, which then count from 0; None for all.

    Raises:
        EnvironmentSetupError: The suite cannot be set up as asked for; the message names the remedy.
    """

    def __init__(
        self,
        task: str = "libero_spatial",
        cameras: tuple[str, ...] = ("agentview", "wrist"),
        image_size: tuple[int, int] = (128, 128),
        max_episode_steps: int | None = None,
        reward_mode: str = "sparse",
        reflections: bool = True,
        msaa: bool = True,
        meshes: str = "full",
        settle_steps: int = 10,
        render_backend: str = "auto",
        render_device: int | None = None,
        tasks: tuple[int, ...] | None = None,
    ) -> None:
        if reward_mode != "sparse":
            raise EnvironmentSetupError(f"LIBERO has no {reward_mode} reward: use env.reward_mode=sparse")
        for camera in cameras:
            if camera not in CAMERAS:
                raise EnvironmentSetupError(f"LIBERO has no camera {camera!r}: choose from {', '.join(CAMERAS)}")
        if cameras and not all(1 <= length <= _LARGEST_IMAGE for length in image_size):
            raise EnvironmentSetupError(
                f"image_size={list(image_size)}: height and width must lie between 1 and {_LARGEST_IMAGE}"
            )
        if meshes not in ("light", "full"):
            raise EnvironmentSetupError(f"meshes={meshes!r} must be one of: light, full")
        if settle_steps < 0:
            raise EnvironmentSetupError(f"settle_steps={settle_steps} must not be negative")
        backend = choose_backend(render_backend)
        self._suite = Suite(task, tasks)
        import_simulator(backend if cameras else None, render_device)
        self._cameras = [CAMERAS[camera] for camera in cameras]
        self._renderer: Renderer | None = None
        if cameras:
            self._renderer = Renderer(backend, image_size, reflections, msaa)
            logger.info("LIBERO draws with %s", backend)
        self._light = bool(cameras) and meshes == "light"
        self._settle_steps = settle_steps
        self._simulator: Any = None
        self._task = -1
        self._initial_states = np.empty(0)
        self._start: tuple[int, int, bytes, Snapshot, Any] | None = None  # of the last episode: groups share one
        self.spec = EnvSpec(
            name=f"libero/{task}",
            cameras=tuple(cameras),
            image_size=(image_size[0], image_size[1]) if cameras else (0, 0),
            state_dim=8,
            action_dim=7,
            max_episode_steps=max_episode_steps or STEP_LIMITS[task],
            instructions=self._suite.instructions,
            num_initial_states=tuple(
                len(self._suite.initial_states(task)) for task in range(len(self._suite.instructions))
            ),
            gripper_open=-1.0,
        )
        self.state_layout = (("eef_pos", 3), ("eef_axis_angle", 3), ("gripper_qpos", 2))

    @staticmethod
    def expected_action_dim(**_: Any) -> int:
        """Length of the actions in every suite."""
        return 7

    def reset(self, task: int, seed: int) -> bytes:
        """Begin an episode in LIBERO's initial state number `seed` modulo their number (50 in most tasks).

        `seed`, modulo 2**32, also seeds what those states leave open: the places of furniture, within 1.5 cm.

        Returns:
            The simulator's state after settling, and the places of all bodies in the model.
        """
        if not 0 <= task < len(self.spec.instructions):
            raise IndexError(f"{self.spec.name} has {len(self.spec.instructions)} tasks, there is no number {task}")
        if task != self._task:
            self._build(task)
        if self._start is not None and self._start[:2] == (task, seed):
            _, _, initial, snapshot, picture = self._start
            snapshot.restore(self._simulator)
            if self._renderer is not None:
                self._renderer.put_back(picture)
            return initial
        self._start = None
        reset_simulator(self._simulator, seed % 2**32, self._initial_states[seed % len(self._initial_states)])
        for _ in range(self._settle_steps):
            self._advance(_NO_OP)
        sim = self._simulator.sim
        places = (sim.model.body_pos, sim.model.body_quat)
        initial = b"".join(part.tobytes() for part in (sim.get_state().flatten(), *places))
        picture = self._renderer.kept() if self._renderer is not None else None
        self._start = (task, seed, initial, Snapshot(self._simulator), picture)
        return initial

    def step(self, action: np.ndarray) -> Step:
        """Advance by one control step, 1/20 s; values beyond [-1, 1] are clipped."""
        if not np.isfinite(action).all():
            raise SimulationError(f"{self.spec.name}: the policy's action is not finite: {action}")
        success = self._advance(np.clip(np.asarray(action, np.float64), -1.0, 1.0))
        return Step(float(success), success, False)

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        """Draw the cameras once and write pictures and state vector."""
        if self._renderer is not None:
            for image, camera in zip(images, self._cameras, strict=True):
                self._renderer.draw(camera, image)
        seen = self._simulator._observables
        state[:3] = seen["robot0_eef_pos"].obs
        state[3:6] = _axis_angle(seen["robot0_eef_quat"].obs)
        state[6:8] = seen["robot0_gripper_qpos"].obs

    def close(self) -> None:
        """Free the simulator and the renderer."""
        if self._renderer is not None:
            self._renderer.close()
        self._close_simulator()

    def _build(self, task: int) -> None:
        self._close_simulator()
        self._initial_states = self._suite.initial_states(task)
        self._simulator = create_simulator(self._suite.problem_file(task), self._light)
        if self._renderer is not None:
            self._renderer.watch(self._simulator)
        self._task = task

    def _close_simulator(self) -> None:
        if self._simulator is not None:
            self._simulator.close()
            self._simulator, self._task, self._start = None, -1, None

    def _advance(self, action: np.ndarray) -> bool:
        """Take a control step; whether the state after it is a success."""
        success = self._simulator.step(action)[2]
        data = self._simulator.sim.data
        # MuJoCo puts a simulation that diverged back to the start, and only counts that.
        if not np.isfinite(data.qpos).all() or any(data.warning[kind].number for kind in _diverged()):
            raise SimulationError(f"{self.spec.name}: the simulation of task {self._task} has diverged")
        return bool(success)


def _diverged() -> tuple[Any, ...]:
    import mujoco

    kinds = mujoco.mjtWarning
    return kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC


def _axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Rotation axis times angle of a quaternion (x, y, z, w), as in robosuite: the angle lies in [0, 2 pi]."""
    cosine = min(max(float(quaternion[3]), -1.0), 1.0)
    sine = math.sqrt(1.0 - cosine * cosine)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    return np.asarray(quaternion[:3]) * (2.0 * math.acos(cosine) / sine)
