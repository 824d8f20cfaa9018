"""Writes a dataset in LeRobot's layout, readable after every episode.

Episodes are prepared anywhere, in any order (`stage_episode`), and get their number when they join the dataset
(`LeRobotWriter.add`): so that worker processes do the work, and their number does not show.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dvla.datasets.lerobot_layout import (
    CHUNK_SIZE,
    DATA_PATH,
    VERSION,
    VIDEO_PATH,
    DatasetLayout,
    arrow_schema,
    chunk_path,
    column_statistics,
    image_statistics,
)
from dvla.telemetry.atomic_file import write_atomically
from dvla.telemetry.video import VideoWriter

_KEYFRAME_EVERY = 2  # as LeRobot does: training reads single frames in random order


@dataclass(frozen=True, slots=True)
class Episode:
    """T control steps: what was seen before each, what was done, what came of it."""

    images: np.ndarray
    """(T, cameras, H, W, 3) uint8."""
    states: np.ndarray
    """(T, state_dim) float32."""
    actions: np.ndarray
    """(T, action_dim) float32."""
    rewards: np.ndarray
    """(T,) float32, of the step that begins here."""
    successes: np.ndarray
    """(T,) bool, after that step."""


def stage_episode(folder: Path, episode: Episode, layout: DatasetLayout) -> None:
    """Write an episode to the new folder `folder`: its table without numbers, its videos and its statistics."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    length = len(episode.actions)
    frame = np.arange(length)
    columns = {
        "observation.state": episode.states,
        "action": episode.actions,
        "next.reward": episode.rewards,
        "next.success": episode.successes,
        "next.done": frame == length - 1,
        "timestamp": (frame / layout.fps).astype(np.float32),
        "frame_index": frame,
        "task_index": np.zeros(length, np.int64),
    }
    statistics = {key: image_statistics(episode.images[:, n]) for n, key in enumerate(layout.image_keys)}
    statistics |= {name: column_statistics(values) for name, values in columns.items()}
    (folder / "statistics.json").write_text(json.dumps(statistics))
    table: dict[str, Any] = {
        name: list(values) if values.ndim > 1 and values.shape[1] > 1 else values.reshape(-1)
        for name, values in columns.items()
    }
    for n, key in enumerate(layout.image_keys):
        if layout.videos:
            height, width = layout.image_size
            with VideoWriter(folder / f"{key}.mp4", height, width, layout.fps, _KEYFRAME_EVERY) as video:
                for image in episode.images[:, n]:
                    video.add(image)
        else:
            table[key] = [
                {"bytes": _png(image), "path": f"frame_{i:06d}.png"} for i, image in enumerate(episode.images[:, n])
            ]
    schema = arrow_schema(layout)
    known = pa.schema([field for field in schema if field.name in table])
    pq.write_table(pa.table(table, schema=known), folder / "frames.parquet")


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return file.getvalue()


class LeRobotWriter:
    """A dataset that grows by whole episodes; after each one it is complete.

    Args:
        folder: Where to; it exists and holds no dataset yet.
        layout: What the frames hold.
        task: The instruction, the same for all episodes.
        robot: LeRobot's ``robot_type``.
    """

    def __init__(self, folder: Path, layout: DatasetLayout, *, task: str, robot: str) -> None:
        self.folder = folder
        self.episodes = 0
        self.frames = 0
        self._layout, self._task, self._robot = layout, task, robot
        self._schema = arrow_schema(layout)
        (folder / "meta").mkdir(exist_ok=True)
        self._append("tasks", {"task_index": 0, "task": task})

    def add(self, staged: Path, *, seed: int) -> None:
        """Move an episode of `stage_episode` into the dataset; `seed` is noted with it."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pq.read_table(staged / "frames.parquet")
        statistics = json.loads((staged / "statistics.json").read_text())
        length = table.num_rows
        numbers = {
            "episode_index": np.full(length, self.episodes),
            "index": np.arange(self.frames, self.frames + length),
        }
        for name, values in numbers.items():
            table = table.append_column(name, pa.array(values))
            statistics[name] = column_statistics(values)
        path = self._place(DATA_PATH)
        pq.write_table(table.select(self._schema.names).cast(self._schema), path)
        if self._layout.videos:
            for key in self._layout.image_keys:
                (staged / f"{key}.mp4").rename(self._place(VIDEO_PATH, key))
        self._append("episodes_stats", {"episode_index": self.episodes, "stats": statistics})
        self._append(
            "episodes", {"episode_index": self.episodes, "tasks": [self._task], "length": length, "seed": seed}
        )
        self.episodes += 1
        self.frames += length
        write_atomically(self.folder / "meta/info.json", [json.dumps(self._info(), indent=4)])

    def _info(self) -> dict[str, Any]:
        videos = self._layout.videos
        return {
            "codebase_version": VERSION,
            "robot_type": self._robot,
            "total_episodes": self.episodes,
            "total_frames": self.frames,
            "total_tasks": 1,
            "total_videos": self.episodes * len(self._layout.cameras) if videos else 0,
            "total_chunks": -(-self.episodes // CHUNK_SIZE),
            "chunks_size": CHUNK_SIZE,
            "fps": self._layout.fps,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if videos else None,
            "features": self._layout.features(),
        }

    def _place(self, pattern: str, key: str = "") -> Path:
        path = self.folder / chunk_path(pattern, self.episodes, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / f"meta/{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
