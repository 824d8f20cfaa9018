"""Datasets in LeRobot's layout v2.1: files, columns, numbers and statistics."""

import io
import json

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dvla.datasets.lerobot_layout import DatasetLayout, image_statistics
from dvla.datasets.lerobot_writer import Episode, LeRobotWriter, stage_episode

CAMERAS = ("front", "hand")


def layout(videos, actions=4):
    return DatasetLayout(
        fps=20,
        cameras=CAMERAS,
        image_size=(16, 24),
        videos=videos,
        state_names=("qpos.0", "qpos.1"),
        action_names=tuple("abcdefg"[:actions]),
    )


def episode(seed, length, actions=4):
    rng = np.random.default_rng(seed)
    return Episode(
        images=rng.integers(0, 256, (length, 2, 16, 24, 3), np.uint8),
        states=rng.normal(size=(length, 2)).astype(np.float32),
        actions=rng.uniform(-1, 1, (length, actions)).astype(np.float32),
        rewards=rng.random(length).astype(np.float32),
        successes=np.arange(length) == length - 1,
    )


@pytest.fixture(params=[True, False], ids=["videos", "parquet"])
def dataset(request, tmp_path):
    """Two episodes, of 5 and 3 steps, staged in the other order."""
    kept = {3: episode(3, 5), 9: episode(9, 3)}
    for seed in (9, 3):
        stage_episode(tmp_path / "staged" / str(seed), kept[seed], layout(request.param))
    folder = tmp_path / "dataset"
    folder.mkdir()
    writer = LeRobotWriter(folder, layout(request.param), task="do it", robot="panda")
    for seed in (3, 9):
        writer.add(tmp_path / "staged" / str(seed), seed=seed)
    return folder, list(kept.values()), request.param


def lines(folder, name):
    return [json.loads(line) for line in (folder / f"meta/{name}.jsonl").read_text().splitlines()]


def test_the_tables_hold_the_episodes(dataset):
    folder, episodes, videos = dataset
    first = 0
    for number, kept in enumerate(episodes):
        table = pq.read_table(folder / f"data/chunk-000/episode_{number:06d}.parquet")
        length = len(kept.actions)
        expected = {
            "observation.state": kept.states,
            "action": kept.actions,
            "next.reward": kept.rewards,
            "next.success": kept.successes,
            "next.done": np.arange(length) == length - 1,
            "timestamp": (np.arange(length) / 20).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
            "index": np.arange(first, first + length),
            "task_index": np.zeros(length, int),
        }
        images = [] if videos else [f"observation.images.{camera}" for camera in CAMERAS]
        assert table.column_names == [*images, *expected]
        for name, values in expected.items():
            got = np.array(table[name].to_pylist(), values.dtype)
            np.testing.assert_array_equal(got, values, err_msg=name)
        first += length


def test_pictures_are_in_videos_or_exactly_in_the_tables(dataset):
    folder, episodes, videos = dataset
    for number, kept in enumerate(episodes):
        for n, camera in enumerate(CAMERAS):
            key = f"observation.images.{camera}"
            if videos:
                with av.open(str(folder / f"videos/chunk-000/{key}/episode_{number:06d}.mp4")) as file:
                    times = [frame.time for frame in file.decode(video=0)]
                assert times == pytest.approx([i / 20 for i in range(len(kept.actions))], abs=1e-6)
            else:
                table = pq.read_table(folder / f"data/chunk-000/episode_{number:06d}.parquet")
                for cell, image in zip(table[key].to_pylist(), kept.images[:, n], strict=True):
                    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(cell["bytes"]))), image)


def test_the_notes_about_the_dataset(dataset):
    folder, _, videos = dataset
    info = json.loads((folder / "meta/info.json").read_text())
    assert info["codebase_version"] == "v2.1"
    assert (info["total_episodes"], info["total_frames"], info["total_chunks"]) == (2, 8, 1)
    assert info["total_videos"] == (4 if videos else 0)
    assert info["splits"] == {"train": "0:2"}
    assert info["features"]["action"] == {"dtype": "float32", "shape": [4], "names": ["a", "b", "c", "d"]}
    assert info["features"]["observation.images.hand"]["dtype"] == ("video" if videos else "image")
    assert info["features"]["observation.images.hand"]["shape"] == [16, 24, 3]
    assert lines(folder, "tasks") == [{"task_index": 0, "task": "do it"}]
    assert lines(folder, "episodes") == [
        {"episode_index": 0, "tasks": ["do it"], "length": 5, "seed": 3},
        {"episode_index": 1, "tasks": ["do it"], "length": 3, "seed": 9},
    ]


def test_the_statistics_are_those_of_each_episode(dataset):
    folder, episodes, _ = dataset
    info = json.loads((folder / "meta/info.json").read_text())
    for kept, line in zip(episodes, lines(folder, "episodes_stats"), strict=True):
        stats, length = line["stats"], len(kept.actions)
        assert set(stats) == set(info["features"])
        assert all(s["count"] == [length] for s in stats.values())
        np.testing.assert_allclose(stats["action"]["mean"], kept.actions.mean(0), rtol=1e-5)
        np.testing.assert_allclose(stats["action"]["std"], kept.actions.std(0), rtol=1e-5)
        np.testing.assert_array_equal(stats["observation.state"]["min"], kept.states.min(0))
        np.testing.assert_allclose(stats["next.reward"]["max"], [kept.rewards.max()])
        scaled = kept.images[:, 1] / 255
        for name, function in (("min", np.min), ("max", np.max), ("mean", np.mean), ("std", np.std)):
            expected = function(scaled, axis=(0, 1, 2)).reshape(3, 1, 1)
            np.testing.assert_allclose(stats["observation.images.hand"][name], expected)
    assert lines(folder, "episodes_stats")[1]["stats"]["index"]["min"] == [5]


def test_channels_do_not_mix_in_statistics():
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    frames[..., 1] = 255
    assert image_statistics(frames)["mean"] == [[[0.0]], [[1.0]], [[0.0]]]


def test_a_vector_of_one_is_a_plain_column(tmp_path):
    stage_episode(tmp_path / "staged", episode(0, 2, actions=1), layout(False, actions=1))
    table = pq.read_table(tmp_path / "staged/frames.parquet")
    assert table["action"].to_pylist() == episode(0, 2, actions=1).actions[:, 0].tolist()


def test_hugging_face_is_told_what_is_a_picture(tmp_path):
    stage_episode(tmp_path / "staged", episode(0, 2), layout(False))
    folder = tmp_path / "dataset"
    folder.mkdir()
    LeRobotWriter(folder, layout(False), task="", robot="").add(tmp_path / "staged", seed=0)
    schema = pq.read_schema(folder / "data/chunk-000/episode_000000.parquet")
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features["observation.images.front"] == {"_type": "Image"}
    assert features["action"] == {"feature": {"dtype": "float32", "_type": "Value"}, "length": 4, "_type": "Sequence"}
    assert list(features) == schema.names
