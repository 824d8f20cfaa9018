"""Generalised advantage estimation (arXiv 1506.02438), and what a whole batch's advantages have in common.

A *step* is what one value is of: a decision, with the sum of its rewards, or a single control step. Discount and lambda
are per step, whichever it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STD_FLOOR = 1e-6


def generalized_advantages(
    rewards: Tensor, values: Tensor, *, lengths: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages ``A_t = d_t + gamma lambda A_{t+1}`` with ``d_t = r_t + gamma V_{t+1} - V_t``; behind the end both are 0.

    Args:
        rewards: (E, L) of E episodes; what lies behind an episode's end is left over and may be anything.
        values: (E, L), likewise.
        lengths: (E,) int, steps of each episode, at least 1.
        gamma: Discount per step.
        gae_lambda: 0 trusts the values, 1 the returns.

    Returns:
        Advantages and returns (advantage + value: what the value is to become), (E, L) float32; 0 behind the end.
    """
    index = torch.arange(rewards.shape[1])[None, :]
    played = index < lengths[:, None]
    value = values.double().where(played, 0.0)
    following = torch.cat((value[:, 1:], torch.zeros_like(value[:, :1])), dim=1)
    delta = (rewards.double() + gamma * following - value).where(played, 0.0)
    advantages = torch.zeros_like(delta)
    running = torch.zeros_like(delta[:, 0])
    for step in reversed(range(delta.shape[1])):
        running = delta[:, step] + gamma * gae_lambda * running
        advantages[:, step] = running
    return advantages.float(), (advantages + value).float()


def moments(advantages: Tensor, returns: Tensor, lengths: Tensor) -> Tensor:
    """Number, sum and sum of squares of the advantages (E, L), then sums of the returns; (5,) float64.

    They add up over groups and ranks.
    """
    played = torch.arange(advantages.shape[1])[None, :] < lengths[:, None]
    a, r = (values.double()[played] for values in (advantages, returns))
    return torch.stack([played.sum().double(), a.sum(), a.square().sum(), r.sum(), r.square().sum()])


def normalize(advantages: Tensor, batch: Tensor) -> Tensor:
    """Advantages less their mean, over their deviation + 1e-6, both of the whole batch (its `moments`); float32."""
    count, total, squares = batch[:3].tolist()
    mean = total / count
    deviation = max(squares / count - mean**2, 0.0) ** 0.5
    return ((advantages.double() - mean) / (deviation + _STD_FLOOR)).float()


def explained_variance(batch: Tensor) -> float | None:
    """``1 - Var(R - V) / Var(R)`` of a batch's `moments`; R - V is the advantage. None where all returns are alike."""
    count, total, squares, return_total, return_squares = batch.tolist()
    of_returns = return_squares / count - (return_total / count) ** 2
    if of_returns <= _STD_FLOOR**2:
        return None
    return 1.0 - (squares / count - (total / count) ** 2) / of_returns
