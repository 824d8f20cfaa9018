"""Advantages and values by hand, and against sums written out in float64."""

import math

import pytest
import torch

from dvla.rl.gae import explained_variance, generalized_advantages, moments, normalize
from dvla.rl.value_loss import value_loss


def test_two_steps_by_hand():
    """d_1 = 3 - 1 = 2, d_0 = 0 + 0.5 * 1 - 2 = -1.5, A_0 = -1.5 + 0.5 * 0.5 * 2 = -1."""
    advantages, returns = generalized_advantages(
        torch.tensor([[0.0, 3.0, 99.0]]), torch.tensor([[2.0, 1.0, math.nan]]),
        lengths=torch.tensor([2]), gamma=0.5, gae_lambda=0.5,
    )  # fmt: skip
    assert advantages.tolist() == [[-1.0, 2.0, 0.0]]
    assert returns.tolist() == [[1.0, 3.0, 0.0]]


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_is_the_weighted_sum_of_all_later_errors(gamma, gae_lambda):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 6, 9, generator=generator).unbind(0)
    lengths = torch.tensor([1, 9, 4, 6, 2, 9])
    advantages, returns = generalized_advantages(rewards, values, lengths=lengths, gamma=gamma, gae_lambda=gae_lambda)
    for episode, length in enumerate(lengths.tolist()):
        r, v = rewards[episode].tolist(), [*values[episode].tolist()[:length], 0.0]
        errors = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        for t in range(length):
            wanted = sum((gamma * gae_lambda) ** (k - t) * errors[k] for k in range(t, length))
            assert advantages[episode, t].item() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert returns[episode, t].item() == pytest.approx(wanted + v[t], rel=1e-5, abs=1e-6)
            if gae_lambda == 1.0:  # the return itself
                rest = sum(gamma ** (k - t) * r[k] for k in range(t, length))
                assert returns[episode, t].item() == pytest.approx(rest, rel=1e-5, abs=1e-5)
        assert not advantages[episode, length:].any()


def test_moments_of_parts_add_up_to_those_of_the_batch():
    generator = torch.Generator().manual_seed(1)
    advantages, values = torch.randn(2, 5, 4, generator=generator).unbind(0)
    returns, lengths = advantages + values, torch.tensor([4, 1, 3, 2, 4])
    batch = moments(advantages[:2], returns[:2], lengths[:2]) + moments(advantages[2:], returns[2:], lengths[2:])
    played = torch.arange(4) < lengths[:, None]
    normal = normalize(advantages, batch)[played].double()
    assert normal.mean().item() == pytest.approx(0, abs=1e-6)
    assert normal.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    a, r = advantages.double()[played], returns.double()[played]
    assert explained_variance(batch) == pytest.approx(1 - (a.var(correction=0) / r.var(correction=0)).item())
    same = torch.ones(2, 3)
    assert explained_variance(moments(same, same, torch.tensor([3, 3]))) is None


def test_value_loss_by_hand_with_and_without_clipping():
    values = torch.tensor([[1.0, 2.0], [5.0, math.nan], [math.nan, math.nan]], requires_grad=True)
    given = {
        "returns": torch.tensor([[0.0, 2.5], [3.0, math.nan], [0.0, 0.0]]),
        "old_values": torch.tensor([[2.0, 2.0], [1.0, 0.0], [0.0, 0.0]]),
        "weights": torch.tensor([1.0, 0.5, 0.0]),
        "action_mask": torch.tensor([[True, True], [True, False], [True, True]]),
    }
    loss = value_loss(values, **given, value_clip=None)
    assert loss.item() == pytest.approx((1.0 + 0.25) / 4 + 0.5 * 4.0 / 2)
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient.tolist() == [[0.5, -0.25], [1.0, 0.0], [0.0, 0.0]]
    # Held within 0.5 of the old values: 1.5, 2.0 and 1.5, of which the first is farther from its return.
    clipped = value_loss(values, **given, value_clip=0.5)
    assert clipped.item() == pytest.approx((2.25 + 0.25) / 4 + 0.5 * 4.0 / 2)
    assert torch.autograd.grad(clipped, values)[0][0].tolist() == [0.0, -0.25]
