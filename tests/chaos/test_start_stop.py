"""Runs that start and stop, at any moment and while lanes wait for each other: none hangs, none leaves anything behind."""

import pytest
from in_process import EVALUATING, SAVING, STOPS, Child, end_while_blocked, held, play, stop_at

pytestmark = pytest.mark.chaos

INFERENCE, SAMPLING, GRPO = "lanes.inference.InferenceLane", "lanes.sampling.SamplingLane", "lanes.grpo.GrpoLane"
EXCHANGE, WRITER = "planes.exchange.WeightExchange", "runtime.checkpoint_writer.CheckpointWriter"
# What is held back (from which call on, and whether it is left out meanwhile), the lanes that then wait, for what; settings.
BLOCKED = {
    "decisions": (
        (INFERENCE, "serve", 3, False),
        {"sampling": "simulators or their actions", "grpo": "a finished group"},
        (),
    ),
    "observations": ((SAMPLING, "_dispatch", 4, False), {"inference": "requests", "grpo": "a finished group"}, ()),
    "orders": (
        (GRPO, "_finish_step", 2, False),
        {"sampling": "orders", "inference": "requests", "param_dist": "published"},
        (),
    ),
    "a transfer": (
        (EXCHANGE, "gather", 2, False),
        {"grpo": "host_free", "inference": "requests"},
        ("algo.max_staleness=3",),
    ),
    "weights that are not applied": (
        (INFERENCE, "apply_arrived", 40, True),
        {"grpo": "host_free", "param_dist": "staging_free"},
        ("algo.max_staleness=4",),
    ),
    "a checkpoint": ((WRITER, "_commit", 1, False), {"grpo": "until the last checkpoint is written"}, SAVING),
    "an evaluation": ((INFERENCE, "serve", 2, False), {"grpo": "a finished group or evaluation"}, EVALUATING),
}
ENDINGS = [(what, fails) for what in BLOCKED for fails in (False, True)]
ENDINGS.remove(("a checkpoint", True))  # one that fails ends no run: test_disk_full.py

SMALLEST = (
    *("algo.groups_per_step=1", "runtime.num_slots=2", "runtime.num_envs=1", "runtime.max_batch=1"),
    *("algo.micro_batch_size=1", "run.checkpoint_every=1", "run.keep_checkpoints=1", "algo.num_steps=4"),
)
SPEEDS = {
    "as it is": (),
    "a slow simulator": ("env.name=counting_env:CountingEnv", "+env.options.fault=slow", "env.max_episode_steps=8"),
    "a slow learner": ("algo.update_epochs=4", "env.max_episode_steps=8"),
    "no group with a signal": (
        *("env.reward_mode=sparse", "env.max_episode_steps=1", "model.num_action_chunks=1"),
        *("algo.filter_zero_signal=true", "algo.max_dropped_per_step=3"),
    ),
    "a last micro-batch in part": (
        *("algo.update_epochs=2", "algo.groups_per_step=3", "algo.micro_batch_size=3", "runtime.num_slots=6"),
    ),
}


@pytest.fixture(scope="module")
def child():
    process = Child()
    yield process
    process.close()


def test_runs_stopped_at_any_moment_leave_nothing_in_their_process(child, tmp_path):
    assert child.call(stop_at, tmp_path, *STOPS["in a checkpoint"])["exit"] == "stopped"
    before = child.call(held)
    for moment, stop in STOPS.items():
        summary = child.call(stop_at, tmp_path, *stop)
        assert (summary["exit"], summary["error"]) == ("stopped", None), moment
        assert child.call(held) == before, moment


@pytest.mark.parametrize(("what", "fails"), ENDINGS, ids=[f"{what}-{fails}" for what, fails in ENDINGS])
def test_a_run_ends_while_lanes_wait_for(what, fails, child, tmp_path):
    held_back, blocked, overrides = BLOCKED[what]
    summary = child.call(end_while_blocked, tmp_path, held_back, blocked, overrides, fails=fails)
    assert summary["exit"] == ("failed" if fails else "stopped"), summary["error"]
    if fails:
        assert "FailedOnPurposeError: the arm fell off (in lane " in summary["error"]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("speed", SPEEDS)
def test_with_room_for_one_group_and_one_of_everything_a_run_ends(speed, staleness, child, tmp_path):
    overrides = (*SMALLEST, f"algo.max_staleness={staleness}", *SPEEDS[speed])
    summary = child.call(play, tmp_path, overrides)
    assert (summary["exit"], summary["policy_version"]) == ("completed", 4), summary["error"]
    if speed == "no group with a signal":
        assert summary["groups_dropped"] > 0
