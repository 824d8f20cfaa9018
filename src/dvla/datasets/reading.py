"""From the paths in a config to one dataset."""

from __future__ import annotations

from pathlib import Path

from dvla.config import DataConfig
from dvla.datasets.lerobot_reader import read_lerobot
from dvla.datasets.libero_hdf5 import libero_files, read_libero
from dvla.datasets.recorded import DatasetError, RecordedDataset, joined


def read_dataset(data: DataConfig) -> RecordedDataset:
    """Read tables and notes of all of ``data.paths``; their pictures are read later.

    Raises:
        DatasetError: A dataset cannot be used; names file and column.
    """
    dataset = joined(data.dataset_name, [_read(Path(path).expanduser(), data) for path in data.paths])
    dataset.check()
    return dataset


def _read(path: Path, data: DataConfig) -> RecordedDataset:
    if (path / "meta/info.json").is_file():
        return read_lerobot(
            path, name=path.name, action_key=data.action_key, state_key=data.state_key, cameras=data.cameras
        )
    if path.is_file() or (path.is_dir() and libero_files(path)):
        return read_libero(path, name=path.name, cameras=data.cameras)
    there = "" if path.is_dir() else " (no such folder)"
    raise DatasetError(f"data.paths: {path} holds neither meta/info.json (LeRobot) nor *.hdf5 (LIBERO){there}")
