"""How much each decision of an episode weighs in the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def decision_weights(num_decisions: Tensor, *, length_normalization: bool, max_decisions: int) -> Tensor:
    """Weight of every single decision of each episode.

    With length normalisation it is ``1 / T_i`` (the inner mean of the GRPO objective, arXiv 2402.03300, eq.
    3): each episode weighs the same, however many decisions it took. Without, it is ``1 / max_decisions`` for
    all: each decision weighs the same, and the loss keeps its scale as episodes get shorter in training (Dr.
    GRPO, arXiv 2503.20783).

    Args:
        num_decisions: (G,) int, decisions up to and with the one that ended the episode; at least 1.
        length_normalization: Which of the two.
        max_decisions: Decisions of the longest possible episode.

    Returns:
        (G,) float32.
    """
    if bool((num_decisions < 1).any()) or bool((num_decisions > max_decisions).any()):
        raise ValueError(f"an episode has 1 to {max_decisions} decisions, got {num_decisions.tolist()}")
    lengths = num_decisions if length_normalization else torch.full_like(num_decisions, max_decisions)
    return 1.0 / lengths.float()


def episode_returns(rewards: Tensor, num_decisions: Tensor) -> Tensor:
    """Sum of each episode's entries up to the decision that ended it; what lies behind it is left over.

    Args:
        rewards: (G, T) any dtype, one entry per decision.
        num_decisions: (G,) int.

    Returns:
        (G,) float64.
    """
    played = torch.arange(rewards.shape[1])[None, :] < num_decisions[:, None]
    return rewards.double().where(played, 0.0).sum(1)
