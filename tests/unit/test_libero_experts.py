"""Scripted experts of LIBERO: they solve their tasks in the policies' action space, from LIBERO's own initial states."""

import numpy as np
import pytest

from dvla.datasets.demonstrations import demonstrate
from dvla.envs.libero import LiberoEnv
from dvla.envs.libero_experts import ACTION_NAMES, EXPERTS, play

TIME_LIMIT = 280


@pytest.fixture
def make():
    environments = []

    def build(suite, task):
        environments.append(LiberoEnv(task=suite, cameras=(), tasks=(task,), max_episode_steps=TIME_LIMIT))
        return environments[-1]

    yield build
    for env in environments:
        env.close()


def demonstration(env, seed, noise=0.0, pace=1.0):
    env.reset(0, seed)
    rng = np.random.default_rng(seed)
    return demonstrate(env, play(env, pace), noise=noise, rng=rng, terminate_on_success=True)


@pytest.mark.parametrize(("suite", "task"), [("libero_object", 5), ("libero_spatial", 3)])
def test_experts_succeed(make, suite, task):
    env = make(suite, task)
    episodes = [demonstration(env, seed, noise=0.1) for seed in range(3)]
    assert sum(episode.successes[-1] for episode in episodes) >= 2
    for episode in episodes:
        assert episode.actions.dtype == np.float32
        assert episode.actions.shape[1] == env.spec.action_dim == len(ACTION_NAMES)
        assert np.abs(episode.actions).max() <= 1
    assert task in EXPERTS[suite].tasks


def test_a_careful_expert_takes_longer_and_repeats_itself(make):
    env = make("libero_object", 5)
    quick, careful, again = (demonstration(env, 0, 0.1, pace) for pace in (1.0, 0.5, 0.5))
    assert careful.successes[-1]
    assert len(careful.actions) > 1.2 * len(quick.actions)
    np.testing.assert_array_equal(careful.states, again.states)
    np.testing.assert_array_equal(careful.actions, again.actions)
