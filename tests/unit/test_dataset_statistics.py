"""Normalisation statistics of a dataset: computed by hand, stored as each model's checkpoints hold them, and refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dvla.datasets.recorded import DatasetError, RecordedDataset, RecordedEpisode
from dvla.datasets.statistics import compute_statistics, element_statistics, require_fitting
from dvla.models.normalization import read_openvla_statistics, read_pi05_statistics

VALUES = np.array([[0.0, 5.0], [1.0, 5.0], [2.0, 5.0], [3.0, 5.0]], np.float32)


def dataset(actions=VALUES / 5, states=VALUES, name="demo"):
    half = len(actions) // 2
    parts = [
        RecordedEpisode(Path("file"), "do it", s, a, lambda: iter(()))
        for s, a in ((states[:half], actions[:half]), (states[half:], actions[half:]))
    ]
    return RecordedDataset(name=name, cameras=(), image_size=(0, 0), episodes=tuple(parts))


def test_by_hand():
    got = element_statistics(VALUES)
    assert got["mean"] == [1.5, 5.0]
    assert got["std"] == pytest.approx([1.25**0.5, 0.0])  # of the population
    assert got["min"] == [0.0, 5.0]
    assert got["max"] == [3.0, 5.0]
    assert got["q01"] == pytest.approx([0.03, 5.0])  # between the first and the second of four: 0.01 * 3
    assert got["q99"] == pytest.approx([2.97, 5.0])


@given(st.integers(2, 200), st.integers(0, 2**31 - 1))
def test_nearly_all_values_lie_between_the_quantiles(count, seed):
    values = np.random.default_rng(seed).normal(size=(count, 3))
    got = element_statistics(values)
    inside = (values >= got["q01"]) & (values <= got["q99"])
    assert (inside.sum(0) >= count - 2 * np.ceil(0.01 * count)).all()
    assert (np.array(got["min"]) <= got["q01"]).all()
    assert (np.array(got["q99"]) <= got["max"]).all()


def test_the_entries_are_those_of_the_publishers():
    ours = compute_statistics(dataset(), "openvla_oft")
    assert ours.key == "demo"
    assert set(ours.raw) == {"action", "proprio", "num_transitions", "num_trajectories"}
    assert (ours.raw["num_transitions"], ours.raw["num_trajectories"]) == (4, 2)
    assert ours.raw["action"]["mask"] == [True, True]
    pi05 = compute_statistics(dataset(), "pi05")
    assert set(pi05.raw) == {"state", "actions"}
    assert set(pi05.raw["actions"]) == {"mean", "std", "min", "max", "q01", "q99"}
    for statistics in (ours, pi05):
        assert statistics.action.low.tolist() == pytest.approx([0.006, 1.0])
        assert statistics.state.high.tolist() == pytest.approx([2.97, 5.0])
    without = compute_statistics(dataset(states=np.zeros((4, 0), np.float32)), "openvla_oft")
    assert without.state is None
    assert "proprio" not in without.raw


@pytest.mark.parametrize(("model", "read"), [("openvla_oft", read_openvla_statistics), ("pi05", read_pi05_statistics)])
def test_what_is_written_is_read_back(tmp_path, model, read):
    from dvla.models.export import _write_statistics

    statistics = compute_statistics(dataset(), model)
    _write_statistics(model, statistics, tmp_path)
    back = read(tmp_path, "demo")
    assert back.raw == statistics.raw
    assert torch.equal(back.action.span, statistics.action.span)


def test_a_constant_element_survives_normalising():
    bounds = compute_statistics(dataset(), "openvla_oft").action
    normal = bounds.normalize(torch.tensor([[0.3, 1.0]]))
    assert normal[0, 1] == -1.0
    assert bounds.unnormalize(torch.tensor([[0.0, 0.7]]))[0, 1] == pytest.approx(1.0)


def test_statistics_of_other_data_are_refused():
    own = compute_statistics(dataset(), "openvla_oft")
    require_fitting(own, dataset())
    other = compute_statistics(dataset(actions=VALUES / 50, name="bridge"), "openvla_oft")
    with pytest.raises(
        DatasetError, match=r"action statistics 'bridge' are of other data than demo: .* element 0 lie outside"
    ) as error:
        require_fitting(other, dataset())
    assert "model.unnorm_key=null" in str(error.value)
