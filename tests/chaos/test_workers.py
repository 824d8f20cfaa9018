"""Simulator workers that die, hang or go mad: replaced, their episodes played again, nothing lost and nothing doubled."""

import gc
import itertools
import re

import psutil
import pytest
from playing import make_config, play_episodes

from dvla.config import EnvConfig
from dvla.lanes.sampling import RepeatedFailureError

pytestmark = [pytest.mark.chaos, pytest.mark.alone]


def config(disaster, marker, num_envs=6, num_workers=2, **runtime):
    env = EnvConfig(
        name="counting_env:CountingEnv",
        cameras=("top",),
        image_size=(4, 4),
        max_episode_steps=10,
        options={"num_tasks": 2, "disaster": disaster, "marker": str(marker) if marker else ""},
    )
    return make_config(env, episodes=12, num_envs=num_envs, num_workers=num_workers, **runtime)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same episodes without a disaster."""
    return play_episodes(config("", None), tmp_path_factory.mktemp("logs"))


@pytest.fixture(autouse=True)
def no_process_is_left(undisturbed):
    """Beyond those of tests before, such as multiprocessing's own of a spawned process."""
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) == before


PLACES = ("reset 1", "reset 3", "step 1", "step 17", "observe 2", "observe 9")
QUICK_ONES = (("kill", "reset 3"), ("kill", "step 17"), ("raise", "step 1"), ("raise", "observe 9"))


@pytest.mark.parametrize(
    ("how", "place"),
    [
        pytest.param(*one, marks=[] if one in QUICK_ONES else [pytest.mark.chaos_full])
        for one in itertools.product(("kill", "raise"), PLACES)
    ],
)
def test_a_worker_that_dies_loses_and_doubles_nothing(undisturbed, how, place, tmp_path):
    played = play_episodes(config(f"{how} {place}", tmp_path / "struck"), tmp_path)
    assert (tmp_path / "struck").exists()
    assert played.restarts == 1
    assert played.key() == undisturbed.key()
    assert len(played.outcomes) == 24


@pytest.mark.parametrize("how", ["hang", "freeze"])
def test_a_worker_that_hangs_is_replaced_after_its_deadline(undisturbed, how, tmp_path):
    played = play_episodes(config(f"{how} step 8", tmp_path / "struck", step_timeout_s=1.0), tmp_path)
    assert played.restarts == 1
    assert played.key() == undisturbed.key()
    if how == "hang":  # its stack tells where
        logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
        assert re.search(r"Fatal Python error: Aborted.*in strike", logs, re.DOTALL)


def test_a_decision_for_a_worker_that_is_being_ended_is_dropped(undisturbed, tmp_path):
    """The policy is about as slow as the deadline, so that it answers while the hung worker is taken down."""
    for slow_s in (0.5, 1.5, 2.5):
        marker = tmp_path / f"struck{slow_s}"
        settings = config("freeze observe 2", marker, step_timeout_s=1.0)
        played = play_episodes(settings, tmp_path, slow_s=slow_s)
        assert marker.exists()
        assert (played.restarts, played.key()) == (1, undisturbed.key())


def test_rewards_that_are_no_numbers_replace_the_worker(undisturbed, tmp_path, caplog):
    with caplog.at_level("INFO", logger="dvla"):
        played = play_episodes(config("nan step 5", tmp_path / "struck"), tmp_path)
    assert (played.restarts, played.key()) == (1, undisturbed.key())
    assert "the rewards of a chunk add up to nan" in caplog.text
    assert "it is replaced, 3 episodes begin anew (task" in caplog.text
    assert "Traceback (most recent call last)" in caplog.text


def test_a_task_that_fails_again_and_again_ends_the_run(tmp_path):
    with pytest.raises(RepeatedFailureError) as caught:
        play_episodes(config("raise step 3", None, num_workers=1, max_worker_failures=2), tmp_path)
    words = str(caught.value)
    assert re.match(r"3 simulator workers failed in a row \(task [01], initial state \d+; ", words)
    assert "runtime.max_worker_failures=2" in words
    assert "ValueError: the arm fell off" in words


def test_an_initial_state_that_always_fails_ends_the_run_though_others_of_its_task_succeed(tmp_path):
    settings = config("", None, num_envs=2, num_workers=2, max_worker_failures=2)
    settings.env.options["fault"] = "bad_state"
    with pytest.raises(
        RepeatedFailureError, match=r"3 .* in a row \(task 0, initial state 1000003;.*this state cannot be"
    ):
        play_episodes(settings, tmp_path)


def test_failures_that_are_not_in_a_row_are_made_good_again_and_again(tmp_path):
    # Every worker dies at its fifth reset, when it has finished episodes of its task.
    played = play_episodes(config("kill reset 5", None, num_envs=1, num_workers=1, max_worker_failures=1), tmp_path)
    assert played.restarts == 5
    assert len({(o.task, o.seed) for o in played.outcomes}) == len(played.outcomes) == 24


def test_replacements_leave_no_descriptor_and_no_memory_behind(tmp_path):
    def descriptors():
        return psutil.Process().num_fds()

    play_episodes(config("", None), tmp_path)
    gc.collect()
    before = descriptors()
    play_episodes(config("kill reset 5", None, num_envs=1, num_workers=1), tmp_path)
    gc.collect()
    assert descriptors() == before
