"""Numbers of every optimiser step, for programs (``metrics.jsonl``) and people (TensorBoard); rank 0 only.

The JSON Lines file is the one that tests and reports read. Every line is on the disk's doorstep once `write`
returns: a killed run loses nothing but perhaps the tail of its last line. The tags are explained in
``docs/metrics.md``.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Self

from dvla.telemetry.atomic_file import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.utils.tensorboard import SummaryWriter

FILE_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tb"


class MetricsWriter:
    """Writes metrics of one run; used by one thread.

    Args:
        folder: The run folder.
        tensorboard: Write event files too. Importing TensorBoard takes a second or more.
        resume_at: Version of the checkpoint the run goes on from, 0 for none: what was written beyond it is
            taken back, so that every step appears once.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = True, resume_at: int = 0) -> None:
        path = folder / FILE_NAME
        folder.mkdir(parents=True, exist_ok=True)
        _take_back(path, resume_at)
        self._file = path.open("a", buffering=1, encoding="utf-8")  # a line goes to the system as it ends
        self._tensorboard: SummaryWriter | None = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=resume_at + 1)

    def write(self, policy_version: int, env_steps: int, values: Mapping[str, float | None]) -> None:
        """Write one step.

        Args:
            policy_version: Optimiser steps done; the x axis.
            env_steps: Simulator control steps so far; the other x axis.
            values: By tag; what is None, NaN or infinite is null in the file and left out of TensorBoard.
        """
        finite = {tag: value if _is_finite(value) else None for tag, value in values.items()}
        line = {"policy_version": policy_version, "env_steps": env_steps, **finite}
        self._file.write(json.dumps(line, allow_nan=False, default=float) + "\n")
        if self._tensorboard:
            self._tensorboard.add_scalar("rollout/env_steps", env_steps, policy_version)
            for tag, value in finite.items():
                if value is not None:
                    self._tensorboard.add_scalar(tag, float(value), policy_version)

    def add_text(self, tag: str, text: str) -> None:
        """Show a text, verbatim, in TensorBoard."""
        if self._tensorboard:
            self._tensorboard.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()))

    def close(self) -> None:
        """Write what is left and close the files; closing twice does no harm."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, without a torn last one."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _take_back(path: Path, resume_at: int) -> None:
    """Remove the lines beyond a version, and a line that was being written when the run was killed."""
    if not path.exists():
        return
    before = path.read_text(encoding="utf-8")
    kept = [line for line in read_metrics(path) if line["policy_version"] <= resume_at]
    after = "".join(json.dumps(line) + "\n" for line in kept)
    if after != before:
        write_atomically(path, [after])


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
