"""A run that does not learn is told so, with what to change; one that learns is left alone."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dvla.config import AlgoConfig, Config, Precision, RuntimeConfig, TaskSampling
from dvla.rl.health import HEALTH_TAGS, find_warnings, success_trend, trend_z
from dvla.rl.history import History

CONFIG = Config(algo=AlgoConfig(group_size=4, groups_per_step=4))
HEALTHY = {
    "rollout/success_rate": 0.5,
    "rollout/return": 0.5,
    "rollout/zero_signal_frac": 0.25,
    "rollout/all_failed_frac": 0.125,
    "rollout/all_succeeded_frac": 0.125,
    "train/groups_without_signal": 0,
    "train/advantage_success": 1.0,
    "train/groups_compared": 4,
    "train/logprob_gap": 1e-6,
    "train/clip_frac": 0.1,
    "train/ratio_max": 2.0,
    "train/behavior_ratio_max": 1.5,
    "train/entropy": 2.0,
    "train/grad_norm": 3.0,
}


def batches(count: int, **changes: Any) -> list[dict[str, Any]]:
    """As many healthy batches, but for some values; their keys are the tags without what precedes the last slash."""
    named = {tag: changes.pop(tag.rsplit("/", 1)[1]) for tag in HEALTHY if tag.rsplit("/", 1)[1] in changes}
    assert not changes
    return [HEALTHY | named for _ in range(count)]


def names(history: list[dict[str, Any]], config: Config = CONFIG, num_tasks: int = 1) -> list[str]:
    return [warning.name for warning in find_warnings(History.of(history), config, num_tasks=num_tasks)]


def test_nothing_is_wrong_at_the_start_or_with_a_healthy_run() -> None:
    assert set(HEALTHY) == set(HEALTH_TAGS)
    assert names([]) == []
    assert names([{}] * 50) == []
    assert names([dict.fromkeys(HEALTH_TAGS)] * 50) == []
    for count in (1, 3, 39):
        assert names(batches(count)) == []


NO_SIGNAL = {"zero_signal_frac": 1, "advantage_success": None, "groups_compared": 0}
SICK: dict[str, dict[str, Any]] = {
    "all_groups_failed": NO_SIGNAL | {"all_failed_frac": 1, "success_rate": 0.0},
    "all_groups_succeeded": NO_SIGNAL | {"all_succeeded_frac": 1, "success_rate": 1.0},
    "no_group_has_signal": NO_SIGNAL | {"all_failed_frac": 0.5},
    "dropped_cap_reached": {"groups_without_signal": 2},
    "logprob_gap": {"logprob_gap": 0.06},
    "clip_frac": {"clip_frac": 0.51},
    "ratio_max": {"ratio_max": 1001.0},
}


@pytest.mark.parametrize("name", SICK)
def test_what_must_last_three_batches_is_named_then_and_ends_with_the_first_good_one(name: str) -> None:
    sick = SICK[name]
    needed = 1 if name == "logprob_gap" else 3
    assert names(batches(5) + batches(needed - 1, **sick)) == []
    assert names(batches(5) + batches(needed, **sick)) == [name]
    assert names(batches(5) + batches(needed, **sick) + batches(1)) == []


def test_ratios_to_the_behaviour_count_too() -> None:
    assert names(batches(3, behavior_ratio_max=2e4)) == ["ratio_max"]


def test_groups_without_signal_are_nothing_new_where_they_are_kept_on_purpose() -> None:
    keeps = Config(algo=AlgoConfig(filter_zero_signal=False))
    assert names(batches(3, groups_without_signal=2), keeps) == []


def test_few_groups_with_a_signal_are_no_trouble_where_success_is_high() -> None:
    assert names(batches(3, groups_without_signal=1)) == []
    assert names(batches(3, groups_without_signal=3, success_rate=0.95)) == []


def test_the_gap_may_be_larger_in_bfloat16_and_unknown_gaps_do_not_hide_it() -> None:
    narrow = Config(runtime=RuntimeConfig(precision=Precision.bf16))
    assert names(batches(1, logprob_gap=0.4), narrow) == []
    assert names(batches(1, logprob_gap=0.6), narrow) == ["logprob_gap"]
    assert names(batches(1, logprob_gap=0.06) + batches(2, logprob_gap=None)) == ["logprob_gap"]
    assert names(batches(1, logprob_gap=0.06) + batches(3, logprob_gap=None)) == []


def test_the_gradient_must_be_far_too_large_for_ten_batches() -> None:
    assert names(batches(9, grad_norm=20.1)) == []
    assert names(batches(10, grad_norm=20.1)) == ["grad_norm"]
    assert names(batches(10, grad_norm=19.9)) == []


def test_entropy_collapses_by_a_factor_of_ten_in_width_or_to_nothing() -> None:
    start = batches(3, entropy=1.0)
    assert names(start + batches(3, entropy=1.0 - math.log(10) + 0.01)) == []
    assert names(start + batches(3, entropy=1.0 - math.log(10) - 0.01)) == ["entropy_collapse"]
    # Zero is nothing in particular for a density, but the end for bins, where groups end alike:
    assert names(start + batches(3, entropy=0.05)) == []
    assert names(start + batches(3, entropy=0.05, zero_signal_frac=0.6)) == ["entropy_collapse"]
    assert names(start + batches(3, entropy=0.05, zero_signal_frac=0.6, success_rate=0.95)) == []


# -- advantage and success -------------------------------------------------------------------------------------------


def test_rewarding_failure_is_seen_as_soon_as_chance_is_ruled_out() -> None:
    # -1 + 3 / sqrt(4 groups * 3) = -0.13; with 3 groups it is 0.
    assert names(batches(1, advantage_success=-1.0)) == ["reward_against_success"]
    assert names(batches(1, advantage_success=-1.0, groups_compared=2)) == []


def test_rewards_that_have_nothing_to_do_with_success_take_longer() -> None:
    # 3 / sqrt(M * 3) < 0.2 from 76 groups on.
    assert names(batches(18, advantage_success=0.0)) == []
    assert names(batches(20, advantage_success=0.0)) == ["reward_without_success"]
    assert names(batches(20, advantage_success=0.3)) == []


def shuffled(rng: np.random.Generator, groups: int, size: int) -> tuple[float, int]:
    """Mean correlation of success with advantages that are another's, and the groups it is of."""
    found = []
    for _ in range(groups):
        success, advantage = rng.random(size) < 0.5, rng.exponential(size=size)
        if 0 < success.sum() < size:
            found.append(float(np.corrcoef(success, advantage)[0, 1]))
    return float(np.mean(found)), len(found)


def test_the_bounds_of_the_correlation_hold_for_shuffled_rewards() -> None:
    rng = np.random.default_rng(0)
    scores = []
    for _ in range(400):
        mean, count = shuffled(rng, 8, 4)
        scores.append(mean * math.sqrt(count * 3))
    assert abs(float(np.mean(scores))) < 0.15
    assert float(np.std(scores)) == pytest.approx(1.0, abs=0.1)


# -- trends ----------------------------------------------------------------------------------------------------------


def test_trends_computed_by_hand() -> None:
    # 1 2 3 4: all 6 pairs rise, variance 4 * 3 * 13 / 18.
    assert trend_z([1, 2, 3, 4]) == pytest.approx(5 / math.sqrt(156 / 18))
    # 1 1 2: two pairs rise, one is a tie: variance (3 * 2 * 11 - 2 * 1 * 9) / 18.
    assert trend_z([1, 1, 2]) == pytest.approx(1 / math.sqrt(48 / 18))
    assert trend_z([5, 5, 5, 5]) == trend_z([]) == trend_z([3]) == 0
    assert trend_z([2, 1, 3, 2]) == 0  # 3 rise, 2 fall, 1 ties: one pair is within the correction for steps


@given(st.lists(st.integers(0, 5), max_size=20))
def test_a_trend_turns_with_time_and_is_that_of_the_order_alone(values: list[int]) -> None:
    assert trend_z(values[::-1]) == -trend_z(values)
    assert trend_z([math.exp(value) for value in values]) == trend_z(values)
    if all(a <= b for a, b in itertools.pairwise(values)):
        assert trend_z(values) >= 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.95))
def test_a_steady_run_is_not_said_to_fall(seed: int, rate: float) -> None:
    rates = np.random.default_rng(seed).binomial(64, rate, size=100) / 64
    history = [HEALTHY | {"rollout/success_rate": float(value)} for value in rates]
    assert all("success_falls" not in names(history[:end]) for end in range(1, 101, 3))


def rising(start: float, end: float, count: int) -> list[dict[str, Any]]:
    rates = np.random.default_rng(0).binomial(64, np.linspace(start, end, count)) / 64
    return [HEALTHY | {"rollout/success_rate": float(rate), "rollout/return": float(rate)} for rate in rates]


def test_falling_success_is_seen_and_a_small_fall_forgiven() -> None:
    assert names(rising(0.5, 0.2, 30)) == ["success_falls"]
    assert names(rising(0.2, 0.5, 30) + rising(0.5, 0.0, 30)) == ["success_falls"]
    history = [HEALTHY | {"rollout/success_rate": 0.9 - 0.001 * step} for step in range(30)]
    assert success_trend(History.of(history)) == pytest.approx(-434 / math.sqrt(30 * 29 * 65 / 18))
    assert names(history) == []
    assert success_trend(History.of(history[:11])) is None


def test_no_progress_takes_forty_batches_and_either_success_or_return() -> None:
    flat = rising(0.4, 0.4, 40)
    assert names(flat[:39]) == []
    assert names(flat) == ["no_progress"]
    assert names(rising(0.95, 0.95, 40)) == []
    assert names(rising(0.2, 0.6, 40)) == []
    assert names([batch | {"rollout/return": 0.01 * step} for step, batch in enumerate(flat)]) == []
    # What was gained long ago counts, and a long history is averaged down.
    assert names(rising(0.2, 0.6, 200) + rising(0.6, 0.6, 200)) == []


def test_trends_mean_nothing_where_the_mix_of_tasks_follows_success() -> None:
    config = Config(algo=AlgoConfig(task_sampling=TaskSampling.failure_rate))
    assert names(rising(0.5, 0.2, 40), config, num_tasks=5) == []
    assert names(rising(0.5, 0.2, 40), config, num_tasks=1) == ["success_falls"]


# -- remedies --------------------------------------------------------------------------------------------------------


def every_warning() -> list[Any]:
    histories = [batches(3, **sick) for sick in SICK.values()]
    histories += [batches(1, advantage_success=-1.0), batches(30, advantage_success=0.0)]
    histories += [batches(10, grad_norm=50.0), batches(3, entropy=4.0) + batches(3, entropy=0.0)]
    histories += [rising(0.5, 0.2, 30), rising(0.4, 0.4, 40)]
    return [warning for history in histories for warning in find_warnings(History.of(history), CONFIG, num_tasks=1)]


def test_every_remedy_is_one_line_and_names_keys_that_exist() -> None:
    found = every_warning()
    assert len({warning.name for warning in found}) == 13
    for warning in found:
        assert "\n" not in warning.text
        keys = re.findall(r"\b(algo|env|model|runtime)\.(\w+)", warning.remedy)
        assert keys, warning
        for section, key in keys:
            part = getattr(CONFIG, section)
            assert is_dataclass(part)
            assert key in {field.name for field in fields(part)}, (warning.name, section, key)


def test_every_warning_is_documented() -> None:
    from metric_tags import DOCUMENT

    rows = re.findall(r"^\| (\w+) \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert {warning.name for warning in every_warning()} <= set(rows)
