"""The loss against a plain loop, by hand, and under every way of cutting a batch."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dvla.rl.losses import LossSettings, LossStats, policy_loss

LEVELS = ("token", "action", "chunk")
OBJECTIVES = ("decoupled", "clip")


def random_batch(
    seed: int = 0, *, batch: int = 6, steps: int = 3, dims: int = 2, spread: float = 0.4
) -> dict[str, Tensor]:
    """A float64 batch with ragged chunks, one padding decision and one decision without an executed step."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    behavior = draw(batch, steps, dims) - 2.0
    executed = torch.randint(1, steps + 1, (batch,), generator=generator)
    executed[0], executed[1] = 1, 0  # always one chunk cut short and one that was not executed at all
    weights = torch.rand(batch, generator=generator, dtype=torch.float64)
    weights[2] = 0.0
    return {
        "logprobs": (behavior + spread * draw(batch, steps, dims)).requires_grad_(),
        "behavior_logprobs": behavior,
        "prox_logprobs": behavior + spread * draw(batch, steps, dims),
        "reference_logprobs": behavior + spread * draw(batch, steps, dims),
        "entropy": draw(batch, steps, dims).abs().requires_grad_(),
        "advantages": draw(batch),
        "weights": weights,
        "action_mask": torch.arange(steps) < executed[:, None],
    }


def naive_loss(batch: dict[str, Tensor], settings: LossSettings) -> tuple[float, dict[str, float]]:
    """The formulas, one term at a time, in Python floats."""
    b = {name: tensor.detach().tolist() for name, tensor in batch.items()}
    total, stats = (
        0.0,
        dict.fromkeys(
            ("terms", "low", "high", "dual", "capped", "ratio", "behavior", "kl", "entropy", "reference"), 0.0
        ),
    )
    for i, weight in enumerate(b["weights"]):
        steps = [k for k, is_executed in enumerate(b["action_mask"][i]) if is_executed]
        if weight == 0.0 or not steps:
            continue
        dims = range(len(b["logprobs"][i][0]))
        elements = [(k, a) for k in steps for a in dims]
        terms = {
            "token": [[element] for element in elements],
            "action": [[(k, a) for a in dims] for k in steps],
            "chunk": [elements],
        }[settings.logprob_type]
        losses = []
        for term in terms:
            new, old, prox = (
                sum(b[name][i][k][a] for k, a in term) for name in ("logprobs", "behavior_logprobs", "prox_logprobs")
            )
            if settings.objective == "clip":
                ratio, behavior_ratio, correction = math.exp(new - old), 1.0, 1.0
            else:
                ratio, behavior_ratio = math.exp(new - prox), math.exp(prox - old)
                correction = min(behavior_ratio, settings.behavior_ratio_cap or math.inf)
            advantage = b["advantages"][i]
            low, high = 1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high
            loss = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
            if settings.dual_clip is not None and advantage < 0:
                bound = -settings.dual_clip * advantage
                stats["dual"] += loss > bound
                loss = min(loss, bound)
            losses.append(correction * loss)
            stats["terms"] += 1
            stats["low"] += advantage < 0 and ratio < low
            stats["high"] += advantage > 0 and ratio > high
            stats["capped"] += behavior_ratio > correction
            stats["ratio"] += ratio
            stats["behavior"] += behavior_ratio
            stats["kl"] += math.exp(new - old) - 1 - (new - old)
        entropies = [b["entropy"][i][k][a] for k, a in elements]
        stats["entropy"] += sum(entropies)
        bonus = settings.entropy_coef * sum(entropies) / len(entropies)
        away = [b["reference_logprobs"][i][k][a] - b["logprobs"][i][k][a] for k, a in elements]
        divergences = [math.exp(d) - d - 1 for d in away]
        stats["reference"] += sum(divergences)
        penalty = settings.reference_kl_coef * sum(divergences) / len(divergences)
        total += weight * (sum(losses) / len(losses) - bonus + penalty)
    return total, stats


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_plain_loop(level: Any, objective: Any, seed: int) -> None:
    options = LossSettings(
        logprob_type=level, objective=objective, dual_clip=1.5, behavior_ratio_cap=1.3, entropy_coef=0.01,
        reference_kl_coef=0.2,
    )  # fmt: skip
    batch = random_batch(seed)
    loss, stats = policy_loss(**batch, settings=options)
    expected, counts = naive_loss(batch, options)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    metrics = stats.metrics()
    terms = counts["terms"]
    assert metrics["train/clip_frac_low"] == pytest.approx(counts["low"] / terms)
    assert metrics["train/clip_frac_high"] == pytest.approx(counts["high"] / terms)
    assert metrics["train/clip_frac"] == pytest.approx((counts["low"] + counts["high"]) / terms)
    assert metrics["train/dual_clip_frac"] == pytest.approx(counts["dual"] / terms)
    assert metrics["train/behavior_capped_frac"] == pytest.approx(counts["capped"] / terms)
    assert metrics["train/ratio_mean"] == pytest.approx(counts["ratio"] / terms)
    assert metrics["train/behavior_ratio_mean"] == pytest.approx(counts["behavior"] / terms)
    assert metrics["train/kl"] == pytest.approx(counts["kl"] / terms)
    assert metrics["train/loss"] == pytest.approx(expected / batch["weights"].sum().item())
    executed = batch["action_mask"][batch["weights"] > 0].sum().item() * 2
    assert metrics["train/entropy"] == pytest.approx(counts["entropy"] / executed)
    assert metrics["train/reference_kl"] == pytest.approx(counts["reference"] / executed)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_unmoved_weights_give_the_policy_gradient(level: Any, objective: Any) -> None:
    """With pi = pi_b = pi_p the gradient is that of -A log pi, averaged over the terms."""
    batch = random_batch()
    with torch.no_grad():
        batch["logprobs"].copy_(batch["behavior_logprobs"])
    batch["prox_logprobs"] = batch["behavior_logprobs"]
    loss, _ = policy_loss(**batch, settings=LossSettings(logprob_type=level, objective=objective))
    (gradient,) = torch.autograd.grad(loss, batch["logprobs"])
    executed = batch["action_mask"][:, :, None].expand(6, 3, 2)
    num_terms = {
        "token": executed.sum((1, 2)),
        "action": batch["action_mask"].sum(1),
        "chunk": torch.ones(6, dtype=torch.long),
    }[level].clamp(min=1)
    expected = -(batch["advantages"] * batch["weights"] / num_terms)[:, None, None] * executed
    assert torch.allclose(gradient, expected, rtol=1e-12)
    assert (gradient[:, 0, 0].sign() == -(batch["advantages"] * executed[:, 0, 0] * batch["weights"]).sign()).all()


def one_term(
    logprob: float, behavior: float, prox: float, advantage: float, **options: Any
) -> tuple[float, float, dict[str, float]]:
    """Loss, its slope in the log-probability, and metrics of a single term of weight 1."""
    new = torch.tensor([[[logprob]]], dtype=torch.float64, requires_grad=True)
    loss, stats = policy_loss(
        new,
        behavior_logprobs=torch.tensor([[[behavior]]], dtype=torch.float64),
        prox_logprobs=torch.tensor([[[prox]]], dtype=torch.float64),
        entropy=torch.zeros(1, 1, 1),
        advantages=torch.tensor([advantage]),
        weights=torch.ones(1),
        action_mask=torch.ones(1, 1, dtype=torch.bool),
        settings=LossSettings(**options),
    )
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad.item(), stats.metrics()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.5, 2.0, -1.28 * 2.0, 0.0, "high"),  # good and already likelier: no further
        (0.5, 2.0, -0.5 * 2.0, -0.5 * 2.0, None),  # good but less likely: full push back
        (1.5, -2.0, 1.5 * 2.0, 1.5 * 2.0, None),  # bad but likelier: full push back
        (0.5, -2.0, 0.8 * 2.0, 0.0, "low"),  # bad and already less likely: no further
        (1.25, 2.0, -1.25 * 2.0, -1.25 * 2.0, None),  # inside: the upper bound is the wider one
    ],
)
def test_clip_sides(
    objective: str, ratio: float, advantage: float, loss: float, slope: float, clipped: str | None
) -> None:
    value, gradient, metrics = one_term(math.log(ratio), 0.0, 0.0, advantage, objective=objective)
    assert value == pytest.approx(loss)
    assert gradient == pytest.approx(slope)
    for side in ("low", "high"):
        assert metrics[f"train/clip_frac_{side}"] == float(clipped == side)


def test_dual_clip_by_hand() -> None:
    far = math.log(5.0)
    assert one_term(far, 0.0, 0.0, -2.0, dual_clip=None)[:2] == pytest.approx((10.0, 10.0))
    loss, slope, metrics = one_term(far, 0.0, 0.0, -2.0, dual_clip=3.0)
    assert (loss, slope, metrics["train/dual_clip_frac"]) == pytest.approx((6.0, 0.0, 1.0))
    loss, slope, metrics = one_term(math.log(2.9), 0.0, 0.0, -2.0, dual_clip=3.0)  # not reached
    assert (loss, slope, metrics["train/dual_clip_frac"]) == pytest.approx((5.8, 5.8, 0.0))
    assert one_term(far, 0.0, 0.0, 2.0, dual_clip=3.0)[2]["train/dual_clip_frac"] == 0.0  # good: the clip acts


def test_decoupled_by_hand() -> None:
    """pi_b = 1, pi_p = 2, pi = 2.2: u = 1.1 lies inside the clip, w = 2; the plain ratio 2.2 would not."""
    new, prox = math.log(2.2), math.log(2.0)
    loss, slope, metrics = one_term(new, 0.0, prox, 1.0, objective="decoupled", behavior_ratio_cap=None)
    assert (loss, slope) == pytest.approx((-2.2, -2.2))
    assert metrics["train/ratio_mean"] == pytest.approx(1.1)
    assert metrics["train/behavior_ratio_max"] == pytest.approx(2.0)
    loss, slope, metrics = one_term(new, 0.0, prox, 1.0, objective="decoupled", behavior_ratio_cap=1.5)
    assert (loss, slope) == pytest.approx((-1.5 * 1.1, -1.5 * 1.1))
    assert metrics["train/behavior_capped_frac"] == 1.0
    loss, slope, _ = one_term(new, 0.0, prox, 1.0, objective="clip")
    assert (loss, slope) == pytest.approx((-1.28, 0.0))


def test_no_prox_means_the_weights_before_the_update() -> None:
    batch = random_batch()
    implied, _ = policy_loss(**{**batch, "prox_logprobs": None}, settings=LossSettings())
    given_, _ = policy_loss(**{**batch, "prox_logprobs": batch["logprobs"].detach()}, settings=LossSettings())
    assert implied.item() == given_.item()
    gradients = [torch.autograd.grad(loss, batch["logprobs"])[0] for loss in (implied, given_)]
    assert torch.equal(*gradients)


def test_the_clip_objective_ignores_prox() -> None:
    batch = random_batch()
    options = LossSettings(objective="clip")
    plain, _ = policy_loss(**batch, settings=options)
    without, _ = policy_loss(**{**batch, "prox_logprobs": None}, settings=options)
    assert plain.item() == without.item()


def test_entropy_is_rewarded_per_executed_element() -> None:
    batch = random_batch()
    batch["advantages"] = torch.zeros(6, dtype=torch.float64)
    for level in LEVELS:
        loss, _ = policy_loss(**batch, settings=LossSettings(logprob_type=level, entropy_coef=0.5))
        (gradient,) = torch.autograd.grad(loss, batch["entropy"])
        executed = batch["action_mask"][:, :, None].expand(6, 3, 2)
        per_element = batch["weights"] / executed.sum((1, 2)).clamp(min=1)
        assert torch.allclose(gradient, -0.5 * per_element[:, None, None] * executed)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_padding_takes_no_part_whatever_it_holds(level: Any, objective: Any) -> None:
    batch = random_batch()
    batch["weights"] = torch.zeros(6, dtype=torch.float64)
    with torch.no_grad():
        batch["logprobs"].fill_(math.nan)
        batch["entropy"].fill_(math.inf)
    options = LossSettings(logprob_type=level, objective=objective, entropy_coef=0.1)
    loss, stats = policy_loss(**batch, settings=options)
    gradient, entropy_gradient = torch.autograd.grad(loss, [batch["logprobs"], batch["entropy"]])
    assert loss.item() == 0.0
    assert not gradient.any()
    assert not entropy_gradient.any()
    assert not stats.sums.any()
    assert not stats.maxima.any()
    assert all(value == 0.0 for value in stats.metrics().values())


def test_unexecuted_steps_take_no_part_whatever_they_hold() -> None:
    batch = random_batch()
    hidden = ~batch["action_mask"][:, :, None].expand(6, 3, 2)
    for level in LEVELS:
        options = LossSettings(logprob_type=level, entropy_coef=0.1)
        clean, _ = policy_loss(**batch, settings=options)
        dirty = {name: batch[name].detach().masked_fill(hidden, math.nan) for name in ("logprobs", "entropy")}
        dirty["logprobs"].requires_grad_()
        loss, _ = policy_loss(**{**batch, **dirty}, settings=options)
        assert loss.item() == clean.item()
        (gradient,) = torch.autograd.grad(loss, dirty["logprobs"])
        assert torch.isfinite(gradient).all()
        assert not gradient[hidden].any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logprobs_stay_finite(level: Any, objective: Any, dtype: torch.dtype) -> None:
    values = torch.tensor([-1e30, -1e4, -100.0, 0.0, 100.0, 1e4], dtype=dtype)
    new, old, prox = (grid.reshape(-1, 2, 3) for grid in torch.meshgrid(values, values, values, indexing="ij"))
    new = new.clone().requires_grad_()
    batch = len(new)
    loss, stats = policy_loss(
        new,
        behavior_logprobs=old,
        prox_logprobs=prox,
        entropy=torch.zeros_like(new),
        advantages=torch.linspace(-3, 3, batch, dtype=dtype),
        weights=torch.ones(batch, dtype=dtype),
        action_mask=torch.ones(batch, 2, dtype=torch.bool),
        settings=LossSettings(logprob_type=level, objective=objective, dual_clip=None, behavior_ratio_cap=None),
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(new.grad).all()
    assert torch.isfinite(stats.sums).all()
    assert torch.isfinite(stats.maxima).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradcheck(level: Any, objective: Any) -> None:
    batch = random_batch(3)
    options = LossSettings(logprob_type=level, objective=objective, entropy_coef=0.1)

    def scalar(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(**{**batch, "logprobs": logprobs, "entropy": entropy}, settings=options)[0]

    assert torch.autograd.gradcheck(scalar, (batch["logprobs"], batch["entropy"]))


@given(
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(1, 10), max_size=5),
    order=st.permutations(range(11)),
    level=st.sampled_from(LEVELS),
    objective=st.sampled_from(OBJECTIVES),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_gives_the_same_gradient(
    seed: int, cuts: list[int], order: list[int], level: Any, objective: Any
) -> None:
    """Micro-batches of any sizes, in any order, some of them padded, add up to the whole batch."""
    options = LossSettings(logprob_type=level, objective=objective, entropy_coef=0.1, dual_clip=1.5)
    batch = random_batch(seed, batch=11)
    loss, stats = policy_loss(**batch, settings=options)
    whole = torch.autograd.grad(loss, [batch["logprobs"], batch["entropy"]])

    edges = [0, *sorted(cuts), 11]
    added = LossStats.zeros()
    losses = []
    for first, last in pairwise(edges):
        if first == last:
            continue
        chosen = torch.tensor(order[first:last])
        micro = {name: torch.cat([tensor[chosen], tensor[:1]]) for name, tensor in batch.items()}
        micro["weights"] = micro["weights"].clone()
        micro["weights"][-1] = 0.0  # padding
        part, part_stats = policy_loss(**micro, settings=options)
        added.add_(part_stats)
        losses.append(part)
    pieces = torch.autograd.grad(sum(losses), [batch["logprobs"], batch["entropy"]])
    for piece, expected in zip(pieces, whole, strict=True):
        assert torch.allclose(piece, expected, rtol=0.0, atol=1e-10)
    assert torch.allclose(added.sums, stats.sums, atol=1e-10)
    assert torch.equal(added.maxima, stats.maxima)


def test_levels_share_one_scale() -> None:
    """With equal log-ratios of every element close to 0, all three levels give nearly the same loss."""
    batch = random_batch()
    batch["action_mask"][:] = True
    with torch.no_grad():
        batch["logprobs"].copy_(batch["behavior_logprobs"] + 1e-6)
    losses = []
    for level in LEVELS:
        loss, _ = policy_loss(**batch, settings=LossSettings(logprob_type=level, objective="clip"))
        losses.append(loss.item())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprob_type", "word"),
        ("objective", "ppo"),
        ("clip_ratio_low", 1.5),
        ("clip_ratio_high", -0.1),
        ("dual_clip", 1.0),
        ("behavior_ratio_cap", 0.0),
    ],
)
def test_settings_without_meaning_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        replace(LossSettings(), **{name: value})
