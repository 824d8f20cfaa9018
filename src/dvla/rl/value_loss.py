"""The loss of a value head; indifferent, as the policy's, to how a batch is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(
    values: Tensor,
    *,
    returns: Tensor,
    old_values: Tensor,
    weights: Tensor,
    action_mask: Tensor,
    value_clip: float | None,
) -> Tensor:
    """Sum over B decisions of weight times half the mean squared error of the decision's values.

    With clipping it is the larger one of the errors of the value and of the value held within `value_clip` of the old one
    (PPO's reference implementation, arXiv 1707.06347).

    Args:
        values: (B, S) of the head being trained: S = 1 (of the decision) or K (of each control step).
        returns: (B, S), what they are to become.
        old_values: (B, S), before the batch's first update.
        weights: (B,) non-negative; 0 marks padding.
        action_mask: (B, K) bool, control steps that were executed; the first always is.
        value_clip: Largest change that lowers the loss; None for no bound.
    """
    valid = action_mask[:, : values.shape[1]] & (weights > 0)[:, None]
    error = (values - returns).where(valid, 0.0).square()
    if value_clip is not None:
        held = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.maximum(error, (held - returns).where(valid, 0.0).square())
    return (weights * 0.5 * error.sum(1) / valid.sum(1).clamp(min=1)).sum()
