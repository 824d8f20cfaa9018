"""Numbers of every optimiser step, for programs (``metrics.jsonl``) and people (TensorBoard); rank 0 only.

Evaluations have a file of their own (``evaluations.jsonl``), since they may take longer than a step.

Every line is on the disk's doorstep once `write` returns: a killed run loses nothing but perhaps the tail of its last line.
A full disk ends no run: lines wait until there is room, and TensorBoard lacks the steps. The tags are explained in
``docs/metrics.md``.
"""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from dvla.telemetry.atomic_file import write_atomically
from dvla.telemetry.line_file import LineFile

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
_FILM_FRAME_MS = 250


class Histogram(NamedTuple):
    """How many values lie in each of some bins."""

    edges: tuple[float, ...]
    """Ascending and evenly spaced, at least two; a value on an edge lies above it. The outer bins are open."""
    counts: list[float]
    """One more than there are edges."""


class MetricsWriter:
    """Writes metrics of one run; used by one thread.

    Args:
        folder: The run folder.
        tensorboard: Write event files too. Importing TensorBoard takes a second or more.
        resume_at: Version of the checkpoint the run goes on from, 0 for none: what was written beyond it is
            taken back, so that every step appears once.
        warn: Told of what cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool = True,
        resume_at: int = 0,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (FILE_NAME, EVALUATIONS):
            _take_back(folder / name, resume_at)
        (folder / FILE_NAME).touch()
        self._lines, self._evaluations = LineFile(folder / FILE_NAME, warn), LineFile(folder / EVALUATIONS, warn)
        self._folder, self._warn, self._has_tensorboard = folder, warn, tensorboard
        self._tensorboard: SummaryWriter | None = None
        self._show(lambda _: None, purge_step=resume_at + 1)

    def write(
        self,
        policy_version: int,
        env_steps: int | None,
        values: Mapping[str, float | None],
        histograms: Mapping[str, Histogram] | None = None,
    ) -> None:
        """Write one step.

        Args:
            policy_version: Optimiser steps done; the x axis.
            env_steps: Simulator control steps so far; the other x axis. None where there is no simulator.
            values: By tag; what is None, NaN or infinite is null in the file and left out of TensorBoard.
            histograms: By tag; the file has the counts alone.
        """
        histograms = histograms or {}
        finite = {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}
        counts = {} if env_steps is None else {"env_steps": env_steps}
        line: dict[str, Any] = {"policy_version": policy_version} | counts | dict.fromkeys(values) | finite
        line |= {tag: [int(count) for count in histogram.counts] for tag, histogram in histograms.items()}
        self._lines.add(json.dumps(line, default=float))

        def show(tensorboard: SummaryWriter) -> None:
            for tag, value in ({f"rollout/{key}": count for key, count in counts.items()} | finite).items():
                tensorboard.add_scalar(tag, float(value), policy_version)
            for tag, histogram in histograms.items():
                _add_histogram(tensorboard, tag, histogram, policy_version)

        self._show(show)

    def write_evaluation(self, policy_version: int, values: Mapping[str, float]) -> None:
        """Write the result of an evaluation that began with the weights of `policy_version`."""
        self._evaluations.add(json.dumps({"policy_version": policy_version, **values}))

        def show(tensorboard: SummaryWriter) -> None:
            for tag, value in values.items():
                tensorboard.add_scalar(tag, value, policy_version)

        self._show(show)

    def add_text(self, tag: str, text: str) -> None:
        """Show a text, verbatim, in TensorBoard."""
        verbatim = "\n".join(f"    {line}" for line in text.splitlines())
        self._show(lambda tensorboard: tensorboard.add_text(tag, verbatim))

    def add_layout(self, layout: dict[str, Any]) -> None:
        """Lay out charts for TensorBoard's tab Custom Scalars, as `dvla.telemetry.tensorboard_layout` does."""
        self._show(lambda tensorboard: tensorboard.add_custom_scalars(layout))

    def add_film(self, tag: str, frames: np.ndarray, policy_version: int) -> None:
        """Show frames (T, cameras, H, W, 3) uint8 in TensorBoard, one after another, cameras side by side."""
        self._show(lambda tensorboard: _add_film(tensorboard, tag, frames, policy_version))

    def _show(self, show: Callable[[SummaryWriter], None], purge_step: int | None = None) -> None:
        """Add to TensorBoard, in a new file if the last one could not be written; not while the disk is full."""
        if not self._has_tensorboard or self._lines.is_behind:
            return
        from torch.utils.tensorboard import SummaryWriter

        try:
            if self._tensorboard is None:
                self._tensorboard = SummaryWriter(str(self._folder / "tb"), purge_step=purge_step)
            show(self._tensorboard)
        except OSError as error:
            self._tensorboard = None  # not closed: that would wait for its thread, which has ended
            self._warn(f"TensorBoard lacks this step: {error}")

    def close(self) -> None:
        """Write what is left and close the files; closing twice does no harm."""
        for file in (self._lines, self._evaluations):
            file.close()
        if self._tensorboard:
            self._show(lambda tensorboard: tensorboard.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _add_histogram(tensorboard: SummaryWriter, tag: str, histogram: Histogram, policy_version: int) -> None:
    """Show a histogram, its open bins as wide as the others. The values are gone, so their moments are those of the bins."""
    edges, counts = histogram
    width = edges[1] - edges[0]
    limits = [*edges, edges[-1] + width]
    middles = [limit - width / 2 for limit in limits]
    pairs = list(zip(counts, middles, strict=True))
    tensorboard.add_histogram_raw(
        tag,
        min=edges[0] - width,
        max=limits[-1],
        num=int(sum(counts)),
        sum=sum(count * middle for count, middle in pairs),
        sum_squares=sum(count * middle**2 for count, middle in pairs),
        bucket_limits=limits,
        bucket_counts=counts,
        global_step=policy_version,
    )


def _add_film(tensorboard: SummaryWriter, tag: str, frames: np.ndarray, policy_version: int) -> None:
    """Show an animated GIF among the images: SummaryWriter's own videos need a package for which there is no other use."""
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    pictures = [Image.fromarray(np.concatenate(list(cameras), axis=1)) for cameras in frames]
    file = io.BytesIO()
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=_FILM_FRAME_MS, loop=0)
    image = Summary.Image(
        height=pictures[0].height, width=pictures[0].width, colorspace=3, encoded_image_string=file.getvalue()
    )
    tensorboard._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), policy_version)


def _take_back(path: Path, resume_at: int) -> None:
    """Drop lines beyond a version, and one that was being written when the run was killed."""
    if path.exists():
        kept = [line for line in read_metrics(path) if line["policy_version"] <= resume_at]
        write_atomically(path, (json.dumps(line) + "\n" for line in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, without a torn last one."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
