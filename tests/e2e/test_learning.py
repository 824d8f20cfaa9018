"""It learns what can be learnt, and nothing where there is nothing to learn."""

import pytest

from e2e.launch import train

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reach_from_scratch_is_learnt_on_every_seed(tmp_path, seed):
    run = train(tmp_path, "experiment=reach", "run.name=test", f"seed={seed}")
    assert run.code == 0, run.output
    assert run.summary["success_last"] >= 0.9
    early = [line["rollout/success_rate"] for line in run.metrics[:3]]
    assert max(early) < 0.4, "it must be learnt, not be there from the start"
    assert max(line["health/success_trend"] or 0 for line in run.metrics) > 3
    assert {warning["name"] for warning in run.summary["warnings"]} <= {"all_groups_succeeded"}, "a false alarm"


def test_ppo_learns_reach_from_scratch_too(tmp_path):
    """It did not while an episode whose time ran out was taken to be worth its last observation's value."""
    run = train(tmp_path, "experiment=reach_ppo", "run.name=test")
    assert run.code == 0, run.output
    assert run.summary["success_last"] >= 0.9
    assert run.metrics[0]["rollout/success_rate"] < 0.4


def test_shuffled_rewards_teach_nothing(tmp_path):
    run = train(tmp_path, "experiment=reach", "run.name=test", "env.name=shuffled_reach:ShuffledReach")
    assert run.code == 0, run.output
    assert run.summary["success_last"] < 0.4
    assert {warning["name"] for warning in run.summary["warnings"]} >= {"reward_without_success", "no_progress"}


def test_rewards_of_the_wrong_sign_unteach(tmp_path):
    run = train(tmp_path, "experiment=reach", "run.name=test", "env.name=shuffled_reach:PerverseReach")
    assert run.code == 0, run.output
    assert run.summary["success_last"] < run.summary["success_first"] / 2
    assert {warning["name"] for warning in run.summary["warnings"]} >= {"reward_against_success", "success_falls"}


def test_a_lower_temperature_at_recomputation_teaches_nothing(tmp_path):
    """A higher one may well teach something: all ratios shrink alike. Either is told by the gap (test_health.py)."""
    quarter = ("model.name=other_temperature:OtherTemperature", "+model.options.factor=0.25")
    run = train(tmp_path, "experiment=reach", "run.name=test", *quarter)
    assert run.code == 0, run.output
    assert run.summary["success_last"] < 0.4
    assert "logprob_gap" in {warning["name"] for warning in run.summary["warnings"]}
