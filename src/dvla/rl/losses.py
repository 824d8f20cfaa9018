"""The policy-gradient loss: clipped, off-policy corrected, and indifferent to how a batch is cut.

Two objectives (pi_b made the decision, pi_p are the weights just before the update, pi the weights being
trained):

* ``clip``: PPO's ``min(r A, clip(r) A)`` with ``r = pi / pi_b`` and clip-higher (DAPO, arXiv 2503.14476);
* ``decoupled``: ``w min(u A, clip(u) A)`` with ``u = pi / pi_p`` and a constant ``w = pi_p / pi_b`` (AReaL,
  arXiv 2505.24298). The trust region lies around the newest weights, so stale data do not eat it up.

Both take the dual clip (arXiv 1912.09729), which bounds the loss at ``-c A`` where A < 0 and the ratio has
run away. Two regularisers may be added, each a mean over action elements: the entropy, as a bonus, and the
divergence from a reference policy, as a penalty (k3: ``exp(d) - 1 - d`` with ``d = log pi_ref - log pi``,
joschu.net/blog/kl-approx.html, as in GRPO, arXiv 2402.03300, eq. 4).

A *term* is what one ratio is made of: an action element, a control step or a whole chunk. The loss is the sum
over decisions of weight times the mean over the decision's terms. Nothing in it depends on the other
decisions of the call: the caller divides by a number that all ranks agree on, and micro-batches add up to the
same gradient however they are cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

LogprobType = Literal["token", "action", "chunk"]
Objective = Literal["decoupled", "clip"]

_MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far beyond any clip, and its square is still finite in float32

SUM_NAMES = (
    "loss_sum",
    "weight_sum",
    "num_terms",
    "num_clip_low",
    "num_clip_high",
    "num_dual_clip",
    "num_behavior_capped",
    "ratio_sum",
    "behavior_ratio_sum",
    "kl_sum",
    "num_elements",
    "entropy_sum",
    "num_referenced",
    "reference_kl_sum",
    "valued_weight_sum",
    "value_loss_sum",
)
"""Entries of `LossStats.sums`; they add up over micro-batches and ranks."""
MAX_NAMES = ("ratio_max", "behavior_ratio_max")
"""Entries of `LossStats.maxima`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """What the objective looks like."""

    logprob_type: LogprobType = "token"
    """What one ratio covers: an action element, a control step (sum over dims) or a chunk (sum over all)."""
    objective: Objective = "decoupled"
    clip_ratio_low: float = 0.2
    """The ratio is clipped below 1 - this, in [0, 1]."""
    clip_ratio_high: float = 0.28
    """The ratio is clipped above 1 + this, non-negative."""
    dual_clip: float | None = 3.0
    """Largest loss in units of abs(A) where A < 0, above 1; None for no bound."""
    behavior_ratio_cap: float | None = 5.0
    """Largest pi_p / pi_b of the decoupled objective, positive; None for no cap."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, in nats per action element."""
    reference_kl_coef: float = 0.0
    """Weight of the divergence from the reference, in nats per action element."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        if self.logprob_type not in get_args(LogprobType):
            raise ValueError(f"logprob_type must be one of {get_args(LogprobType)}, not {self.logprob_type!r}")
        if self.objective not in get_args(Objective):
            raise ValueError(f"objective must be one of {get_args(Objective)}, not {self.objective!r}")
        if not 0.0 <= self.clip_ratio_low <= 1.0:
            raise ValueError(f"clip_ratio_low must lie in [0, 1], not {self.clip_ratio_low}")
        if self.clip_ratio_high < 0.0:
            raise ValueError(f"clip_ratio_high must not be negative, not {self.clip_ratio_high}")
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip must be above 1 (or null), not {self.dual_clip}")
        if self.behavior_ratio_cap is not None and self.behavior_ratio_cap <= 0.0:
            raise ValueError(f"behavior_ratio_cap must be positive (or null), not {self.behavior_ratio_cap}")


@dataclass(slots=True)
class LossStats:
    """What the loss saw, still on its device: adding costs no synchronisation.

    To join ranks, reduce `sums` with SUM and `maxima` with MAX.
    """

    sums: Tensor
    """(len(SUM_NAMES),) float64."""
    maxima: Tensor
    """(len(MAX_NAMES),) float64."""

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> LossStats:
        """Make the neutral element of `add_`."""
        return cls(
            torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=device),
            torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=device),
        )

    def add_(self, other: LossStats) -> None:
        """Add the statistics of another micro-batch or rank to these."""
        self.sums += other.sums
        torch.maximum(self.maxima, other.maxima, out=self.maxima)

    def note_value_loss(self, loss: Tensor, weights: Tensor) -> None:
        """Add the value loss of the same decisions, a sum by their weights (B,)."""
        for name, amount in (("value_loss_sum", loss.detach()), ("valued_weight_sum", weights.sum())):
            self.sums[SUM_NAMES.index(name)] += amount

    def metrics(self) -> dict[str, float]:
        """Means by metric tag (``docs/metrics.md``); waits for the device: once per optimiser step."""
        total = dict(zip(SUM_NAMES, self.sums.tolist(), strict=True))
        largest = dict(zip(MAX_NAMES, self.maxima.tolist(), strict=True))
        terms = max(total["num_terms"], 1.0)
        measured = {}
        if total["num_referenced"]:
            measured["train/reference_kl"] = total["reference_kl_sum"] / total["num_referenced"]
        if total["valued_weight_sum"]:
            measured["train/value_loss"] = total["value_loss_sum"] / total["valued_weight_sum"]
        return measured | {
            "train/loss": total["loss_sum"] / (total["weight_sum"] or 1.0),
            "train/kl": total["kl_sum"] / terms,
            "train/entropy": total["entropy_sum"] / max(total["num_elements"], 1.0),
            "train/clip_frac": (total["num_clip_low"] + total["num_clip_high"]) / terms,
            "train/clip_frac_low": total["num_clip_low"] / terms,
            "train/clip_frac_high": total["num_clip_high"] / terms,
            "train/dual_clip_frac": total["num_dual_clip"] / terms,
            "train/ratio_mean": total["ratio_sum"] / terms,
            "train/ratio_max": largest["ratio_max"],
            "train/behavior_ratio_mean": total["behavior_ratio_sum"] / terms,
            "train/behavior_ratio_max": largest["behavior_ratio_max"],
            "train/behavior_capped_frac": total["num_behavior_capped"] / terms,
        }


def policy_loss(
    logprobs: Tensor,
    *,
    behavior_logprobs: Tensor,
    prox_logprobs: Tensor | None,
    entropy: Tensor,
    advantages: Tensor,
    weights: Tensor,
    action_mask: Tensor,
    settings: LossSettings,
    reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """Sum over B decisions of weight times loss.

    Gradient flows into `logprobs` and `entropy` only. Steps that were not executed and decisions of weight 0
    take no part whatever they hold, NaN included.

    Args:
        logprobs: (B, K, A) float, under the weights being trained; gives the dtype of the computation.
        behavior_logprobs: (B, K, A), under the weights that made the decision.
        prox_logprobs: (B, K, A), under the weights just before the update. None means that `logprobs` are
            these, which is so for the first (and usually only) optimiser step on a batch. The clip objective
            does not look at them.
        entropy: (B, K, A) entropy of each element's distribution, nats.
        advantages: (B,), or (B, K) of each control step, which a ratio of a chunk cannot have.
        weights: (B,) non-negative; 0 marks padding.
        action_mask: (B, K) bool, control steps that were executed: an episode may end inside a chunk.
        settings: The objective.
        reference_logprobs: (B, K, A), under the reference policy; None where there is none to stay close to.

    Returns:
        The loss, a scalar, and its statistics.
    """
    executed = (action_mask & (weights > 0)[:, None])[:, :, None].expand_as(logprobs)  # (B, K, A)
    valid = _term_mask(executed, settings.logprob_type)  # (B, N): N terms a decision
    behavior = behavior_logprobs.detach()
    log_ratio_to_behavior = _log_ratio(logprobs, behavior, executed, settings.logprob_type)

    if settings.objective == "clip":
        ratio = log_ratio_to_behavior.exp()
        behavior_ratio = correction = torch.ones_like(ratio)
    else:
        prox = (logprobs if prox_logprobs is None else prox_logprobs).detach()
        ratio = _log_ratio(logprobs, prox, executed, settings.logprob_type).exp()
        behavior_ratio = _log_ratio(prox, behavior, executed, settings.logprob_type).exp()
        correction = behavior_ratio.clamp(max=settings.behavior_ratio_cap or torch.inf)

    advantage = advantages.detach().to(ratio.dtype).view(len(weights), -1)
    if advantage.shape[1] > 1 and settings.logprob_type == "token":
        advantage = advantage.repeat_interleave(logprobs.shape[2], 1)
    low, high = 1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    is_dual_clipped = torch.zeros_like(valid)
    if settings.dual_clip is not None:
        is_dual_clipped = (advantage < 0) & (ratio > settings.dual_clip)
        surrogate = torch.where(is_dual_clipped, settings.dual_clip * advantage, surrogate)

    per_decision = -_mean(correction * surrogate, valid)
    if settings.entropy_coef:
        per_decision = per_decision - settings.entropy_coef * _mean(entropy.flatten(1), executed.flatten(1))
    reference_kl = torch.zeros_like(logprobs)
    if reference_logprobs is not None:
        reference_kl = _k3((reference_logprobs.detach() - logprobs).where(executed, 0.0))
        per_decision = per_decision + settings.reference_kl_coef * _mean(reference_kl.flatten(1), executed.flatten(1))
    loss = (weights.detach().to(ratio.dtype) * per_decision).sum()

    with torch.no_grad():
        kl = _k3(log_ratio_to_behavior)  # of KL(pi_b, pi)
        sums = {
            "loss_sum": loss,
            "weight_sum": _total(weights),
            "num_terms": _total(valid),
            "num_clip_low": _total(valid & (advantage < 0) & (ratio < low)),
            "num_clip_high": _total(valid & (advantage > 0) & (ratio > high)),
            "num_dual_clip": _total(valid & is_dual_clipped),
            "num_behavior_capped": _total(valid & (behavior_ratio > correction)),
            "ratio_sum": _total(ratio.where(valid, 0)),
            "behavior_ratio_sum": _total(behavior_ratio.where(valid, 0)),
            "kl_sum": _total(kl.where(valid, 0)),
            "num_elements": _total(executed),
            "entropy_sum": _total(entropy.where(executed, 0)),
            "num_referenced": _total(executed if reference_logprobs is not None else torch.zeros_like(executed)),
            "reference_kl_sum": _total(reference_kl),
            "valued_weight_sum": torch.zeros_like(loss),
            "value_loss_sum": torch.zeros_like(loss),
        }
        maxima = {"ratio_max": ratio.where(valid, 0), "behavior_ratio_max": behavior_ratio.where(valid, 0)}
        stats = LossStats(
            torch.stack([sums[name].double() for name in SUM_NAMES]),
            torch.stack([maxima[name].max().double() for name in MAX_NAMES]),
        )
    return loss, stats


def _log_ratio(new: Tensor, old: Tensor, executed: Tensor, logprob_type: LogprobType) -> Tensor:
    """Log-ratio (B, N) of each term; 0 where nothing was executed.

    The mask goes before the sum and the exponential: a NaN hidden behind a later mask would still reach the
    gradient.
    """
    difference = (new - old).where(executed, 0.0)
    if logprob_type == "token":
        log_ratio = difference.flatten(1)
    elif logprob_type == "action":
        log_ratio = difference.sum(2)
    else:
        log_ratio = difference.sum((1, 2))[:, None]
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimate of KL(p, q) from samples of p, elementwise; `log_ratio` is log q - log p."""
    log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return log_ratio.exp() - 1.0 - log_ratio


def _term_mask(executed: Tensor, logprob_type: LogprobType) -> Tensor:
    """Terms (B, N) of which at least one element was executed."""
    if logprob_type == "token":
        return executed.flatten(1)
    if logprob_type == "action":
        return executed.any(2)
    return executed.flatten(1).any(1, keepdim=True)


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    """Mean (B,) over the valid ones of (B, N); 0 for a decision that has none."""
    return values.where(valid, 0.0).sum(1) / valid.sum(1).clamp(min=1)


def _total(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)
