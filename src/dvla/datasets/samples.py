"""What behaviour cloning trains on: every step of every episode as a decision, with the actions that followed it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dvla.datasets.recorded import RecordedDataset
from dvla.models.policy import Observation


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """B decisions of experts, on the policy's device."""

    observation: Observation
    actions: Tensor
    """(B, H, A) float32, in the environment's units; beyond the episode's end its last one again."""
    mask: Tensor
    """(B, H) bool: steps of the episode."""


class Samples:
    """The decisions of a dataset, numbered through all its episodes.

    Args:
        dataset: Its states, actions and instructions.
        frames: Its pictures, (steps, cameras, H, W, 3) uint8.
        horizon: Actions H of one sample.
        device: Where batches go.
    """

    def __init__(self, dataset: RecordedDataset, frames: np.ndarray, *, horizon: int, device: torch.device) -> None:
        episodes, tasks = dataset.episodes, dataset.instructions
        self._frames, self._horizon, self._device = frames, horizon, device
        self._states = np.concatenate([episode.states for episode in episodes])
        self._actions = np.concatenate([episode.actions for episode in episodes])
        lengths = [len(episode) for episode in episodes]
        self._tasks = np.repeat([tasks.index(episode.instruction) for episode in episodes], lengths)
        self._last = np.repeat(np.cumsum(lengths) - 1, lengths)

    def num_actions(self, rows: np.ndarray) -> int:
        """Steps of their episodes that the samples `rows` hold together."""
        return int(np.minimum(self._last[rows] - rows + 1, self._horizon).sum())

    def batch(self, rows: np.ndarray) -> SampleBatch:
        """The samples `rows` (B,) int64."""
        steps = rows[:, None] + np.arange(self._horizon)
        last = self._last[rows][:, None]

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(self._device)

        return SampleBatch(
            observation=Observation(
                images=tensor(self._frames[rows]), state=tensor(self._states[rows]), task=tensor(self._tasks[rows])
            ),
            actions=tensor(self._actions[np.minimum(steps, last)]),
            mask=tensor(steps <= last),
        )


def split_episodes(dataset: RecordedDataset, held_out_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the samples to train on, and of those of the episodes that are held out; drawn by `seed`, int64.

    With a fraction above 0, at least one episode is held out, and at least one is not.
    """
    lengths = [len(episode) for episode in dataset.episodes]
    count = min(max(1, round(held_out_fraction * len(lengths))), len(lengths) - 1) if held_out_fraction else 0
    chosen = np.random.default_rng(seed).permutation(len(lengths))[:count]
    is_held_out = np.repeat(np.isin(np.arange(len(lengths)), chosen), lengths)
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def batch_rows(rows: np.ndarray, *, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Which of `rows` the optimiser step that follows `step` others trains on, (batch_size,).

    It follows from the arguments alone, so that a resumed run goes on as it would have. Every epoch takes all rows once, in
    an order of its own; a batch may begin in one epoch and end in the next.
    """
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs, offsets = np.divmod(places, len(rows))
    orders = {epoch: _order(seed, epoch, len(rows)) for epoch in np.unique(epochs).tolist()}
    chosen = [orders[epoch][offset] for epoch, offset in zip(epochs.tolist(), offsets.tolist(), strict=True)]
    return rows[chosen]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
