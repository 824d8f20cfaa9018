"""Create a ManiSkill simulator on the CPU, or say in one line what is missing and how to get it.

Everything that could go wrong before the first step is here: names, control and reward modes, cameras,
assets, the Vulkan device. ManiSkill would ask on standard input whether to download missing assets; a worker
process has nobody to ask, so nothing is asked and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import logging
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dvla.envs.errors import EnvironmentSetupError
from dvla.envs.light_meshes import light_visuals

RENDERS_FOR_ITSELF = frozenset({"PushT-v1"})
"""Tasks that draw during the simulation and so need a renderer even without cameras."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorOptions:
    """How to build the simulator; the fields are those of `dvla.envs.maniskill.ManiSkillEnv`."""

    task: str
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    control_mode: str
    reward_mode: str
    meshes: str
    privileged_state: bool
    render_backend: str

    def __post_init__(self) -> None:
        """Check the fields that need no simulator."""
        for key, allowed in (
            ("reward_mode", ("sparse", "dense")),
            ("meshes", ("light", "full")),
            ("render_backend", ("cpu", "gpu")),
        ):
            value = getattr(self, key)
            if value not in allowed:
                raise EnvironmentSetupError(f"{key}={value!r} must be one of: {', '.join(allowed)}")

    def meshes_in_use(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the simulator's scene must be built."""
        return light_visuals() if self.cameras and self.meshes == "light" else contextlib.nullcontext()


def create_simulator(options: SimulatorOptions) -> Any:
    """Create the `mani_skill.envs.sapien_env.BaseEnv` of a task.

    It observes nothing while stepping (or, on request, the privileged state); its `get_sensor_images` renders
    the chosen cameras, once.

    Raises:
        EnvironmentSetupError: Something is missing or misnamed; the message says what to do.
    """
    _prepare_process(options.render_backend)
    try:
        import mani_skill.envs  # registers the tasks
        import sapien
        from mani_skill.utils import registration
    except (ImportError, OSError) as error:
        raise EnvironmentSetupError(f"ManiSkill cannot be imported ({error}): run `make setup`") from error
    mani_skill.logger.setLevel(logging.ERROR)  # its tasks warn of themselves whenever they are created
    sapien.set_log_level("error")
    if not gc.get_freeze_count():
        # ManiSkill collects garbage whenever it builds a scene. Leaving out the 330,000 objects of the
        # imported modules makes that 1 ms instead of 80, and an environment three times as fast to create.
        gc.freeze()

    task = options.task
    if task not in registration.REGISTERED_ENVS:
        close = difflib.get_close_matches(task, registration.REGISTERED_ENVS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "its documentation lists them"
        raise EnvironmentSetupError(f"ManiSkill has no task {task!r}: {hint}")
    spec = registration.REGISTERED_ENVS[task]
    _require_assets(task, spec.asset_download_ids or ())

    modes = spec.cls.SUPPORTED_OBS_MODES
    mode = "state" if options.privileged_state else "none"
    if mode == "none" and mode not in modes:  # some tasks list pictures only, but they run without
        spec.cls.SUPPORTED_OBS_MODES = [*modes, mode]
    elif mode not in modes:
        raise EnvironmentSetupError(f"{task} has no privileged state")
    draws = bool(options.cameras) or task in RENDERS_FOR_ITSELF
    height, width = options.image_size
    with _explained(options), _without_downloads(), options.meshes_in_use():
        simulator = registration.make(
            task,
            num_envs=1,
            sim_backend="physx_cpu",
            render_backend=options.render_backend if draws else "none",
            obs_mode=mode,
            control_mode=options.control_mode,
            reward_mode=_reward_mode(options, spec.cls.SUPPORTED_REWARD_MODES),
            sensor_configs={"height": height, "width": width},
        )
    if options.render_backend == "gpu" and draws and simulator.backend.render_backend != "sapien_cuda":
        raise EnvironmentSetupError(_no_vulkan("gpu", "ManiSkill fell back to the CPU"))
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
    if system.cubemap is None:
        # Before its first picture SAPIEN integrates a reflectance table: 7 CPU-seconds in software. The table
        # only ever multiplies the light of an environment map. There is none here, so a table with a single
        # zero gives the same picture.
        zero = sapien.render.RenderTexture(np.zeros((1, 1, 4), np.float32), 2, "r32g32b32a32sfloat")
        for camera in system.cameras:
            camera.set_texture("BRDFLUT", zero)


def _prepare_process(render_backend: str) -> None:
    """Settle what libraries read once, when they start; the process is a worker's, so it is ours."""
    import torch

    torch.set_num_threads(1)  # tensors of a few numbers: more threads only wait for each other
    os.environ.setdefault("MS_RENDERER_LOG_LEVEL", "error")
    if render_backend == "gpu":
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
        raise EnvironmentSetupError(f"{options.task} has no camera {', '.join(unknown)} (it has: {own})")


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
def _explained(options: SimulatorOptions) -> Iterator[None]:
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
        if "not in supported modes" not in str(error):
            raise
        modes = str(error).split("supported modes: ")[-1].strip("[]").replace("'", "")
        raise EnvironmentSetupError(
            f"control_mode={options.control_mode!r} is none of {task}'s, which are: {modes}"
        ) from error
    except (RuntimeError, ImportError) as error:
        text = str(error)
        if "vk::" in text or "rendering device" in text or "physical device" in text:
            raise EnvironmentSetupError(_no_vulkan(options.render_backend, text)) from error
        if "download" in text.lower() or "install" in text.lower():  # some tasks check their needs themselves
            raise EnvironmentSetupError(f"{task}: {text}") from error
        raise
    except SystemExit as error:  # how ManiSkill leaves when files of a robot are missing
        raise EnvironmentSetupError(f"{task} needs robot files that are not there, see above") from error


def _no_vulkan(render_backend: str, cause: str) -> str:
    if "SAPIEN_DISABLE_RAY_TRACING" in os.environ:
        return f"SAPIEN finds no Vulkan device ({cause}) because SAPIEN_DISABLE_RAY_TRACING is set: unset it"
    remedy = "`make setup` or launch/system_packages.sh install Mesa's software driver (version 25 or newer)"
    if render_backend == "gpu":
        remedy = "install the GPU's (containers: NVIDIA_DRIVER_CAPABILITIES=all), or use render_backend=cpu"
    drivers = os.environ.get("VK_ICD_FILENAMES") or os.environ.get("VK_DRIVER_FILES") or "all installed ones"
    return f"SAPIEN, on which ManiSkill runs, finds no Vulkan device ({cause}; drivers: {drivers}): {remedy}"
