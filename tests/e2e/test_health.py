"""A run that cannot learn says so, and what to change."""

import pytest
from metric_tags import documented

from dvla.config import Config
from dvla.rl.health import find_warnings
from dvla.rl.history import History
from e2e.launch import QUICK, train

pytestmark = pytest.mark.e2e


def warnings_of(run):
    assert run.code == 0, run.output
    return {warning["name"]: warning for warning in run.summary["warnings"]}


def test_a_run_without_any_signal_ends_and_names_what_to_change(tmp_path):
    run = train(
        tmp_path,
        *QUICK,
        "model.num_action_chunks=1",
        "env.max_episode_steps=1",  # the target is two steps away at least
        "+env.options.num_tasks=2",
        "algo.max_dropped_per_step=4",
        "algo.num_steps=5",
    )
    (warning,) = warnings_of(run).values()
    assert warning["name"] == "all_groups_failed"
    assert (warning["first_step"], warning["last_step"], warning["steps"]) == (3, 5, 3)
    assert "model.checkpoint" in warning["text"]
    assert "env.max_episode_steps" in warning["text"]
    assert run.output.count("warning at step 3: no episode of the last 3 batches succeeded") == 1
    assert "warning at step 4" not in run.output
    assert [line["health/warnings"] for line in run.metrics] == [0, 0, 1, 1, 1]
    for line in run.metrics:
        assert (line["rollout/zero_signal_frac"], line["rollout/all_failed_frac"]) == (1, 1)
        assert line["train/groups_without_signal"] == 4
        assert line["train/advantage_success"] is None
        assert sum(line["train/advantage_hist"]) == line["train/advantage_hist"][8] == 4 * 4  # one decision an episode
        assert sum(line["staleness/hist"]) == 4 * 4
        tasks = [tag for tag in line if tag.startswith("rollout/task_")]
        assert tasks
        assert all(line[tag] == 0 for tag in tasks)
        assert all(any(pattern.fullmatch(tag) for pattern in documented()) for tag in tasks)
    assert [warning.name for warning in find_warnings(History.of(run.metrics), Config(), num_tasks=2)] == [
        "all_groups_failed"
    ]


def test_another_temperature_at_recomputation_shows_in_the_gap(tmp_path):
    right = train(tmp_path, *QUICK, "run.name=right", "algo.max_staleness=0")
    assert "logprob_gap" not in warnings_of(right)
    wrong = train(tmp_path, *QUICK, "model.name=other_temperature:OtherTemperature", "algo.max_staleness=0")
    warning = warnings_of(wrong)["logprob_gap"]
    assert warning["first_step"] == 1
    assert "model.temperature" in warning["text"]
    assert "warning at step 1: the learner computes other log-probabilities" in wrong.output
    assert min(line["train/logprob_gap"] for line in wrong.metrics) > 0.05


def test_a_reward_of_the_wrong_sign_is_seen_long_before_success_falls(tmp_path):
    run = train(tmp_path, *QUICK, "env.name=shuffled_reach:PerverseReach", "algo.num_steps=6", "algo.group_size=8")
    assert "reward_against_success" in warnings_of(run)
    assert "env.reward_mode" in run.summary["warnings"][0]["text"]
    assert all(line["train/advantage_success"] in (None, pytest.approx(-1)) for line in run.metrics)


def test_what_was_warned_of_survives_a_resume_and_is_not_said_again(tmp_path):
    hopeless = (*QUICK, "model.num_action_chunks=1", "env.max_episode_steps=1", "algo.max_dropped_per_step=0")
    first = train(tmp_path, *hopeless, ranks=0)
    assert warnings_of(first)["all_groups_failed"]["last_step"] == 4
    more = train(tmp_path, *hopeless, "algo.num_steps=6", "resume=auto", ranks=0)
    warning = warnings_of(more)["all_groups_failed"]
    assert (warning["first_step"], warning["last_step"], warning["steps"]) == (3, 6, 4)
    assert "warning at step " not in more.output
