"""Reads datasets in LeRobot's layouts v2.0, v2.1 and v3.0.

The older ones keep a table and a video for each episode, and notes as JSON lines; v3.0 keeps many episodes in one table and
one video, and notes as tables. Only tables are read at first; pictures follow when an episode is asked for them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from dvla.datasets.lerobot_layout import fill_pattern
from dvla.datasets.recorded import DatasetError, RecordedDataset, RecordedEpisode
from dvla.runtime.confined_path import inside
from dvla.runtime.json_file import parse, read_object

_VERSIONS = ("v2.0", "v2.1", "v3.0")


@dataclass(frozen=True, slots=True)
class _Camera:
    """One column of pictures, or one sort of videos."""

    key: str
    is_video: bool
    size: tuple[int, int]
    """Height and width, pixels."""


@dataclass(frozen=True, slots=True)
class _Clip:
    """An episode's part of a camera's file."""

    folder: Path
    """The dataset's, in which pictures may lie as files of their own."""
    file: Path
    begin_s: float
    """Where it begins in a video."""
    first_row: int
    """Where it begins in a table."""


def read_lerobot(
    folder: Path, *, name: str, action_key: str, state_key: str | None, cameras: Sequence[str] | None
) -> RecordedDataset:
    """Open a dataset.

    Args:
        folder: The one that holds ``meta/info.json``.
        name: What to call it.
        action_key: Column of the actions.
        state_key: Column of the states; None reads none.
        cameras: Columns or videos of the pictures, in order, by their whole name or its last part; None takes all.

    Raises:
        DatasetError: It is not as its notes say; names file and column.
    """
    info_file = folder / "meta/info.json"
    try:
        return _read(folder, info_file, name, action_key, state_key, cameras)
    except DatasetError:
        raise
    except Exception as error:  # whoever wrote it may have put anything anywhere
        raise DatasetError(
            f"{info_file}: the notes in meta/ are not as expected ({type(error).__name__}: {_first_line(error)})"
        ) from error


def _read(
    folder: Path, info_file: Path, name: str, action_key: str, state_key: str | None, cameras: Sequence[str] | None
) -> RecordedDataset:
    info = read_object(info_file, DatasetError)
    version, features = info.get("codebase_version"), info.get("features", {})
    if version not in _VERSIONS:
        raise DatasetError(f"{info_file}: layout {version} cannot be read, only {', '.join(_VERSIONS)}")
    for key in filter(None, (action_key, state_key)):
        if key not in features:
            raise DatasetError(f"{info_file}: no column {key!r}; it has {', '.join(features)}")
    chosen = _cameras(info_file, features, cameras)
    if not 0 < info["fps"] < math.inf:
        raise DatasetError(f"{info_file}: fps is {info['fps']}")
    read = _read_v3 if version == "v3.0" else _read_v2
    episodes = read(folder, info, chosen, action_key, state_key)
    if not episodes:
        raise DatasetError(f"{info_file}: no demonstrations (total_episodes is {info.get('total_episodes', 0)})")
    return RecordedDataset(
        name=name,
        cameras=tuple(camera.key.rpartition(".")[2] for camera in chosen),
        image_size=chosen[0].size if chosen else (0, 0),
        episodes=tuple(episodes),
    )


def _cameras(info_file: Path, features: dict[str, Any], wanted: Sequence[str] | None) -> list[_Camera]:
    there: dict[str, _Camera] = {}
    for key, feature in features.items():
        if feature["dtype"] in ("image", "video"):
            shape = list(feature["shape"])
            if (feature.get("names") or [""])[0] == "channels" or (shape[0] == 3 and shape[-1] != 3):
                shape = [*shape[1:], shape[0]]
            there[key] = _Camera(key, feature["dtype"] == "video", (shape[0], shape[1]))
    if wanted is None:
        chosen = list(there.values())
    else:
        chosen = []
        for name in wanted:
            fitting = [camera for key, camera in there.items() if name in (key, key.rpartition(".")[2])]
            if len(fitting) != 1:
                raise DatasetError(f"{info_file}: no camera {name!r}; it has {', '.join(there) or 'none'}")
            chosen += fitting
    if len({camera.size for camera in chosen}) > 1:
        sizes = ", ".join(f"{camera.key} {camera.size[0]} x {camera.size[1]}" for camera in chosen)
        raise DatasetError(f"{info_file}: pictures of several sizes ({sizes}): choose one with data.cameras")
    return chosen


# -- v2: files by episode ----------------------------------------------------------------------------------------------


def _read_v2(
    folder: Path, info: dict[str, Any], cameras: list[_Camera], action_key: str, state_key: str | None
) -> list[RecordedEpisode]:
    tasks = {line["task_index"]: line["task"] for line in _read_lines(folder / "meta/tasks.jsonl")}
    episodes = []
    for note in _read_lines(folder / "meta/episodes.jsonl"):
        number = note["episode_index"]
        chunk = number // info["chunks_size"]
        place = {"episode_chunk": chunk, "episode_index": number}
        file = inside(folder, fill_pattern(info["data_path"], place))
        table = _read_table(file, _columns(action_key, state_key))
        clips = []
        for camera in cameras:
            if camera.is_video:
                path = fill_pattern(info["video_path"], place | {"video_key": camera.key})
                clips.append(_Clip(folder, inside(folder, path), 0.0, 0))
            else:
                clips.append(_Clip(folder, file, 0.0, 0))
        episodes.append(
            _episode(file, table, number, note["length"], tasks, info, cameras, clips, action_key, state_key)
        )
    return episodes


# -- v3: many episodes to a file ---------------------------------------------------------------------------------------


def _read_v3(
    folder: Path, info: dict[str, Any], cameras: list[_Camera], action_key: str, state_key: str | None
) -> list[RecordedEpisode]:
    tasks_file = folder / "meta/tasks.parquet"
    tasks_table = _read_table(tasks_file, ["task_index"], all_columns=True)
    # The instructions are the table's index, which pandas names so when it has no name.
    words = next((name for name in ("task", "__index_level_0__") if name in tasks_table.column_names), None)
    if words is None:
        raise DatasetError(f"{tasks_file}: no column 'task'; it has {', '.join(tasks_table.column_names)}")
    tasks = dict(zip(tasks_table["task_index"].to_pylist(), tasks_table[words].to_pylist(), strict=True))

    place = ["data/chunk_index", "data/file_index"]
    videos = [camera for camera in cameras if camera.is_video]
    parts = ("chunk_index", "file_index", "from_timestamp")
    columns = [
        "episode_index",
        "length",
        *place,
        *(f"videos/{camera.key}/{part}" for camera in videos for part in parts),
    ]
    notes = [
        row
        for file in sorted((folder / "meta/episodes").glob("chunk-*/file-*.parquet"))
        for row in _read_table(file, columns).to_pylist()
    ]
    episodes: list[RecordedEpisode] = []
    rows: dict[int, tuple[int, int]] = {}  # of each episode in the table: the first, and how many
    table: Any = None
    shown = Path()
    for note in sorted(notes, key=lambda note: note["episode_index"]):
        file_place = {"chunk_index": note["data/chunk_index"], "file_index": note["data/file_index"]}
        file = inside(folder, fill_pattern(info["data_path"], file_place))
        if file != shown:
            table, shown = _read_table(file, [*_columns(action_key, state_key), "episode_index"]), file
            numbers, firsts, counts = np.unique(
                table["episode_index"].to_numpy(), return_index=True, return_counts=True
            )
            rows = {
                n: (first, count)
                for n, first, count in zip(*(x.tolist() for x in (numbers, firsts, counts)), strict=True)
            }
        number, length = note["episode_index"], note["length"]
        if number not in rows:
            raise DatasetError(f"{file}: column 'episode_index': no episode {number}, which should be there")
        begin, count = rows[number]
        part = table.slice(begin, count)
        if not (part["episode_index"].to_numpy() == number).all():
            raise DatasetError(f"{file}: column 'episode_index': rows of episode {number} lie apart")
        clips = []
        for camera in cameras:
            if camera.is_video:
                chunk, number_of_file, begin_s = (note[f"videos/{camera.key}/{part}"] for part in parts)
                video = {"video_key": camera.key, "chunk_index": chunk, "file_index": number_of_file}
                clips.append(_Clip(folder, inside(folder, fill_pattern(info["video_path"], video)), begin_s, 0))
            else:
                clips.append(_Clip(folder, file, 0.0, begin))
        episodes.append(_episode(file, part, number, length, tasks, info, cameras, clips, action_key, state_key))
    return episodes


# -- what both have ----------------------------------------------------------------------------------------------------


def _columns(action_key: str, state_key: str | None) -> list[str]:
    return [action_key, *([state_key] if state_key else []), "task_index"]


def _episode(
    file: Path,
    table: Any,
    number: int,
    length: int,
    tasks: dict[int, str],
    info: dict[str, Any],
    cameras: list[_Camera],
    clips: list[_Clip],
    action_key: str,
    state_key: str | None,
) -> RecordedEpisode:
    if table.num_rows != length:
        raise DatasetError(f"{file}: {table.num_rows} rows; by the notes in meta/, episode {number} has {length}")
    task = set(table["task_index"].to_pylist())
    if len(task) != 1 or not task <= set(tasks):
        raise DatasetError(f"{file}: column 'task_index': {sorted(task)} is not one of the tasks in meta/")

    def read_pictures() -> Iterator[np.ndarray]:
        streams = [
            (_read_video if camera.is_video else _read_images)(camera, clip, length, info["fps"])
            for camera, clip in zip(cameras, clips, strict=True)
        ]
        for pictures in zip(*streams, strict=True):
            yield np.stack(pictures)

    vectors = partial(_vectors, file, table, info["features"])
    return RecordedEpisode(
        file=file,
        instruction=tasks[task.pop()],
        states=vectors(state_key) if state_key else np.zeros((length, 0), np.float32),
        actions=vectors(action_key),
        read_pictures=read_pictures,
    )


def _vectors(file: Path, table: Any, features: dict[str, Any], name: str) -> np.ndarray:
    """A column as (T, n) float32."""
    wanted = int(np.prod(features[name]["shape"]))
    rows = table[name].to_pylist()
    for number, row in enumerate(rows):
        length = len(row) if isinstance(row, list) else 1
        if row is None or length != wanted:
            raise DatasetError(
                f"{file}: column {name!r}: row {number} has {'nothing' if row is None else f'{length} elements'}, "
                f"meta/info.json says {wanted}"
            )
    try:
        return np.array(rows, np.float32).reshape(len(rows), wanted)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"{file}: column {name!r} holds no numbers ({error})") from error


def _read_images(camera: _Camera, clip: _Clip, length: int, fps: float) -> Iterator[np.ndarray]:
    from PIL import Image

    column = _image_column(clip.file, camera.key)
    for row in range(clip.first_row, clip.first_row + length):
        try:
            entry = column[row].as_py()
            source = io.BytesIO(entry["bytes"]) if entry["bytes"] else inside(clip.folder, entry["path"])
            picture = np.asarray(Image.open(source).convert("RGB"))
        except Exception as error:  # decoders fail in many ways
            raise DatasetError(f"{clip.file}: column {camera.key!r}, row {row}: no picture ({error})") from error
        yield _of_size(picture, camera, f"{clip.file}: column {camera.key!r}, row {row}")


@lru_cache(maxsize=4)  # episodes of one file follow each other
def _image_column(file: Path, key: str) -> Any:
    return _read_table(file, [key])[key]


def _read_video(camera: _Camera, clip: _Clip, length: int, fps: float) -> Iterator[np.ndarray]:
    import av

    where = f"{clip.file} ({camera.key})"
    count = 0
    try:
        with av.open(str(clip.file)) as container:
            stream = container.streams.video[0]
            if clip.begin_s > 0:
                container.seek(int(clip.begin_s * av.time_base))  # to the key frame before
            for frame in container.decode(stream):
                if frame.time is None or frame.time < clip.begin_s - 0.5 / fps:
                    continue
                if abs(frame.time - clip.begin_s - count / fps) > 0.5 / fps:
                    raise DatasetError(f"{where}: picture {count} of an episode is at {frame.time:.3f} s, out of place")
                yield _of_size(frame.to_ndarray(format="rgb24"), camera, where)
                count += 1
                if count == length:
                    return
    except DatasetError:
        raise
    except Exception as error:  # as above
        raise DatasetError(f"{where}: the video cannot be read after {count} of {length} pictures ({error})") from error
    raise DatasetError(f"{where}: the video ends after {count} of {length} pictures")


def _of_size(picture: np.ndarray, camera: _Camera, where: str) -> np.ndarray:
    if picture.shape != (*camera.size, 3):
        raise DatasetError(
            f"{where}: a picture of {' x '.join(map(str, picture.shape[:2]))} pixels, meta/info.json says "
            f"{' x '.join(map(str, camera.size))}"
        )
    return picture


def _read_table(file: Path, columns: list[str], *, all_columns: bool = False) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            there = parquet.schema_arrow.names
            missing = [name for name in columns if name not in there]
            if missing:
                raise DatasetError(f"{file}: no column {missing[0]!r}; it has {', '.join(there)}")
            return parquet.read(columns=None if all_columns else columns).combine_chunks()
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{file}: the table cannot be read ({_first_line(error)})") from error


def _read_lines(file: Path) -> list[dict[str, Any]]:
    try:
        return [parse(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} cannot be read ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
