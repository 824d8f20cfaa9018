"""Decision weights by hand."""

from __future__ import annotations

import pytest
import torch

from dvla.rl.episodes import decision_weights


def test_each_episode_weighs_the_same_with_length_normalization() -> None:
    lengths = torch.tensor([1, 4, 10])
    weights = decision_weights(lengths, length_normalization=True, max_decisions=10)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([1.0, 0.25, 0.1])
    assert (weights * lengths).tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_each_decision_weighs_the_same_without() -> None:
    weights = decision_weights(torch.tensor([1, 4, 10]), length_normalization=False, max_decisions=10)
    assert weights.tolist() == pytest.approx([0.1, 0.1, 0.1])


def test_both_agree_on_the_longest_episode() -> None:
    lengths = torch.tensor([7])
    plain, normalised = (decision_weights(lengths, length_normalization=n, max_decisions=7) for n in (False, True))
    assert torch.equal(plain, normalised)


@pytest.mark.parametrize("length", [0, 11])
def test_impossible_lengths_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="1 to 10 decisions"):
        decision_weights(torch.tensor([3, length]), length_normalization=True, max_decisions=10)
