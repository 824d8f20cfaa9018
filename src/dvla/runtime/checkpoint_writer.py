"""Writes checkpoints beside training: a copy is taken at once, a thread of its own brings it to the disk.

Every rank writes its part into ``step_N.tmp`` and hashes it; the first rank then adds the counters and the list of all files,
renames the folder, and moves ``latest`` last. A save that fails (a full disk) fails on all ranks alike: it is said and
counted, what it left is removed, and training goes on. Only the last save of a run must succeed.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.utils._pytree import tree_map_only

from dvla.planes.semaphore import WaitTimeoutError
from dvla.runtime.checkpoint import (
    COMPLETE,
    TRAIN_STATE,
    CheckpointError,
    Together,
    complete_checkpoints,
    set_aside,
    sha256_of,
    state_of,
    step_folder,
)
from dvla.runtime.run_folder import point_link

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from dvla.telemetry.trace import Tracer


class CheckpointWriter:
    """Saves versions of a run, one at a time; used by one thread, and collective over the group.

    Args:
        root: Folder of all checkpoints.
        keep: Complete checkpoints to leave, newest first.
        group: gloo, the training ranks; nobody else uses it.
        overlaps: `save` returns once the state is copied to the host, and a thread writes the copy. Else it returns when it is
            written.
        timeout_s: Seconds to wait for a save under way.
        saved_version: The version that the run goes on from, if it has it as a checkpoint of its own.
        warn: Told of a save that failed, from the thread that writes.
        tracer: Records what the writer does.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        group: dist.ProcessGroup,
        overlaps: bool,
        timeout_s: float,
        saved_version: int | None,
        warn: Callable[[str], None],
        tracer: Tracer,
    ) -> None:
        self._root, self._keep, self._group = root, keep, group
        self._leads = dist.get_rank(group) == 0
        self._timeout_s, self._warn, self._tracer = timeout_s, warn, tracer
        self._thread = ThreadPoolExecutor(1, initializer=_name_thread) if overlaps else None
        self._under_way: Future[None] | None = None
        self._failure: CheckpointError | None = None  # of the last save
        self._num_failures, self._block_s = 0, 0.0
        self._write_s: float | None = None
        self._num_bytes: int | None = None
        self.saved_version = saved_version
        """The newest version that lies on the disk, the same on all ranks once `wait` has returned."""

    def save(
        self, policy_version: int, model: nn.Module, optimizer: torch.optim.Optimizer, train_state: dict[str, Any]
    ) -> None:
        """Save a version; first waits for the save under way.

        Args:
            policy_version: Optimiser steps done.
            model: The learner's sharded policy.
            optimizer: Its optimiser.
            train_state: Counters and cursors; those of the first rank are written.
        """
        self.wait()
        begin = time.monotonic()
        job = policy_version, state_of(model, optimizer, policy_version), json.dumps(train_state)
        if self._thread is None:
            self._write(*job)
        else:
            version, state, text = job
            on_host = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
            self._under_way = self._thread.submit(self._write, version, on_host, text)
        self._block_s += time.monotonic() - begin

    def wait(self) -> None:
        """Wait for the save under way, which may fail.

        Raises:
            WaitTimeoutError: It took too long.
            Exception: The group is broken.
        """
        begin, save = time.monotonic(), self._under_way
        if save is None:
            return
        wait_for([save], self._timeout_s)
        if not save.done():
            raise WaitTimeoutError(
                f"lane grpo waited {self._timeout_s:.0f} s for the writer of checkpoints; raise runtime.collective_timeout_s "
                f"if writing to {self._root} can take that long"
            )
        self._under_way = None
        self._block_s += time.monotonic() - begin
        save.result()

    def finish(self) -> None:
        """Wait for the last save.

        Raises:
            CheckpointError: It failed.
        """
        self.wait()
        if self._failure is not None:
            raise self._failure

    def metrics(self) -> dict[str, float | None]:
        """By tag, as in ``docs/metrics.md``."""
        block_s, self._block_s = self._block_s, 0.0
        return {
            "checkpoint/block_s": block_s,
            "checkpoint/write_s": self._write_s,
            "checkpoint/bytes": self._num_bytes,
            "checkpoint/failures": self._num_failures,
        }

    def _write(self, policy_version: int, state: dict[str, Any], train_state: str) -> None:
        begin, final = time.monotonic(), step_folder(self._root, policy_version)
        temporary = final.with_name(final.name + ".tmp")
        together = Together(self._group, f"checkpoint {final}")
        try:
            with together:
                if self._leads:
                    shutil.rmtree(temporary, ignore_errors=True)
                    temporary.mkdir(parents=True)
            files = _HashingWriter(temporary, self._tracer.span("checkpoint write", version=policy_version))
            with together:
                dcp_save(state, storage_writer=files, process_group=self._group)
            parts: list[dict[str, Any]] = [{}] * dist.get_world_size(self._group)
            dist.all_gather_object(parts, files.written, group=self._group)
            written = {name: entry for part in parts for name, entry in part.items()}
            with together:
                if self._leads:
                    with self._tracer.span("checkpoint commit", version=policy_version):
                        self._commit(temporary, final, written, train_state)
            self.saved_version, self._failure = policy_version, None
            self._num_bytes = sum(entry["size"] for entry in written.values())
        except CheckpointError as error:
            self._failure = error
            self._num_failures += 1
            if self._leads:
                shutil.rmtree(temporary, ignore_errors=True)
            self._warn(f"{error}; the last complete checkpoint is kept")
        self._write_s = time.monotonic() - begin

    def _commit(self, temporary: Path, final: Path, files: dict[str, Any], train_state: str) -> None:
        """Make what lies in `temporary` the checkpoint `final`."""
        (temporary / TRAIN_STATE).write_text(train_state, encoding="utf-8")
        files |= {path.name: _entry(path) for path in temporary.iterdir() if path.name not in files}
        (temporary / COMPLETE).write_text(json.dumps({"files": files}), encoding="utf-8")
        for path in [*temporary.iterdir(), temporary]:
            _sync_to_disk(path)
        removed = [set_aside(final)] if final.exists() else []
        temporary.rename(final)
        point_link(self._root / "latest", final.name)
        _sync_to_disk(self._root)
        others = [folder for folder in complete_checkpoints(self._root) if folder != final]
        removed += [set_aside(folder) for folder in others[self._keep - 1 :]]
        for folder in removed:
            shutil.rmtree(folder, ignore_errors=True)  # what is left is removed at the next start


class _HashingWriter(FileSystemWriter):
    """Writes this rank's part and remembers what it wrote.

    Args:
        folder: Where to.
        span: Around the writing. An error in it is one of the writing, which all ranks hear of.
    """

    def __init__(self, folder: Path, span: AbstractContextManager[None]) -> None:
        super().__init__(folder)
        self._folder, self._span = folder, span
        self.written: dict[str, Any] = {}
        """Size and hash by file name."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        """Write the part in `plan`."""
        try:
            with self._span:
                future = super().write_data(plan, planner)
                names = {result.storage_data.relative_path for result in future.wait()}
                self.written = {name: _entry(self._folder / name) for name in sorted(names)}
        except RuntimeError as error:  # torch's own complaint about a file it could not write hides the system's
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        return future


def _entry(path: Path) -> dict[str, Any]:
    """What the list of files says of one."""
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}


def _name_thread() -> None:
    threading.current_thread().name = "dvla-checkpoint"


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
