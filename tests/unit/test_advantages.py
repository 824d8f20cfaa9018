"""Advantages by hand, and the laws they obey."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dvla.rl.advantages import group_advantages, has_signal

_RETURNS = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=9)


def test_one_success_of_four() -> None:
    advantages = group_advantages(torch.tensor([0.0, 1.0, 0.0, 0.0]), normalize_by_std=True)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([-0.5, 1.5, -0.5, -0.5], abs=1e-5)


def test_without_deviation() -> None:
    advantages = group_advantages(torch.tensor([0.0, 1.0, 0.0, 0.0]), normalize_by_std=False)
    assert advantages.tolist() == pytest.approx([-0.25, 0.75, -0.25, -0.25])


def test_the_floor_of_the_deviation() -> None:
    returns = torch.tensor([0.0, 1e-3], dtype=torch.float64)
    expected = 0.5e-3 / (1e-3 / 2**0.5 + 1e-6)
    assert group_advantages(returns, normalize_by_std=True)[1].item() == pytest.approx(expected)


def test_large_returns_lose_no_precision() -> None:
    returns = torch.tensor([30_000.3, 30_000.9, 30_002.7], dtype=torch.float32)
    mean = statistics.fmean(returns.tolist())
    expected = [value - mean for value in returns.tolist()]
    assert group_advantages(returns, normalize_by_std=False).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("returns", [[0.1, 0.1, 0.1], [1.0], [0.3, 0.1 + 0.2], [1e6, 1e6 + 0.1]])
def test_equal_returns_give_exact_zeros(returns: list[float]) -> None:
    tensor = torch.tensor(returns, dtype=torch.float64)
    assert not has_signal(tensor)
    assert group_advantages(tensor, normalize_by_std=True).tolist() == [0.0] * len(returns)


def test_small_differences_are_a_signal() -> None:
    assert has_signal(torch.tensor([0.0, 1e-4]))
    assert has_signal(torch.tensor([-3.0, -3.001]))


@given(returns=_RETURNS, by_std=st.booleans(), order=st.randoms(use_true_random=False))
def test_order_does_not_matter(returns: list[float], by_std: bool, order: object) -> None:
    permutation = list(range(len(returns)))
    order.shuffle(permutation)
    tensor = torch.tensor(returns)
    expected = group_advantages(tensor, normalize_by_std=by_std)[permutation]
    assert torch.allclose(group_advantages(tensor[permutation], normalize_by_std=by_std), expected)


@given(returns=_RETURNS, by_std=st.booleans(), shift=st.integers(-5, 5))
def test_a_constant_does_not_matter(returns: list[float], by_std: bool, shift: int) -> None:
    plain = group_advantages(torch.tensor(returns), normalize_by_std=by_std)
    shifted = group_advantages(torch.tensor(returns) + shift, normalize_by_std=by_std)
    assert torch.allclose(plain, shifted, atol=1e-5)
    assert plain.sum().item() == pytest.approx(0.0, abs=1e-5)


@given(returns=_RETURNS, scale=st.sampled_from([0.5, 2.0, 16.0]))
def test_scale(returns: list[float], scale: float) -> None:
    tensor = torch.tensor(returns)
    for by_std, factor in ((True, 1.0), (False, scale)):
        scaled = group_advantages(tensor * scale, normalize_by_std=by_std)
        assert torch.allclose(scaled, factor * group_advantages(tensor, normalize_by_std=by_std), rtol=1e-4, atol=1e-5)


@given(returns=_RETURNS)
def test_a_better_episode_has_the_larger_advantage(returns: list[float]) -> None:
    advantages = group_advantages(torch.tensor(returns), normalize_by_std=True)
    assert advantages[max(range(len(returns)), key=returns.__getitem__)] == advantages.max()
    assert advantages.max() > 0 or not has_signal(torch.tensor(returns))
