"""Demonstrations as they are read from disk, whatever layout they lie in there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dvla.config import ConfigError

_ACTION_LIMIT = 1.0 + 1e-3
"""Experts' actions exceed 1 by rounding at most."""


class DatasetError(ConfigError):
    """A dataset that cannot be trained on; the message names the file and the column."""


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """T control steps of one task; pictures stay on disk until they are asked for."""

    file: Path
    """Where it lies; for messages."""
    instruction: str
    states: np.ndarray
    """(T, state_dim) float32, before each step; state_dim may be 0."""
    actions: np.ndarray
    """(T, action_dim) float32 in [-1, 1], in the environment's units."""
    read_pictures: Callable[[], Iterator[np.ndarray]]
    """What was seen before each step: T times (cameras, H, W, 3) uint8 RGB. Raises DatasetError."""

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedDataset:
    """Episodes that all hold the same: cameras, picture size, lengths of state and action."""

    name: str
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    """Height and width in pixels, the same for every camera; (0, 0) without cameras."""
    episodes: tuple[RecordedEpisode, ...]
    gripper_open: float | None = None
    """Value (1 or -1) of the last action element that opens the gripper; None when it is not known."""

    @property
    def instructions(self) -> tuple[str, ...]:
        """The instructions there are, in the order of their first episodes."""
        return tuple(dict.fromkeys(episode.instruction for episode in self.episodes))

    @property
    def num_steps(self) -> int:
        """Control steps of all episodes."""
        return sum(map(len, self.episodes))

    @property
    def state_dim(self) -> int:
        """Length of the state, 0 where there is none."""
        return self.episodes[0].states.shape[1]

    @property
    def action_dim(self) -> int:
        """Length of an action."""
        return self.episodes[0].actions.shape[1]

    def fingerprint(self) -> str:
        """SHA-256 of everything but the pictures."""
        digest = hashlib.sha256(repr((self.name, self.cameras, self.image_size)).encode())
        for episode in self.episodes:
            digest.update(episode.instruction.encode())
            digest.update(episode.states.tobytes())
            digest.update(episode.actions.tobytes())
        return digest.hexdigest()

    def check(self) -> None:
        """Find what cannot be trained on.

        Raises:
            DatasetError: There are no demonstrations, numbers are not finite or not in range, or episodes differ in what
                they hold.
        """
        if not self.num_steps:
            raise DatasetError(f"dataset {self.name}: no demonstrations")
        first = self.episodes[0]
        for episode in self.episodes:
            for what in ("states", "actions"):
                values, wanted = getattr(episode, what), getattr(first, what).shape[1]
                if values.shape[1] != wanted:
                    raise DatasetError(
                        f"{episode.file}: {what} have {values.shape[1]} elements, those of {first.file} have {wanted}"
                    )
                if not np.isfinite(values).all():
                    row, element = np.argwhere(~np.isfinite(values))[0]
                    raise DatasetError(f"{episode.file}: element {element} of {what}, step {row}, is not finite")
            if len(episode) and (most := np.abs(episode.actions).max(0)).max() > _ACTION_LIMIT:
                raise DatasetError(
                    f"{episode.file}: element {most.argmax()} of actions comes to {most.max():.3g}: environments take "
                    "actions in [-1, 1], in which a dataset must hold them"
                )


def joined(name: str, parts: list[RecordedDataset]) -> RecordedDataset:
    """Several datasets as one.

    Raises:
        DatasetError: They do not go together.
    """
    first, *others = parts
    for other in others:
        for what in ("cameras", "image_size"):
            if getattr(other, what) != getattr(first, what):
                raise DatasetError(
                    f"data.paths: {what} of {other.name} are {getattr(other, what)}, those of {first.name} "
                    f"{getattr(first, what)}"
                )
    return replace(first, name=name, episodes=tuple(episode for part in parts for episode in part.episodes))
