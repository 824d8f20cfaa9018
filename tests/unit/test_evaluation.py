"""Evaluation episodes: each exactly once, alike whatever the number of workers and ranks."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from playing import make_config, play_episodes
from scipy.stats import binomtest

from dvla.config import Config, ConfigError, EnvConfig, EvaluationConfig, register, to_plain
from dvla.envs.protocol import EnvSpec
from dvla.evaluate import settings
from dvla.evaluator import summarise, table
from dvla.lanes.evaluation_episodes import Outcome, evaluation_tickets, states_of_tasks
from dvla.telemetry.confidence import success_interval

CONF = str(Path(__file__).parents[2] / "conf")
COUNTING = {
    "name": "counting_env:CountingEnv",
    "cameras": ("top",),
    "image_size": (4, 4),
    "max_episode_steps": 10,
    "options": {"num_tasks": 3},
}


def make_spec(num_tasks, listed=()):
    return EnvSpec(
        name="x",
        cameras=(),
        image_size=(0, 0),
        state_dim=1,
        action_dim=1,
        max_episode_steps=9,
        instructions=("go",) * num_tasks,
        num_initial_states=listed,
    )


@given(
    listed=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    num_samplers=st.integers(1, 5),
    has_list=st.booleans(),
)
def test_the_shares_of_all_ranks_are_disjoint_and_complete(listed, num_samplers, has_list):
    spec = make_spec(len(listed), tuple(listed) if has_list else ())
    config = EvaluationConfig(episodes_per_task=None if has_list else 4, seed=100, videos_per_task=2)
    shares = [
        evaluation_tickets(spec, config, sampler=number, num_samplers=num_samplers) for number in range(num_samplers)
    ]
    tickets = [ticket for share in shares for ticket in share]
    counts, first = (listed, 0) if has_list else ([4] * len(listed), 100)
    wanted = {(task, first + state) for task, count in enumerate(counts) for state in range(count)}
    assert len(tickets) == len(wanted)
    assert {(ticket.task, ticket.seed) for ticket in tickets} == wanted
    assert len({ticket.id for ticket in tickets}) == len(tickets)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    alone = evaluation_tickets(spec, config, sampler=0, num_samplers=1)
    assert sorted(tickets, key=lambda ticket: ticket.id) == sorted(alone, key=lambda ticket: ticket.id)
    assert sum(ticket.film is not None for ticket in tickets) == sum(min(2, count) for count in counts)


def test_all_listed_states_are_evaluated_unless_fewer_are_wanted():
    spec = make_spec(2, (50, 20))
    assert states_of_tasks(spec, None) == [50, 20]
    assert states_of_tasks(spec, 7) == [7, 7]
    assert states_of_tasks(make_spec(2), None) == [50, 50]
    with pytest.raises(ConfigError, match="episodes_per_task=21: x has a task with 20 initial states"):
        states_of_tasks(spec, 21)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Played by one worker with one environment."""
    config = make_config(EnvConfig(**COUNTING), episodes=7, num_envs=1)
    return play_episodes(config, tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize(("workers", "ranks"), [(2, 1), (3, 1), (5, 1), (1, 2), (2, 2), (5, 2)])
def test_every_episode_is_played_once_and_alike(alone, workers, ranks, tmp_path):
    config = make_config(EnvConfig(**COUNTING), episodes=7, num_envs=2 * workers, num_workers=workers)
    parts = [play_episodes(config, tmp_path, rank=rank, world_size=ranks) for rank in range(ranks)]
    assert sorted(key for part in parts for key in part.key()) == alone.key()
    assert len(alone.outcomes) == 21
    seen = {key: values for part in parts for key, values in part.seen.items()}
    assert seen == alone.seen


def test_wilsons_interval_is_scipys():
    for episodes in (1, 7, 50, 500):
        for successes in {0, 1, episodes // 2, episodes}:
            wanted = binomtest(successes, episodes).proportion_ci(method="wilson")
            assert success_interval(successes, episodes) == pytest.approx((wanted.low, wanted.high), abs=1e-9)
    assert success_interval(0, 0) == (0.0, 1.0)


def test_the_summary_counts_by_task():
    outcomes = [
        Outcome(task, seed, success=seed < 3, steps=10 * seed, reward=1.0, first_version=0, last_version=0)
        for task, seed in ((0, 1), (0, 3), (2, 4), (0, 2))
    ]
    summary = summarise(outcomes, ("a", "b", "c"))
    assert [part["episodes"] for part in summary["tasks"]] == [3, 0, 1]
    assert [part["success_rate"] for part in summary["tasks"]] == [2 / 3, None, 0.0]
    assert (summary["successes"], summary["mean_steps"]) == (2, 25.0)
    assert [(o["task"], o["seed"]) for o in summary["outcomes"]] == [(0, 1), (0, 2), (0, 3), (2, 4)]
    text = table({"exit": "completed", "model": "m", "policy_version": 3, "env": "e", **summary})
    assert [line.split()[0] for line in text.splitlines()] == ["completed:", "task", "0", "1", "2", "all"]


@pytest.fixture
def of_a_run(tmp_path, monkeypatch):
    """Settings of an evaluation of a checkpoint, given the command line; the run had options of its own."""
    import dvla.models.trained as trained

    config = Config(
        env=EnvConfig(cameras=(), max_episode_steps=9, options={"num_tasks": 2, "target_radius": 0.3}), seed=5
    )
    monkeypatch.setattr(trained, "fault_of", lambda folder, hashes: None)
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "train_state.json").write_text(json.dumps({"policy_version": 1, "config": to_plain(config)}))

    def get(*overrides):
        register()
        overrides = (f"checkpoint={checkpoint}", *overrides)
        with initialize_config_dir(CONF, version_base="1.3"):
            return settings(compose("evaluate", list(overrides)), list(overrides))[0]

    return get


def test_a_checkpoints_settings_are_its_runs_but_for_the_command_line(of_a_run):
    assert of_a_run().env.options == {"num_tasks": 2, "target_radius": 0.3}
    assert of_a_run().seed == 5
    changed = of_a_run("env.max_episode_steps=13", "seed=6", "++env.options.num_tasks=1", "runtime.num_envs=2")
    assert (changed.env.max_episode_steps, changed.seed, changed.runtime.num_envs) == (13, 6, 2)
    assert changed.env.options == {"num_tasks": 1, "target_radius": 0.3}


def test_another_environment_brings_all_of_its_own_settings(of_a_run):
    for overrides in (("env.max_episode_steps=17", "env=maniskill"), ("env=maniskill", "env.max_episode_steps=17")):
        env = of_a_run(*overrides).env
        assert (env.name, env.max_episode_steps, env.options) == ("maniskill", 17, {"control_mode": "pd_ee_delta_pos"})


def test_what_was_trained_cannot_be_changed(of_a_run):
    with pytest.raises(ConfigError, match=r"model\.temperature: with a checkpoint, this is as in its run"):
        of_a_run("model.temperature=2")
