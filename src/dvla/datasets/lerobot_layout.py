"""LeRobot's dataset layout v2.1: names of files and columns, and the statistics it keeps of every episode.

It is what ``lerobot`` 0.3 reads and writes (``lerobot/datasets/{utils,compute_stats}.py`` there); newer versions convert it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VERSION = "v2.1"
CHUNK_SIZE = 1000
"""Episodes of one folder ``chunk-NNN``."""
DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
_FIELD = re.compile(r"\{(\w+)(?::0(\d)d)?\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetLayout:
    """What the frames of a dataset hold."""

    fps: int
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    """Height and width in pixels."""
    videos: bool
    """Pictures lie in videos; else as PNG in the tables."""
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]

    @property
    def image_keys(self) -> tuple[str, ...]:
        """The cameras' columns, or videos."""
        return tuple(f"observation.images.{camera}" for camera in self.cameras)

    def features(self) -> dict[str, dict[str, Any]]:
        """``features`` of ``info.json``, in the order of the columns."""
        height, width = self.image_size
        image: dict[str, Any] = {
            "dtype": "video" if self.videos else "image",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
        }
        if self.videos:
            image["info"] = {
                "video.height": height,
                "video.width": width,
                "video.codec": "h264",
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "video.fps": self.fps,
                "video.channels": 3,
                "has_audio": False,
            }

        def vector(names: tuple[str, ...]) -> dict[str, Any]:
            return {"dtype": "float32", "shape": [len(names)], "names": list(names)}

        def number(dtype: str) -> dict[str, Any]:
            return {"dtype": dtype, "shape": [1], "names": None}

        return {
            **dict.fromkeys(self.image_keys, image),
            "observation.state": vector(self.state_names),
            "action": vector(self.action_names),
            "next.reward": number("float32"),
            "next.success": number("bool"),
            "next.done": number("bool"),
            "timestamp": number("float32"),
            **{key: number("int64") for key in ("frame_index", "episode_index", "index", "task_index")},
        }


def column_statistics(values: np.ndarray) -> dict[str, list]:
    """Statistics of one column of an episode, (T,) or (T, n), over its T frames."""
    result = _statistics(values, 0, keepdims=values.ndim == 1)
    return {name: x.tolist() for name, x in result.items()} | {"count": [len(values)]}


def image_statistics(frames: np.ndarray) -> dict[str, list]:
    """Statistics of one camera in an episode, (T, H, W, 3) uint8: per channel, of shape (3, 1, 1), scaled to [0, 1]."""
    result = _statistics(frames.transpose(0, 3, 1, 2), (0, 2, 3), keepdims=True)
    return {name: (x[0] / 255.0).tolist() for name, x in result.items()} | {"count": [len(frames)]}


def _statistics(values: np.ndarray, axis: int | tuple[int, ...], *, keepdims: bool) -> dict[str, np.ndarray]:
    functions: dict[str, Any] = {"min": np.min, "max": np.max, "mean": np.mean, "std": np.std}
    return {name: function(values, axis=axis, keepdims=keepdims) for name, function in functions.items()}


def arrow_schema(layout: DatasetLayout) -> Any:
    """The ``pyarrow.Schema`` of an episode's table, with the note by which Hugging Face ``datasets`` knows pictures."""
    import pyarrow as pa

    types: dict[str, Any] = {}
    notes: dict[str, dict[str, Any]] = {}
    for name, feature in layout.features().items():
        (length, *more), dtype = feature["shape"], feature["dtype"]
        if dtype == "video":
            continue
        if more:
            types[name] = pa.struct({"bytes": pa.binary(), "path": pa.string()})
            notes[name] = {"_type": "Image"}
            continue
        value = {"float32": pa.float32(), "int64": pa.int64(), "bool": pa.bool_()}[dtype]
        types[name] = value if length == 1 else pa.list_(value, length)
        note = {"dtype": dtype, "_type": "Value"}
        notes[name] = note if length == 1 else {"feature": note, "length": length, "_type": "Sequence"}
    return pa.schema(types, metadata={"huggingface": json.dumps({"info": {"features": notes}})})


def chunk_path(pattern: str, episode: int, key: str = "") -> Path:
    """The relative path of an episode's file."""
    places = {"episode_chunk": episode // CHUNK_SIZE, "episode_index": episode, "video_key": key}
    return Path(fill_pattern(pattern, places))


def fill_pattern(pattern: str, values: Mapping[str, Any]) -> str:
    """Put values into the fields of a pattern of ``info.json``; `str.format` would let a stranger's reach into objects.

    Raises:
        KeyError: A field has another name than the values.
    """
    return _FIELD.sub(lambda field: str(values[field[1]]).zfill(int(field[2] or 0)), pattern)
