"""Small datasets of demonstrations on disk: as our writer makes them, and by hand in the layouts of others."""

from __future__ import annotations

import io
import json
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dvla.datasets.lerobot_layout import DatasetLayout
from dvla.datasets.lerobot_writer import Episode, LeRobotWriter, stage_episode
from dvla.telemetry.video import VideoWriter

FPS = 20
CAMERAS = ("front", "hand")


def episode(seed: int, length: int, actions: int = 4, states: int = 2, size: tuple[int, int] = (16, 24)) -> Episode:
    """Smooth pictures, which videos keep nearly as they are, and random numbers."""
    rng = np.random.default_rng(seed)
    step = np.arange(length)[:, None, None, None, None]
    shade = (20 * seed + 30 * step + 60 * np.arange(2)[None, :, None, None, None]) % 256
    return Episode(
        images=np.broadcast_to(shade, (length, 2, *size, 3)).astype(np.uint8),
        states=rng.normal(size=(length, states)).astype(np.float32),
        actions=rng.uniform(-1, 1, (length, actions)).astype(np.float32),
        rewards=np.zeros(length, np.float32),
        successes=np.arange(length) == length - 1,
    )


def layout_of(first: Episode, *, videos: bool) -> DatasetLayout:
    """What a dataset of such episodes holds."""
    return DatasetLayout(
        fps=FPS,
        cameras=CAMERAS,
        image_size=first.images.shape[2:4],
        videos=videos,
        state_names=tuple(f"s{n}" for n in range(first.states.shape[1])),
        action_names=tuple(f"a{n}" for n in range(first.actions.shape[1])),
    )


def write_v2(folder: Path, episodes: list[Episode], *, videos: bool = False, task: str = "do it") -> Path:
    """Layout v2.1, by `LeRobotWriter`."""
    layout = layout_of(episodes[0], videos=videos)
    folder.mkdir(parents=True)
    writer = LeRobotWriter(folder, layout, task=task, robot="panda")
    for number, one in enumerate(episodes):
        stage_episode(folder / f"staged{number}", one, layout)
        writer.add(folder / f"staged{number}", seed=number)
    return folder


def write_v3(folder: Path, episodes: list[Episode], *, videos: bool, tasks: list[str]) -> Path:
    """Layout v3.0: all episodes in one table and one video a camera, but for the last, which has files of its own."""
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    (folder / "data/chunk-000").mkdir(parents=True)
    layout = layout_of(episodes[0], videos=videos)
    data_path = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video_path = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    notes = []
    names = list(dict.fromkeys(tasks))
    for file, numbers in enumerate((range(len(episodes) - 1), [len(episodes) - 1])):
        columns: dict[str, list] = {name: [] for name in ("observation.state", "action", "episode_index", "task_index")}
        pictures: dict[str, list] = {key: [] for key in layout.image_keys}
        for number in numbers:
            one = episodes[number]
            length = len(one.actions)
            note = {"episode_index": number, "length": length, "tasks": [tasks[number]]}
            note |= {"data/chunk_index": 0, "data/file_index": file}
            for camera, key in enumerate(layout.image_keys):
                if videos:
                    begin = len(pictures[key]) / FPS
                    note |= {f"videos/{key}/chunk_index": 0, f"videos/{key}/file_index": file}
                    note |= {f"videos/{key}/from_timestamp": begin, f"videos/{key}/to_timestamp": begin + length / FPS}
                pictures[key] += list(one.images[:, camera])
            notes.append(note)
            columns["observation.state"] += one.states.tolist()
            columns["action"] += one.actions.tolist()
            columns["episode_index"] += [number] * length
            columns["task_index"] += [names.index(tasks[number])] * length
        for key, frames in pictures.items():
            if videos:
                path = folder / video_path.format(video_key=key, chunk_index=0, file_index=file)
                path.parent.mkdir(parents=True, exist_ok=True)
                with VideoWriter(path, *layout.image_size, FPS, 2) as video:
                    for frame in frames:
                        video.add(frame)
            else:
                columns[key] = [{"bytes": png(frame), "path": None} for frame in frames]
        pq.write_table(pa.table(columns), folder / data_path.format(chunk_index=0, file_index=file))
    pq.write_table(pa.Table.from_pylist(notes), folder / "meta/episodes/chunk-000/file-000.parquet")
    index = pa.table({"task_index": list(range(len(names))), "__index_level_0__": names})
    pq.write_table(index, folder / "meta/tasks.parquet")
    info = {
        "codebase_version": "v3.0",
        "total_episodes": len(episodes),
        "fps": FPS,
        "data_path": data_path,
        "video_path": video_path if videos else None,
        "features": layout.features(),
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def write_libero(file: Path, episodes: list[Episode], *, attributes: dict[str, str] | None = None) -> Path:
    """One task's file as LIBERO publishes them: pictures upside down, demonstrations in no order."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as root:
        data = root.create_group("data")
        data.attrs.update(attributes or {})
        for number, one in reversed(list(enumerate(episodes))):
            demo = data.create_group(f"demo_{number}")
            demo["actions"] = one.actions.astype(np.float64)
            demo["obs/ee_states"] = one.states[:, :6].astype(np.float64)
            demo["obs/gripper_states"] = one.states[:, 6:].astype(np.float64)
            for camera, name in enumerate(("agentview_rgb", "eye_in_hand_rgb")):
                demo[f"obs/{name}"] = one.images[:, camera, ::-1, ::-1]
    return file


def png(picture: np.ndarray) -> bytes:
    """A picture's file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG")
    return file.getvalue()
