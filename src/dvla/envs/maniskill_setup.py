"""Create a ManiSkill simulator, or say in one line what is missing and how to get it.

Everything that could go wrong before the first step is here: names, control and reward modes, cameras,
assets, the GPU, the Vulkan device. ManiSkill would ask on standard input whether to download missing assets; a
worker process has nobody to ask, so nothing is asked and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib
import inspect
import logging
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dvla.envs.errors import EnvironmentSetupError
from dvla.envs.light_meshes import light_visuals

if TYPE_CHECKING:
    import torch

RENDERS_FOR_ITSELF = frozenset({"PushT-v1"})
"""Tasks that draw during the simulation and so need a renderer even without cameras."""

logger = logging.getLogger(__name__)


_LARGEST_IMAGE = 4096

_ENVS_OF_DEFAULT_BUFFERS = 1024
"""Environments for which the sizes in ManiSkill's tasks are meant."""

_GROWING_BUFFERS = frozenset(
    {
        "temp_buffer_capacity",
        "max_rigid_contact_count",
        "max_rigid_patch_count",
        "heap_capacity",
        "collision_stack_size",
    }
)
"""PhysX's buffers that fill with the environments; those of pairs are made for far more."""

_LARGEST_BUFFER = 2**32 - 1
"""PhysX counts in 32 bits."""


@dataclass(frozen=True, slots=True)
class SimulatorOptions:
    """What to simulate: the arguments of a ManiSkill environment, that is the keys of `env` and `env.options`.

    The state vector is what a robot knows without looking: joint positions, the pose of its tool centre point in
    the world, whether it grasps, and goals that pictures do not show. Robots without a tool centre point
    (walkers, hands) give all of their proprioception, velocities included. Poses of objects are left to the
    cameras.

    An initial state depends on the seed alone. What follows on a CPU is the same to the bit for the same actions,
    too, but for a few tasks full of contacts (objects turned in a hand, a humanoid's grasp), where traces of the
    simulator's previous episode show after some steps.
    """

    task: str = "PushCube-v1"
    """ManiSkill's task id."""
    cameras: tuple[str, ...] = ("base_camera",)
    """The task's cameras to render; empty for state only, which never renders."""
    image_size: tuple[int, int] = (64, 64)
    """Height and width of every picture in pixels."""
    max_episode_steps: int | None = None
    """Control steps of an episode; None for ManiSkill's own limit."""
    reward_mode: str = "sparse"
    """"sparse" (1 in states of success), or "dense", ManiSkill's "normalized_dense" in [0, 1]."""
    control_mode: str = "pd_ee_delta_pos"
    """ManiSkill's controller. Actions in [-1, 1] are scaled to its range where that differs."""
    meshes: str = "light"
    """"light" draws with decimated meshes (`dvla.envs.light_meshes`), "full" with ManiSkill's own."""
    privileged_state: bool = False
    """Give ManiSkill's full state, with poses of objects: for baselines without cameras."""
    instruction: str | None = None
    """What to tell the policy, if not the sentence in `dvla.envs.maniskill_tasks`."""
    robot: str | None = None
    """ManiSkill's robot id, if not the task's own, e.g. "panda_wristcam" for the camera in the hand."""
    task_module: str | None = None
    """A Python module to import first, because it registers the task."""
    sim_backend: str = "cpu"
    """Where physics run: "cpu" in worker processes, or "gpu", all environments of a rank in one simulator."""
    render_backend: str | None = None
    """Where to draw: "cpu", or "gpu", by Vulkan on an NVIDIA GPU; None for where physics run."""
    sim_freq: int | None = None
    """Physics steps a second; None for the task's own (100 in most)."""
    control_freq: int | None = None
    """Control steps a second, a divisor of `sim_freq`; None for the task's own (20 in most)."""
    gpu_memory: dict[str, int] = field(default_factory=dict)
    """Sizes of PhysX's buffers on the GPU, as in ManiSkill's GPUMemoryConfig, where those for the number of environments
    (`buffer_sizes`) do not fit; PhysX says which one overflowed."""

    def __post_init__(self) -> None:
        """Check the fields that need no simulator."""
        for key, allowed in (
            ("reward_mode", ("sparse", "dense")),
            ("meshes", ("light", "full")),
            ("sim_backend", ("cpu", "gpu")),
            ("render_backend", ("gpu",) if self.sim_backend == "gpu" else ("cpu", "gpu")),
        ):
            value = getattr(self, key) or self.sim_backend
            if value not in allowed:
                raise EnvironmentSetupError(f"{key}={value!r} must be one of: {', '.join(allowed)}")
        if self.cameras and not all(1 <= length <= _LARGEST_IMAGE for length in self.image_size):
            raise EnvironmentSetupError(
                f"image_size={list(self.image_size)}: height and width must lie between 1 and {_LARGEST_IMAGE}"
            )
        for key in ("sim_freq", "control_freq"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise EnvironmentSetupError(f"{key}={value} must be at least 1 Hz")

    def meshes_in_use(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the simulator's scene must be built."""
        return light_visuals() if self.cameras and self.meshes == "light" else contextlib.nullcontext()


def create_simulator(options: SimulatorOptions, num_envs: int, device: torch.device) -> Any:
    """Create the `mani_skill.envs.sapien_env.BaseEnv` of a task, with `num_envs` environments on `device`.

    It observes nothing while stepping (or, on request, the privileged state); its `get_sensor_images` renders
    the chosen cameras, once.

    Raises:
        EnvironmentSetupError: Something is missing or misnamed; the message says what to do.
    """
    renderer = options.render_backend or options.sim_backend
    _prepare_process(renderer)
    try:
        import mani_skill.envs  # registers the tasks
        import sapien
        from mani_skill.utils import registration
    except (ImportError, OSError) as error:
        raise EnvironmentSetupError(f"ManiSkill cannot be imported ({error}): run `make setup`") from error
    if options.sim_backend == "gpu":
        _require_gpu_simulation(options)
    elif num_envs > 1 or device.type != "cpu":
        raise EnvironmentSetupError("sim_backend=cpu simulates one environment, on device=cpu")
    mani_skill.logger.setLevel(logging.ERROR)  # its tasks warn of themselves whenever they are created
    sapien.set_log_level("error")
    if not gc.get_freeze_count():
        # ManiSkill collects garbage whenever it builds a scene. Leaving out the 330,000 objects of the
        # imported modules makes that 1 ms instead of 80, and an environment three times as fast to create.
        gc.freeze()

    task = options.task
    _require_names(options)
    spec = registration.REGISTERED_ENVS[task]
    _require_assets(task, spec.asset_download_ids or ())
    if num_envs > 1:
        for limit in limits_in_batches(spec.cls):
            logger.warning("%s on a GPU %s", task, limit)

    modes = spec.cls.SUPPORTED_OBS_MODES
    mode = "state" if options.privileged_state else "none"
    if mode == "none" and mode not in modes:  # some tasks list pictures only, but they run without
        spec.cls.SUPPORTED_OBS_MODES = [*modes, mode]
    elif mode not in modes:
        raise EnvironmentSetupError(f"{task} has no privileged state")
    draws = bool(options.cameras) or task in RENDERS_FOR_ITSELF
    height, width = options.image_size
    place = f":{device.index or 0}" if options.sim_backend == "gpu" else ""
    own = {"robot_uids": options.robot} if options.robot else {}
    with explained(options), _without_downloads(), options.meshes_in_use(), equal_scenes():
        simulator = registration.make(
            task,
            num_envs=num_envs,
            sim_backend=f"physx_cuda{place}" if place else "physx_cpu",
            render_backend=f"sapien_cuda{place}" if draws and place else renderer if draws else "none",
            sim_config=_sim_config(options, spec.cls, num_envs),
            obs_mode=mode,
            control_mode=options.control_mode,
            reward_mode=_reward_mode(options, spec.cls.SUPPORTED_REWARD_MODES),
            sensor_configs={"height": height, "width": width},
            **own,
        )
    if renderer == "gpu" and draws and simulator.backend.render_backend != "sapien_cuda":
        raise EnvironmentSetupError(_no_vulkan(options, "ManiSkill fell back to the CPU"))
    if options.cameras:
        _require_cameras(options, simulator)
        visual = simulator.obs_mode_struct.visual
        visual.rgb = True
        # Tasks that lay the scene over a photograph find its foreground by the segmentation.
        visual.segmentation = "any_textures" not in modes
        prepare_cameras(simulator, options.cameras)
    return simulator


def prepare_cameras(simulator: Any, cameras: tuple[str, ...]) -> None:
    """Leave only the chosen cameras to be rendered; to be called whenever the scene was built anew."""
    import numpy as np
    import sapien

    sensors = simulator.scene.sensors
    for name in set(sensors) - set(cameras):
        del sensors[name]
    system = simulator.scene.sub_scenes[0].render_system
    if system.cubemap is None and simulator.backend.render_backend == "sapien_cpu":
        # Before its first picture SAPIEN integrates a reflectance table: 7 CPU-seconds in software. The table
        # only ever multiplies the light of an environment map. There is none here, so a table with a single
        # zero gives the same picture.
        zero = sapien.render.RenderTexture(np.zeros((1, 1, 4), np.float32), 2, "r32g32b32a32sfloat")
        for camera in system.cameras:
            camera.set_texture("BRDFLUT", zero)


def _prepare_process(renderer: str) -> None:
    """Settle what the simulator's libraries read once, when they start."""
    os.environ.setdefault("MS_RENDERER_LOG_LEVEL", "error")
    if renderer == "gpu":
        return
    os.environ.setdefault("LP_NUM_THREADS", "0")  # lavapipe draws in the calling thread: one worker per core
    if not os.environ.get("VK_ICD_FILENAMES") and not os.environ.get("VK_DRIVER_FILES"):
        manifest = _lavapipe_manifest()
        if manifest is not None:  # spares every worker from opening the other drivers
            os.environ["VK_ICD_FILENAMES"] = str(manifest)


def _lavapipe_manifest() -> Path | None:
    """Find the file that tells the Vulkan loader about Mesa's software driver."""
    own = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    for folder in (own, Path("/etc"), Path("/usr/local/share"), Path("/usr/share")):
        for name in ("lvp_icd.json", f"lvp_icd.{platform.machine()}.json"):
            manifest = folder / "vulkan/icd.d" / name
            if manifest.is_file():
                return manifest
    return None


def _require_gpu_simulation(options: SimulatorOptions) -> None:
    import torch
    from sapien import physx

    if not torch.cuda.is_available():
        raise EnvironmentSetupError(
            "sim_backend=gpu needs an NVIDIA GPU, and torch finds none: use env.options.sim_backend=cpu"
        )
    library = Path.home() / ".sapien/physx" / physx.version() / "libPhysXGpu_64.so"
    if not library.is_file():
        raise EnvironmentSetupError(
            f"sim_backend=gpu needs {library}, and nothing is downloaded unasked: it is in linux-so.zip of release "
            f"{physx.version()} of github.com/sapien-sim/physx-precompiled (or use sim_backend=cpu)"
        )
    from mani_skill.utils.structs.types import GPUMemoryConfig

    known = [entry.name for entry in fields(GPUMemoryConfig)]
    for key in options.gpu_memory:
        if key not in known:
            raise EnvironmentSetupError(f"gpu_memory has no {key!r}: choose from {', '.join(known)}")


def _require_names(options: SimulatorOptions) -> None:
    """Raise if there is no such task or robot; imports the task's module."""
    from mani_skill.agents import REGISTERED_AGENTS
    from mani_skill.utils.registration import REGISTERED_ENVS

    task = options.task
    if options.task_module is not None:
        try:
            importlib.import_module(options.task_module)
        except (ImportError, OSError) as error:
            raise EnvironmentSetupError(
                f"task_module={options.task_module!r} cannot be imported ({error}): is its folder on PYTHONPATH?"
            ) from error
    if task not in REGISTERED_ENVS:
        if "InScene25" in task:
            raise EnvironmentSetupError(
                f"the code of {task} is not in ManiSkill but in RLinf: name its module by env.options.task_module, e.g. "
                "rlinf.envs.maniskill.tasks.variants; its assets are the dataset RLinf/maniskill_assets, which belongs "
                "into the folder `assets` beside `tasks`, and bridge_v2_real2sim in $MS_ASSET_DIR/data/tasks"
            )
        raise EnvironmentSetupError(
            f"ManiSkill has no task {task!r}: {_nearest(task, REGISTERED_ENVS)} (one of your own: env.options.task_module)"
        )
    if options.robot is not None and options.robot not in REGISTERED_AGENTS:
        raise EnvironmentSetupError(
            f"ManiSkill has no robot {options.robot!r}: {_nearest(options.robot, REGISTERED_AGENTS)}"
        )


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else "its documentation lists them"


def limits_in_batches(task_class: type) -> list[str]:
    """What is different about a task when environments are reset one at a time beside others that go on."""
    limits = []
    if "reconfiguration_freq" in inspect.signature(task_class).parameters:
        limits.append("chooses its objects once: all episodes have the same ones")
    resets = [vars(base)["_initialize_episode"] for base in task_class.__mro__ if "_initialize_episode" in vars(base)]
    if any(re.search(r"\b(_settle|step)\(", inspect.getsource(reset)) for reset in resets):
        limits.append("simulates a moment whenever one environment is reset, and the others move on meanwhile")
    return limits


def _sim_config(options: SimulatorOptions, task_class: Any, num_envs: int) -> dict[str, Any]:
    """What differs from the task's own settings."""
    given = {"sim_freq": options.sim_freq, "control_freq": options.control_freq}
    sizes = buffer_sizes(task_class, num_envs) if options.sim_backend == "gpu" else {}
    return {key: value for key, value in given.items() if value} | {"gpu_memory_config": sizes | options.gpu_memory}


def buffer_sizes(task_class: Any, num_envs: int) -> dict[str, int]:
    """Sizes of PhysX's buffers for `num_envs` environments, by their names in ManiSkill's GPUMemoryConfig.

    A buffer that overflows ends the simulation or loses contacts, so none is smaller than the task's own. Tasks give sizes
    for about a thousand environments, whatever their number is; beyond, they grow with it. A few tasks count themselves.
    """
    one, own = (
        asdict(task_class._default_sim_config.fget(SimpleNamespace(num_envs=count)).gpu_memory_config)
        for count in (1, num_envs)
    )
    times = -(-num_envs // _ENVS_OF_DEFAULT_BUFFERS)
    sizes = {key: max(own[key], one[key] * times if key in _GROWING_BUFFERS else 0) for key in own}
    return {key: min(size, _LARGEST_BUFFER) for key, size in sizes.items()}


@contextlib.contextmanager
def equal_scenes() -> Iterator[None]:
    """Build all environments of a batch from one seed; ManiSkill would give each of them other objects."""
    from mani_skill.envs.sapien_env import BaseEnv

    original = BaseEnv._set_episode_rng

    def set_episode_rng(self: Any, seed: Any, env_idx: Any) -> None:
        original(self, [seed[0]] * self.num_envs, env_idx)

    BaseEnv._set_episode_rng = set_episode_rng
    try:
        yield
    finally:
        BaseEnv._set_episode_rng = original


def _reward_mode(options: SimulatorOptions, supported: Iterable[str]) -> str:
    """Translate our name; a task without a sparse reward gets one from its success (`ManiSkillEnv.step`)."""
    wanted = "normalized_dense" if options.reward_mode == "dense" else "sparse"
    if wanted in supported:
        return wanted
    if wanted == "sparse" and "none" in supported:
        return "none"
    raise EnvironmentSetupError(
        f"{options.task} has no {options.reward_mode} reward (ManiSkill offers: {', '.join(supported)})"
    )


def _require_cameras(options: SimulatorOptions, simulator: Any) -> None:
    unknown = [name for name in options.cameras if name not in simulator.scene.sensors]
    if unknown:
        own = ", ".join(simulator.scene.sensors) or "none"
        remedy = ""
        if "hand_camera" in unknown and simulator.robot_uids == "panda":
            remedy = ": hand_camera needs env.options.robot=panda_wristcam"
        raise EnvironmentSetupError(f"{options.task} has no camera {', '.join(unknown)} (it has: {own}){remedy}")


def _require_assets(task: str, asset_ids: Iterable[str]) -> None:
    """Raise if files of these data sources or groups are not in the asset folder."""
    from mani_skill.utils import assets

    missing: list[str] = []
    for asset_id in asset_ids:
        sources = (
            assets.expand_data_group_into_individual_data_source_ids(asset_id)
            if asset_id in assets.DATA_GROUPS
            else [asset_id]
        )
        missing += [source for source in sources if not assets.is_data_source_downloaded(source)]
    if not missing:
        return
    first = assets.DATA_SOURCES[missing[0]]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    raise EnvironmentSetupError(
        f"{task} needs the ManiSkill asset {missing[0]}{more}, which is looked for in "
        f"{Path(first.output_dir) / first.target_path} (in $MS_ASSET_DIR/data). Nothing is downloaded "
        f"unasked: run `python -m mani_skill.utils.download_asset {task}`, or put a copy there"
    )


def _inherited_asset_ids(task: str) -> list[str]:
    """Assets of the tasks that this one is derived from: some forget to list them again."""
    from mani_skill.utils.registration import REGISTERED_ENVS

    own = REGISTERED_ENVS[task].cls
    bases = [spec for spec in REGISTERED_ENVS.values() if issubclass(own, spec.cls)]
    return [asset for spec in bases for asset in spec.asset_download_ids or ()]


class _AssetQuestionError(Exception):
    """ManiSkill was about to ask for permission to download."""


@contextlib.contextmanager
def _without_downloads() -> Iterator[None]:
    """Turn ManiSkill's question whether to download assets into an exception."""
    from mani_skill.utils import download_asset

    def refuse(*args: Any, **kwargs: Any) -> bool:
        raise _AssetQuestionError(str(args[0]) if args else "")

    question, download = download_asset.prompt_yes_no, download_asset.download
    download_asset.prompt_yes_no = download_asset.download = refuse
    try:
        yield
    finally:
        download_asset.prompt_yes_no, download_asset.download = question, download


@contextlib.contextmanager
def explained(options: SimulatorOptions) -> Iterator[None]:
    """Replace the errors of a failed creation by ones that name the remedy."""
    task = options.task
    try:
        yield
    except EnvironmentSetupError:
        raise
    except _AssetQuestionError as question:
        # Assets of robots are not listed with the task, so this is the first that is heard of them.
        from mani_skill.agents import REGISTERED_AGENTS

        robot = re.search(r"Robot (\S+)", str(question))
        if robot and robot[1] in REGISTERED_AGENTS:
            _require_assets(task, REGISTERED_AGENTS[robot[1]].asset_download_ids)
        raise EnvironmentSetupError(
            f"{task} needs assets that are not in $MS_ASSET_DIR/data, or only in part (ManiSkill: {question})"
        ) from question
    except ModuleNotFoundError as error:
        raise EnvironmentSetupError(f"{task} needs a package that is not installed: {error}") from error
    except FileNotFoundError as error:
        raise EnvironmentSetupError(
            f"{task} needs {error.filename}, which is not there: ManiSkill's documentation of the task says "
            "which assets belong into $MS_ASSET_DIR/data"
        ) from error
    except AssertionError as error:
        if "is not divisible by" in str(error):
            raise EnvironmentSetupError(f"{task}: sim_freq must be a multiple of control_freq ({error})") from error
        if "not in supported modes" not in str(error):
            raise
        modes = str(error).split("supported modes: ")[-1].strip("[]").replace("'", "")
        raise EnvironmentSetupError(
            f"control_mode={options.control_mode!r} is none of {task}'s, which are: {modes}"
        ) from error
    except Exception as error:
        from dvla.runtime.memory import is_out_of_memory

        if is_out_of_memory(error):  # Vulkan's errors are like those of a missing driver
            raise
        text = " ".join(str(error).split())
        if "vk::" in text or "rendering device" in text or "physical device" in text or "to find device" in text:
            raise EnvironmentSetupError(_no_vulkan(options, text)) from error
        _require_assets(task, _inherited_asset_ids(task))
        if "download" in text.lower() or "install" in text.lower():  # some tasks check their needs themselves
            raise EnvironmentSetupError(f"{task}: {text}") from error
        if options.robot is not None:
            cause = f"{type(error).__name__}: {text}"
            raise EnvironmentSetupError(f"{task} does not run with robot={options.robot} ({cause})") from error
        raise
    except SystemExit as error:  # how ManiSkill leaves when files of a robot are missing
        raise EnvironmentSetupError(f"{task} needs robot files that are not there, see above") from error


def _no_vulkan(options: SimulatorOptions, cause: str) -> str:
    if "SAPIEN_DISABLE_RAY_TRACING" in os.environ:
        return f"SAPIEN finds no Vulkan device ({cause}) because SAPIEN_DISABLE_RAY_TRACING is set: unset it"
    remedy = "`make setup` or launch/system_packages.sh install Mesa's software driver (version 25 or newer)"
    if "gpu" in (options.sim_backend, options.render_backend):
        key = "sim_backend" if options.sim_backend == "gpu" else "render_backend"
        remedy = f"install the GPU's (containers: NVIDIA_DRIVER_CAPABILITIES=all), or use {key}=cpu"
    drivers = os.environ.get("VK_ICD_FILENAMES") or os.environ.get("VK_DRIVER_FILES") or "all installed ones"
    return f"SAPIEN, on which ManiSkill runs, finds no Vulkan device ({cause}; drivers: {drivers}): {remedy}"
