"""Is the run learning, and if not, what to change: pure judgement over a few numbers of every batch.

It looks at nothing but metrics (docs/metrics.md), so a run that is long over can be judged from its
``metrics.jsonl``, too. The three ways in which training goes wrong without an error each show in a number:

* the learner computes other log-probabilities than inference did (another temperature, say):
  ``train/logprob_gap`` is more than rounding;
* the advantages have the wrong sign, or reward something else than success: within a group they go against,
  or have nothing to do with, success (``train/advantage_success``); in the end, success falls or stays;
* the groups have no signal: ``rollout/zero_signal_frac`` is 1.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dvla.config import Algorithm, Precision, TaskSampling
from dvla.rl.history import FIRST_BATCHES, LAST_BATCHES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dvla.config import Config
    from dvla.rl.history import Batch, History

HEALTH_TAGS = (
    *("rollout/success_rate", "rollout/return"),
    *("rollout/zero_signal_frac", "rollout/all_failed_frac", "rollout/all_succeeded_frac"),
    *("train/groups_without_signal", "train/advantage_success", "train/groups_compared"),
    *("train/logprob_gap", "train/clip_frac", "train/ratio_max", "train/behavior_ratio_max"),
    *("train/entropy", "train/grad_norm"),
)
"""The metrics that are judged."""

SETTLED = FIRST_BATCHES
"""Batches in a row that must look bad: a single one may be bad luck."""
LOGPROB_GAP = {Precision.fp32: 0.05, Precision.bf16: 0.5}
"""Nats. Rounding gives up to 1e-4 in float32 and some tenths in bfloat16, for the worst element of a batch; a
temperature of 1.1 instead of 1 gives 0.05 for the typical element already, and over 0.5 for the worst."""
KEPT_SHARE = 0.5
"""Of a batch, groups without signal that are kept because enough were dropped: then it is half the size it seems."""
CLIP_FRAC = 0.5
"""Where the ratio is clipped there is no gradient; when that is most of a batch, the step is not what was asked for."""
RATIO_MAX = 1000.0
"""No clip is anywhere near: such a decision is from another policy altogether."""
ENTROPY_FALL = math.log(10.0)
"""Nats an action element: actions spread over a tenth of what they did."""
ENTROPY_SHARE = 0.1
"""What is left of the first entropy where it began too low to fall by `ENTROPY_FALL`."""
GRAD_FACTOR, GRAD_BATCHES = 20.0, 10
"""Clipping a norm that is several times too large is everyday life; twenty times, ten batches long, is not."""
SOLVED = 0.9
"""Success above which it is no trouble that it does not rise, that few groups have a signal or the policy hardly varies."""
TREND_BATCHES = LAST_BATCHES
"""A trend is that of so many batches: enough for the normal approximation, few enough to show what happens now."""
TREND_LEAST = 12
"""Fewer batches show no trend that could be trusted."""
TREND_Z = 4.0
"""One in 30,000 trends by chance; with a new look at every batch, 60,000 simulated ones gave no false alarm."""
FALL = 0.05
"""A fall of the success rate smaller than this is not worth a warning, however certain it is."""
PROGRESS_BATCHES = 40
"""A recipe that works has long shown progress by then: small policies gain 0.2 in 20 batches."""
PROGRESS_Z = 2.0
"""A trend below this could well be chance (1 in 44)."""
_PROGRESS_POINTS = 64  # a long run is averaged down to these before its trend is looked for
AGREEMENT = 0.2
"""Correlation within groups of advantage and success. It is 1 for the sparse reward, and well above this for a dense
one that is fit for its purpose."""
AGREEMENT_Z = 3.0
"""Standard errors that what is not known may hide."""


class HealthWarning(NamedTuple):
    """Something that keeps the run from learning."""

    name: str
    problem: str
    remedy: str
    """What to do, with the config keys."""

    @property
    def text(self) -> str:
        """In one line."""
        return f"{self.problem}: {self.remedy}"


def trend_z(values: Sequence[float]) -> float:
    """How surely values rise or fall: Mann's test against trend (Econometrica 13, 1945, p. 245), ties corrected.

    It counts the pairs whose later value is larger, less those whose later one is smaller. If the order of the values
    is chance, the result is standard normal from ten values on, whatever their distribution: above 3 they rise, with a
    chance of 1 in 740 that they only seem to.

    Args:
        values: Finite, in order of time.
    """
    array = np.asarray(values, dtype=np.float64)
    num = len(array)
    later, earlier = np.tril_indices(num, -1)
    pairs = float(np.sign(array[later] - array[earlier]).sum())
    ties = np.unique(array, return_counts=True)[1]
    variance = (num * (num - 1) * (2 * num + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if variance <= 0:
        return 0.0
    return (pairs - math.copysign(min(1.0, abs(pairs)), pairs)) / math.sqrt(variance)


def success_trend(history: History) -> float | None:
    """`trend_z` of the success rates of the last `TREND_BATCHES`; None while there are too few."""
    recent = _known(history.last(), "rollout/success_rate")
    return trend_z(recent) if len(recent) >= TREND_LEAST else None


def find_warnings(history: History, config: Config, *, num_tasks: int) -> list[HealthWarning]:
    """What is wrong as of the last batch.

    Args:
        history: Of all batches so far, with their `HEALTH_TAGS`.
        config: The run.
        num_tasks: Tasks the environment has. Where these are drawn by how often they fail, success falls as the easy ones
            are played less, and its trend means nothing.
    """
    has_trend = num_tasks == 1 or config.algo.task_sampling is not TaskSampling.failure_rate
    found = [
        _no_signal(history, config),
        _too_few_signals(history, config),
        _logprob_gap(history, config),
        _disagreement(history, config),
        _clipping(history),
        _ratios(history),
        _entropy(history),
        _gradient(history, config),
        (_falling(history) or _no_progress(history)) if has_trend else None,
    ]
    return [warning for warning in found if warning]


def _known(batches: Sequence[Batch], tag: str) -> list[float]:
    return [value for batch in batches if (value := batch.get(tag)) is not None and math.isfinite(value)]


def _least(history: History, tag: str, batches: int = SETTLED) -> float:
    """The smallest of the last values; -inf if one of them is not known."""
    values = _known(history.last(batches), tag)
    return min(values) if len(values) == batches else -math.inf


def _is_solved(history: History) -> bool:
    success = _known(history.last(SETTLED), "rollout/success_rate")
    return bool(success) and statistics.fmean(success) >= SOLVED


def _no_signal(history: History, config: Config) -> HealthWarning | None:
    if _least(history, "rollout/zero_signal_frac") < 1:
        return None
    if _least(history, "rollout/all_failed_frac") >= 1:
        return HealthWarning(
            "all_groups_failed",
            f"no episode of the last {SETTLED} batches succeeded, so there is nothing to learn from",
            "start from a policy that sometimes succeeds (python -m dvla.sft, then model.checkpoint), take "
            "env.reward_mode=dense or an easier env.task, raise env.max_episode_steps or model.temperature",
        )
    if _least(history, "rollout/all_succeeded_frac") >= 1:
        return HealthWarning(
            "all_groups_succeeded",
            f"every episode of the last {SETTLED} batches succeeded, so there is nothing left to learn",
            "end the run, take a harder env.task, or, of several tasks, play those that fail "
            "(algo.task_sampling=failure_rate)",
        )
    if config.algo.name is Algorithm.ppo:
        return None  # which compares no members of a group
    return HealthWarning(
        "no_group_has_signal",
        f"in every group of the last {SETTLED} batches all episodes were paid alike, so there is nothing to learn from",
        "explore more (model.temperature), raise algo.group_size, or look at what the environment pays (env.reward_mode)",
    )


def _too_few_signals(history: History, config: Config) -> HealthWarning | None:
    algo, kept = config.algo, _least(history, "train/groups_without_signal")
    is_rare = not algo.filter_zero_signal or kept < KEPT_SHARE * algo.groups_per_step
    if is_rare or _is_solved(history) or _least(history, "rollout/zero_signal_frac") >= 1:
        return None
    return HealthWarning(
        "dropped_cap_reached",
        f"at least {kept:.0f} of the {algo.groups_per_step} groups of each batch have no signal, although such groups "
        "are dropped",
        f"raise algo.max_dropped_per_step={algo.max_dropped_per_step}, algo.group_size or model.temperature, or play "
        "what is neither always nor never solved (env.task, algo.task_sampling)",
    )


def _logprob_gap(history: History, config: Config) -> HealthWarning | None:
    gaps, bound = _known(history.last(SETTLED), "train/logprob_gap"), LOGPROB_GAP[config.runtime.precision]
    if not gaps or gaps[-1] <= bound:
        return None
    return HealthWarning(
        "logprob_gap",
        f"the learner computes other log-probabilities than inference did with the same weights (train/logprob_gap "
        f"{gaps[-1]:.2g}, rounding explains {bound:g})",
        "both must use the same temperature, masks and prompts (look at the policy's act and forward, "
        "model.temperature); if it is the arithmetic, runtime.precision=fp32, runtime.cuda_graphs=false, "
        "runtime.compile_inference=false",
    )


def _disagreement(history: History, config: Config) -> HealthWarning | None:
    """Advantages that are not for success.

    If success had nothing to do with the advantages, the correlation within a group would have mean 0 and variance
    1 / (G - 1), whatever the two distributions: all orders of the G episodes are equally likely.
    """
    pairs = [
        (mean, groups)
        for batch in history.last()
        if (mean := batch.get("train/advantage_success")) is not None and (groups := batch.get("train/groups_compared"))
    ]
    if not pairs:
        return None
    num_groups = sum(groups for _, groups in pairs)
    mean = sum(mean * groups for mean, groups in pairs) / num_groups
    error = 1.0 / math.sqrt(num_groups * (config.algo.group_size - 1))
    largest = mean + AGREEMENT_Z * error
    if largest >= AGREEMENT:
        return None
    remedy = "look at what the environment pays: env.reward_mode, env.terminate_on_success, its reward"
    measured = f"correlation {mean:.2f} ± {error:.2f} within {num_groups:.0f} groups"
    if largest < 0:
        return HealthWarning("reward_against_success", f"failure is rewarded, not success ({measured})", remedy)
    return HealthWarning(
        "reward_without_success", f"what is rewarded has hardly anything to do with success ({measured})", remedy
    )


def _clipping(history: History) -> HealthWarning | None:
    share = _least(history, "train/clip_frac")
    if share <= CLIP_FRAC:
        return None
    return HealthWarning(
        "clip_frac",
        f"over {100 * share:.0f} % of the ratios are clipped, so that most of each batch gives no gradient",
        "lower algo.lr, algo.update_epochs or algo.max_staleness, or take algo.objective=decoupled",
    )


def _ratios(history: History) -> HealthWarning | None:
    largest = max(_least(history, "train/ratio_max"), _least(history, "train/behavior_ratio_max"))
    if largest <= RATIO_MAX:
        return None
    return HealthWarning(
        "ratio_max",
        f"decisions have become over {largest:.2g} times as likely as when they were made",
        "lower algo.lr or algo.max_staleness, or take algo.logprob_type=token",
    )


def _entropy(history: History) -> HealthWarning | None:
    first, last = (_known(batches, "train/entropy") for batches in (history.first, history.last(SETTLED)))
    if history.num_batches <= SETTLED or not first or not last or _is_solved(history):
        return None
    before, now = statistics.fmean(first), statistics.fmean(last)
    # Of a density the entropy may be any number, and pass zero on a good way down: being near it counts only where the
    # episodes of most groups end alike.
    is_gone = 0 <= now < ENTROPY_SHARE * before and _least(history, "rollout/zero_signal_frac") > 1 / 2
    if before - now <= ENTROPY_FALL and not is_gone:
        return None
    return HealthWarning(
        "entropy_collapse",
        f"the policy hardly varies its actions any more (entropy {before:.2f}, then {now:.2f} nats) and does not succeed",
        "lower algo.lr, raise algo.clip_ratio_high, algo.entropy_coef or model.temperature",
    )


def _gradient(history: History, config: Config) -> HealthWarning | None:
    norm, limit = _least(history, "train/grad_norm", GRAD_BATCHES), config.algo.max_grad_norm
    if norm <= GRAD_FACTOR * limit:
        return None
    return HealthWarning(
        "grad_norm",
        f"the gradient's norm has been at least {norm:.2g} for {GRAD_BATCHES} batches, and is always cut to {limit:g}",
        "lower algo.lr or raise algo.warmup_steps; if it learns nevertheless, raise algo.max_grad_norm",
    )


def _falling(history: History) -> HealthWarning | None:
    trend = success_trend(history)
    if trend is None or trend > -TREND_Z:
        return None
    rates = _known(history.last(), "rollout/success_rate")
    third = len(rates) // 3
    before, now = statistics.fmean(rates[:third]), statistics.fmean(rates[-third:])
    if before - now < FALL:
        return None
    return HealthWarning(
        "success_falls",
        f"success has fallen over the last {len(rates)} batches ({before:.2f}, then {now:.2f}; {trend:.1f} standard "
        "deviations)",
        "lower algo.lr, algo.update_epochs or algo.max_staleness and go on from an earlier checkpoint (resume)",
    )


def _no_progress(history: History) -> HealthWarning | None:
    rates = history.courses["rollout/success_rate"]
    if len(rates) < PROGRESS_BATCHES or _least(history, "rollout/zero_signal_frac") >= 1:
        return None
    third = len(rates) // 3
    before, now = rates.mean_of_first(third), rates.mean_of_last(third)
    if now >= SOLVED:
        return None
    for course in history.courses.values():
        values = course.points()
        if not values:
            continue
        points = np.array_split(np.asarray(values), min(len(values), _PROGRESS_POINTS))
        if trend_z([float(point.mean()) for point in points]) >= PROGRESS_Z:
            return None
    return HealthWarning(
        "no_progress",
        f"neither success nor return has risen since the start, {len(rates)} batches ago (success {before:.2f}, then "
        f"{now:.2f})",
        "try another algo.lr, more groups a batch (algo.groups_per_step) or a start that succeeds more often "
        "(model.checkpoint)",
    )
