"""Samples of demonstrations: which there are, what they hold at an episode's end, and in which order they come."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from recordings import episode, write_v2

from dvla.config import ConfigError, DataConfig
from dvla.datasets.frame_cache import cache_frames
from dvla.datasets.reading import read_dataset
from dvla.datasets.recorded import DatasetError, RecordedDataset, RecordedEpisode
from dvla.datasets.samples import Samples, batch_rows, split_episodes

LENGTHS = (3, 1, 5)


def dataset(lengths=LENGTHS):
    episodes = []
    for number, length in enumerate(lengths):
        actions = (10 * number + np.arange(length, dtype=np.float32))[:, None] / 100
        episodes.append(RecordedEpisode(Path("f"), f"task {number % 2}", actions + 1, actions, lambda: iter(())))
    return RecordedDataset(name="d", cameras=("a",), image_size=(1, 1), episodes=tuple(episodes))


def test_a_sample_ends_with_its_episode():
    frames = np.arange(9, dtype=np.uint8).reshape(9, 1, 1, 1, 1).repeat(3, -1)
    samples = Samples(dataset(), frames, horizon=3, device=torch.device("cpu"))
    rows = np.array([0, 2, 3, 6])
    batch = samples.batch(rows)
    hundredths = (batch.actions[..., 0] * 100).round().int().tolist()
    assert hundredths == [[0, 1, 2], [2, 2, 2], [10, 10, 10], [22, 23, 24]]
    assert batch.mask.tolist() == [[True] * 3, [True, False, False], [True, False, False], [True] * 3]
    assert samples.num_actions(rows) == batch.mask.sum() == 8
    assert batch.observation.images[:, 0, 0, 0, 0].tolist() == [0, 2, 3, 6]
    assert batch.observation.task.tolist() == [0, 0, 1, 0]
    torch.testing.assert_close(batch.observation.state, batch.actions[:, 0] + 1)


@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 2**31 - 1))
def test_every_epoch_takes_every_row_once_and_a_step_needs_no_other(size, batch, seed):
    rows = np.arange(100, 100 + size)
    steps = -(-3 * size // batch)
    taken = np.concatenate([batch_rows(rows, seed=seed, step=step, batch_size=batch) for step in range(steps)])
    for epoch in range(3):
        part = taken[epoch * size : (epoch + 1) * size]
        assert sorted(part) == rows.tolist()
    alone = batch_rows(rows, seed=seed, step=steps - 1, batch_size=batch)
    assert (alone == taken[-batch:]).all()


def test_epochs_and_seeds_differ_in_order():
    rows = np.arange(50)
    orders = [batch_rows(rows, seed=seed, step=step, batch_size=50).tolist() for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


@given(st.integers(1, 30), st.floats(0, 0.99), st.integers(0, 1000))
def test_whole_episodes_are_held_out(count, fraction, seed):
    whole = dataset([2] * count)
    train, held_out = split_episodes(whole, fraction, seed)
    assert sorted([*train, *held_out]) == list(range(2 * count))
    assert len(train) >= 2
    assert (len(held_out) >= 2) == (fraction > 0 and count > 1)
    assert {row // 2 for row in train}.isdisjoint(row // 2 for row in held_out)


def cache(world, path, size, max_gib, folder=None):
    whole = read_dataset(DataConfig(paths=(path,)))
    try:
        frames = cache_frames(
            whole, image_size=size, folder=folder, max_gib=max_gib, world=world, note=lambda _done: None
        )
    except ConfigError as error:
        return type(error), str(error)
    return np.array(frames)


def cache_all(world, cases):
    return [cache(world, *case) for case in cases]


@pytest.mark.distributed
def test_ranks_share_the_pictures_and_their_errors(tmp_path):
    episodes = [episode(seed, 3) for seed in range(2)]
    folder, broken = (str(write_v2(tmp_path / name, episodes, videos=True)) for name in ("set", "broken"))
    next(tmp_path.glob("broken/videos/**/episode_000001.mp4")).write_bytes(b"")
    (tmp_path / "cache").mkdir()
    size, kept = (16, 24), str(tmp_path / "cache")
    shared = [(folder, size, 1.0, kept), (folder, size, 1e-6), (broken, size, 1.0, kept)]
    (one, *_), (two, *_) = ranks = run_ranks(cache_all, 2, shared)
    np.testing.assert_array_equal(one, two)
    assert np.abs(one.astype(int) - np.concatenate([x.images for x in episodes])).max() <= 3
    for _, (kind, words), (broken_kind, broken_words) in ranks:
        assert kind is ConfigError and "data.cache_gib is 1e-06" in words
        assert broken_kind is DatasetError and "episode_000001.mp4" in broken_words
    assert not list((tmp_path / "cache").iterdir())
    alone = [(folder, (8, 8), 1.0), (folder, size, 1.0, str(tmp_path / "nowhere"))]
    ((frames, (_, words)),) = run_ranks(cache_all, 1, alone)
    assert frames.shape == (6, 2, 8, 8, 3)
    assert f"do not go to {tmp_path / 'nowhere'} (No such file or directory)" in words
