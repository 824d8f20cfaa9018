"""Checkpoints: sharded, complete or not there at all. How they lie on the disk, which are whole, and how they are read.

A checkpoint is a folder with a file per rank (torch.distributed.checkpoint), counters and cursors, and a list of all files,
their sizes and hashes. `dvla.runtime.checkpoint_writer` writes it aside and renames it. A folder without that list, or with
a file that does not match it, is torn and passed over.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from dvla.config import ConfigError
from dvla.runtime.json_file import parse, read_object
from dvla.runtime.run_folder import point_link
from dvla.runtime.safe_reading import planner, reader

_TRAINABLE = StateDictOptions(ignore_frozen_params=True, strict=False)
COMPLETE = "COMPLETE.json"
TRAIN_STATE = "train_state.json"
METADATA = ".metadata"
"""What torch.distributed.checkpoint needs to find anything."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


def step_folder(root: Path, policy_version: int) -> Path:
    """Folder of the checkpoint of `policy_version`."""
    return root / f"step_{policy_version:06d}"


def load(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Read a complete checkpoint into model and optimiser, whatever the number of ranks that wrote it."""
    state = state_of(model, optimizer, read_train_state(folder)["policy_version"])
    with Together(group, f"checkpoint {folder}"):
        dcp_load(state, storage_reader=reader(folder), planner=planner(), process_group=group)
    set_model_state_dict(model, state["model"], options=_TRAINABLE)
    if "optimizer" in state:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def load_plain(folder: Path, model: nn.Module) -> None:
    """Read the trained parameters of a complete checkpoint into a plain model, on this rank alone.

    Raises:
        CheckpointError: They do not fit the model.
    """
    state = {"model": get_model_state_dict(model, options=_TRAINABLE)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is not: this rank reads for itself
            dcp_load(state, storage_reader=reader(folder), planner=planner(), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"the weights in {folder} do not fit this policy in this environment: {cause}") from error
    set_model_state_dict(model, state["model"], options=_TRAINABLE)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, policy_version: int) -> dict[str, Any]:
    """What a checkpoint of `policy_version` holds, to be saved or to be loaded into."""
    # What is frozen comes from where it came from: a checkpoint of the model, or the seed.
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=_TRAINABLE)}
    if policy_version > 0:  # before its first step the optimiser has no state; asking for it would make one, a step old
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def set_aside(folder: Path) -> Path:
    """Give a checkpoint that is to be removed a name that is no checkpoint's: a kill midway leaves no torn one."""
    aside = folder.with_name(folder.name + ".old.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def take_back(root: Path, policy_version: int) -> None:
    """Remove checkpoints beyond the version a run goes on from, and remains of saves that were killed."""
    for remains in root.glob("step_*.tmp"):
        shutil.rmtree(remains, ignore_errors=True)
    for folder, version in _all_checkpoints(root).items():
        if version > policy_version:
            shutil.rmtree(set_aside(folder), ignore_errors=True)
    if step_folder(root, policy_version).exists():
        point_link(root / "latest", step_folder(root, policy_version).name)


def read_train_state(folder: Path) -> dict[str, Any]:
    """Counters and cursors of a checkpoint.

    Raises:
        CheckpointError: They cannot be read.
    """
    state = read_object(folder / TRAIN_STATE, CheckpointError)
    if type(state.get("policy_version")) is not int:
        raise CheckpointError(f"{folder / TRAIN_STATE} has no policy_version")
    return state


def sha256_of(path: Path) -> str:
    """The hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault_of(folder: Path, *, hashes: bool = False) -> str | None:
    """What is wrong with the checkpoint in `folder`; None when it is complete.

    Args:
        folder: Of the checkpoint.
        hashes: Read every file and compare its hash, too.
    """
    try:
        files = parse((folder / COMPLETE).read_bytes())["files"]
        sizes = {name: entry["size"] for name, entry in files.items()}
        sums = [entry["sha256"] for entry in files.values()]
    except FileNotFoundError:
        return f"{COMPLETE} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{COMPLETE} cannot be read ({error})"
    for name in (METADATA, TRAIN_STATE):
        if name not in sizes:
            return f"{COMPLETE} does not name {name}"
    try:
        for name, size in sizes.items():
            path = folder / name
            if path.parent != folder or not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if hashes:
            with ThreadPoolExecutor() as pool:
                found = pool.map(sha256_of, [folder / name for name in sizes])
                for name, wanted, actual in zip(sizes, sums, found, strict=True):
                    if actual != wanted:
                        return f"{name} is not what was written (SHA-256)"
    except (OSError, ValueError) as error:
        return f"its files cannot be read ({error})"
    return None


def _all_checkpoints(root: Path) -> dict[Path, int]:
    """Checkpoints below `root` and their versions, newest first, torn ones included."""
    found = [
        (int(name[1]), path) for path in root.glob("step_*") if (name := re.fullmatch(r"step_(\d{6,})", path.name))
    ]
    return {path: version for version, path in sorted(found, reverse=True)}


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoints below `root` that are complete by the sizes of their files, newest first."""
    return [folder for folder in _all_checkpoints(root) if fault_of(folder) is None]


def find(resume: str, root: Path) -> tuple[Path | None, dict[Path, str]]:
    """The checkpoint `resume` means: None for `none`, the newest complete one for `auto`, else a path.

    Returns:
        It, and what is wrong with those that are newer and torn.

    Raises:
        ConfigError: The path is no complete checkpoint, or there are none but torn ones.
    """
    torn: dict[Path, str] = {}
    if resume == "none":
        return None, torn
    if resume == "auto":
        for folder in _all_checkpoints(root):
            fault = fault_of(folder, hashes=True)
            if fault is None:
                return folder, torn
            torn[folder] = fault
        if torn:
            newest, fault = next(iter(torn.items()))
            raise ConfigError(
                f"resume=auto: no checkpoint in {root} is complete ({newest.name}: {fault}); to begin anew, give resume=none "
                "and run.clean=true"
            )
        return None, torn
    folder = Path(resume)
    fault = fault_of(folder, hashes=True)
    if fault:
        raise ConfigError(f"resume={resume}: no complete checkpoint ({fault}); give a step_NNNNNN folder, auto or none")
    return folder, torn


class Together:
    """A block that succeeds on all ranks of a group or raises on all of them.

    Raises:
        CheckpointError: It failed on some rank. Anything else: the group is broken.
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group, self._what = group, what

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Tell the others how it went here, and hear how it went there."""
        mine = None
        if isinstance(error, CheckpointException) and error.failures:  # torch raises the same on all ranks
            rank, (cause, _) = next(iter(error.failures.items()))
            mine = rank, _in_a_line(cause)
        elif error is not None:
            mine = dist.get_rank(self._group), _in_a_line(error)
        faults: list[tuple[int, str] | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(faults, mine, group=self._group)
        for fault in faults:
            if fault is not None:
                raise CheckpointError(f"{self._what} failed on rank {fault[0]}: {fault[1]}") from error


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
