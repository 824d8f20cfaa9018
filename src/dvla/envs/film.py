"""The video of one episode, recorded beside the simulator so that no frame has to travel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dvla.telemetry.video import VideoWriter

if TYPE_CHECKING:
    from dvla.envs.protocol import Environment

FRAMES_PER_SECOND = 20
"""Usual control frequency of both simulators: the video runs at the robot's own pace."""
MIN_HEIGHT = 240
"""Pixels: smaller pictures are enlarged by the next whole factor, so that a player shows more than a stamp."""


class EpisodeFilm:
    """All cameras side by side, one frame per control step.

    Args:
        path: The file without ending; how the episode ended becomes part of the name.
        env: What to film.
    """

    def __init__(self, path: Path, env: Environment) -> None:
        spec = env.spec
        height, width = spec.image_size
        self._env, self._path = env, path
        self._images = np.empty((len(spec.cameras), height, width, 3), np.uint8)
        self._state = np.empty(spec.state_dim, np.float32)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._running = path.with_name(path.name + ".mp4")
        self._enlarged = -(-MIN_HEIGHT // height)
        size = (height * self._enlarged, width * len(spec.cameras) * self._enlarged)
        self._video = VideoWriter(self._running, *size, FRAMES_PER_SECOND)

    def add(self) -> None:
        """Render and append the present state."""
        self._env.observe(self._images, self._state)
        frame = np.concatenate(list(self._images), axis=1)
        self._video.add(frame.repeat(self._enlarged, axis=0).repeat(self._enlarged, axis=1))

    def close(self, ending: str) -> None:
        """Complete the file as ``<path>_<ending>.mp4``."""
        self._video.close()
        self._running.rename(self._path.with_name(f"{self._path.name}_{ending}.mp4"))
