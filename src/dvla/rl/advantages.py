"""Group-relative advantages: an episode is judged against the others of its group (arXiv 2402.03300)."""

from __future__ import annotations

import torch
from torch import Tensor

_STD_FLOOR = 1e-6  # added to the deviation, as RLinf does
_SAME = 1e-6  # relative spread below which returns count as equal: what float32 sums differ by anyway


def has_signal(returns: Tensor) -> bool:
    """Say whether the episodes of a group ended differently, so that something can be learnt from them.

    Args:
        returns: (G,) sums of rewards, any float dtype.
    """
    spread = returns.max() - returns.min()
    return bool(spread > _SAME * returns.abs().max().clamp(min=1.0))


def group_advantages(returns: Tensor, *, normalize_by_std: bool) -> Tensor:
    """Advantages of the episodes of one group: ``A_i = R_i - mean(R)``, over ``std(R) + 1e-6`` on request.

    The deviation is the unbiased one (ddof 1), so one success among four gives +1.5 and three times -0.5. A
    group without signal gets exact zeros: dividing rounding noise by the floor of the deviation would invent
    one.

    Args:
        returns: (G,) sums of rewards up to each episode's first end, any float dtype.
        normalize_by_std: Divide by the deviation (GRPO); without, groups of mixed difficulty weigh by their
            spread (Dr. GRPO, arXiv 2503.20783).

    Returns:
        (G,) float32.
    """
    if not has_signal(returns):
        return torch.zeros_like(returns, dtype=torch.float32)
    exact = returns.double()
    advantages = exact - exact.mean()
    if normalize_by_std:
        advantages = advantages / (exact.std(correction=1) + _STD_FLOOR)
    return advantages.float()
