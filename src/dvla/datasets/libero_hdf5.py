"""Reads the demonstrations that LIBERO publishes: one HDF5 file per task, ``data/demo_N`` for each demonstration.

Cameras and state are named and made as `dvla.envs.libero` gives them to a policy: pictures turned by 180 degrees, because the
files hold them upside down; a state of the gripper's position (3), its orientation as axis times angle (3) and the two finger
positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dvla.datasets.recorded import DatasetError, RecordedDataset, RecordedEpisode
from dvla.runtime.json_file import parse

_CAMERAS = {"agentview": "obs/agentview_rgb", "wrist": "obs/eye_in_hand_rgb"}
_STATE = ("obs/ee_states", "obs/gripper_states")
_SCENE = re.compile(r"^[A-Z_]+SCENE\d+_")
_MOST_NUMBERS = 2**24
"""Of one demonstration's actions or states: a damaged file may claim more than there is memory."""


def libero_files(path: Path) -> list[Path]:
    """The HDF5 files that `path` is or holds."""
    return sorted(path.glob("*.hdf5")) if path.is_dir() else [path]


def read_libero(path: Path, *, name: str, cameras: Sequence[str] | None) -> RecordedDataset:
    """Open a file of demonstrations, or all of a folder.

    Args:
        path: The file or the folder.
        name: What to call the dataset.
        cameras: Out of ``agentview`` and ``wrist``, in order; None takes both.

    Raises:
        DatasetError: Something is missing or damaged; names file and column.
    """
    chosen = tuple(_CAMERAS if cameras is None else cameras)
    for camera in chosen:
        if camera not in _CAMERAS:
            raise DatasetError(
                f"data.cameras: LIBERO's files have no camera {camera!r}; they have {', '.join(_CAMERAS)}"
            )
    episodes: list[RecordedEpisode] = []
    sizes: set[tuple[int, int]] = set()
    for file in libero_files(path):
        found, size = _read_file(file, chosen)
        episodes += found
        sizes |= size
    if not episodes:
        raise DatasetError(f"{path}: no demonstrations")
    if len(sizes) > 1:
        raise DatasetError(f"{path}: pictures of several sizes: {sorted(sizes)}")
    return RecordedDataset(
        name=name,
        cameras=chosen,
        image_size=sizes.pop() if sizes else (0, 0),
        episodes=tuple(episodes),
        gripper_open=-1.0,
    )


def _read_file(file: Path, cameras: tuple[str, ...]) -> tuple[list[RecordedEpisode], set[tuple[int, int]]]:
    import h5py

    try:
        with h5py.File(file) as root:
            data = _entry(root, "data", file)
            instruction = _instruction(file, data.attrs)
            demos = sorted((demo for demo in data if demo.startswith("demo_")), key=lambda demo: int(demo[5:]))
            episodes, sizes = [], set()
            for demo in demos:
                actions = _vectors(data, f"{demo}/actions", file)
                states = np.concatenate([_vectors(data, f"{demo}/{column}", file) for column in _STATE], axis=1)
                columns = [f"{demo}/{_CAMERAS[camera]}" for camera in cameras]
                for column in columns:
                    shape = _entry(data, column, file).shape
                    if len(shape) != 4 or shape[0] != len(actions) or shape[3] != 3:
                        raise DatasetError(
                            f"{file}: data/{column} is {shape}, not ({len(actions)}, height, width, 3), for as many actions"
                        )
                    sizes.add((shape[1], shape[2]))
                episodes.append(RecordedEpisode(file, instruction, states, actions, _PictureReader(file, columns)))
            return episodes, sizes
    except DatasetError:
        raise
    except Exception as error:  # h5py fails in many ways
        raise DatasetError(f"{file}: cannot be read as HDF5 ({error})") from error


class _PictureReader:
    """Reads the pictures of one demonstration, when it is called."""

    def __init__(self, file: Path, columns: list[str]) -> None:
        self._file, self._columns = file, columns

    def __call__(self) -> Iterator[np.ndarray]:
        import h5py

        try:
            with h5py.File(self._file) as root:
                # One column after the other and as a whole: they are stored in large pieces.
                pictures = [_entry(root["data"], column, self._file)[()][:, ::-1, ::-1] for column in self._columns]
        except DatasetError:
            raise
        except Exception as error:
            raise DatasetError(f"{self._file}: data/{self._columns[0]} cannot be read ({error})") from error
        for row in zip(*pictures, strict=True):
            yield np.stack(row)


def _vectors(data: Any, column: str, file: Path) -> np.ndarray:
    """A column as (T, n) float32."""
    entry = _entry(data, column, file)
    if len(entry.shape) != 2 or entry.size > _MOST_NUMBERS:
        raise DatasetError(f"{file}: data/{column} has the shape {entry.shape}, not (steps, elements)")
    return np.asarray(entry).astype(np.float32)


def _entry(group: Any, column: str, file: Path) -> Any:
    import h5py

    if column not in group:
        parent = group.name.strip("/")
        there = ", ".join(group[column.split("/")[0]]) if column.split("/")[0] in group else ", ".join(group)
        raise DatasetError(f"{file}: no {f'{parent}/' if parent else ''}{column}; there is {there or 'nothing'}")
    entry = group
    for part in column.split("/"):
        is_own = isinstance(entry.get(part, getlink=True), h5py.HardLink)
        entry = entry[part] if is_own else None
        if not is_own or (isinstance(entry, h5py.Dataset) and (entry.external or entry.is_virtual)):
            raise DatasetError(f"{file}: {group.name}/{column} lies elsewhere, perhaps in another file: not read")
    return entry


def _instruction(file: Path, attributes: Any) -> str:
    """The task in words: the simulator takes them from the file's name, too."""
    if file.stem.endswith("_demo"):
        return _SCENE.sub("", file.stem.removesuffix("_demo")).replace("_", " ")
    try:
        words = parse(attributes["problem_info"])["language_instruction"]
    except (KeyError, ValueError, TypeError):
        raise DatasetError(
            f"{file}: neither its name (TASK_demo.hdf5) nor data.problem_info tells the instruction"
        ) from None
    return "".join(words).strip().strip('"')
