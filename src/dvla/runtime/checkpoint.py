"""Checkpoints: sharded, complete or not there at all.

Every rank writes its part into ``step_N.tmp`` (torch.distributed.checkpoint); rank 0 then adds the counters and a list of
all files with their sizes, renames the folder, and moves ``latest`` last. A folder without that list, or with a file that
does not match it, is torn and passed over.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
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
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dvla.config import ConfigError
from dvla.runtime.run_folder import point_link
from dvla.runtime.safe_reading import planner, reader

_TRAINABLE = StateDictOptions(ignore_frozen_params=True, strict=False)
COMPLETE = "COMPLETE.json"
TRAIN_STATE = "train_state.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read."""


def step_folder(root: Path, policy_version: int) -> Path:
    """Folder of the checkpoint of `policy_version`."""
    return root / f"step_{policy_version:06d}"


def save(
    root: Path,
    *,
    policy_version: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train_state: dict[str, Any],
    keep: int,
    group: dist.ProcessGroup,
) -> Path:
    """Write the checkpoint of `policy_version`; collective over `group`.

    Args:
        root: Folder of all checkpoints.
        policy_version: Optimiser steps done.
        model: The learner's sharded policy.
        optimizer: Its optimiser.
        train_state: Counters and cursors; rank 0's is written.
        keep: Complete checkpoints to leave, newest first.
        group: The control group.

    Raises:
        CheckpointError: A rank could not write.
    """
    final = step_folder(root, policy_version)
    temporary = final.with_name(final.name + ".tmp")
    is_first = dist.get_rank(group) == 0
    with _Together(group, f"checkpoint {final}"):
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    with _Together(group, f"checkpoint {final}"):
        dcp_save(_state(model, optimizer, policy_version), checkpoint_id=temporary, process_group=group)
    with _Together(group, f"checkpoint {final}"):
        if is_first:
            (temporary / TRAIN_STATE).write_text(json.dumps(train_state))
            sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
            (temporary / COMPLETE).write_text(json.dumps({"policy_version": policy_version, "files": sizes}))
            for path in [*temporary.iterdir(), temporary]:
                _sync_to_disk(path)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            point_link(root / "latest", final.name)
            _sync_to_disk(root)
            for old in [folder for folder in complete_checkpoints(root) if folder != final][keep - 1 :]:
                shutil.rmtree(old)
    return final


def load(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Read a complete checkpoint into model and optimiser, whatever the number of ranks that wrote it."""
    state = _state(model, optimizer, read_train_state(folder)["policy_version"])
    with _Together(group, f"checkpoint {folder}"):
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


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, policy_version: int) -> dict[str, Any]:
    """What a checkpoint of `policy_version` holds, to be saved or to be loaded into."""
    # What is frozen comes from where it came from: a checkpoint of the model, or the seed.
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=_TRAINABLE)}
    if policy_version > 0:  # before its first step the optimiser has no state; asking for it would make one, a step old
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def take_back(root: Path, policy_version: int) -> None:
    """Remove checkpoints beyond the version a run goes on from, and remains of saves that were killed."""
    for folder in root.glob("step_*"):
        digits = folder.name.removeprefix("step_")
        if folder.suffix == ".tmp" or (digits.isdigit() and int(digits) > policy_version):
            shutil.rmtree(folder)
    if root.exists() and step_folder(root, policy_version).exists():
        point_link(root / "latest", step_folder(root, policy_version).name)


def read_train_state(folder: Path) -> dict[str, Any]:
    """Counters and cursors of a checkpoint."""
    return json.loads((folder / TRAIN_STATE).read_text())


def fault_of(folder: Path) -> str | None:
    """What is wrong with the checkpoint in `folder`; None when it is complete."""
    try:
        files = json.loads((folder / COMPLETE).read_text())["files"]
    except FileNotFoundError:
        return f"{COMPLETE} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{COMPLETE} cannot be read ({error})"
    for name, size in files.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def _all_checkpoints(root: Path) -> list[Path]:
    """Checkpoints below `root`, newest first, torn ones included."""
    return sorted(root.glob("step_" + "[0-9]" * 6), reverse=True)


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints below `root`, newest first."""
    return [folder for folder in _all_checkpoints(root) if fault_of(folder) is None]


def torn_checkpoints(root: Path) -> dict[Path, str]:
    """Torn checkpoints below `root`, with what is wrong with each."""
    return {folder: fault for folder in _all_checkpoints(root) if (fault := fault_of(folder)) is not None}


def find(resume: str, root: Path) -> Path | None:
    """The checkpoint `resume` means: None for `none`, the newest complete one for `auto`, else a path.

    Raises:
        ConfigError: The path is no complete checkpoint.
    """
    if resume == "none":
        return None
    if resume == "auto":
        complete = complete_checkpoints(root)
        return complete[0] if complete else None
    folder = Path(resume)
    fault = fault_of(folder)
    if fault:
        raise ConfigError(f"resume={resume}: no complete checkpoint ({fault}); give a step_NNNNNN folder, auto or none")
    return folder


class _Together:
    """A block that succeeds on all ranks of a group or raises on all of them."""

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group, self._what = group, what

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Tell the others how it went here, and hear how it went there."""
        faults: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(faults, None if error is None else f"{type(error).__name__}: {error}", group=self._group)
        for rank, fault in enumerate(faults):
            if fault is not None:
                raise CheckpointError(f"{self._what} failed on rank {rank}: {fault.splitlines()[0]}") from error


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
