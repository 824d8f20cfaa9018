"""Scripted experts: they solve their tasks in the policy's action space, and correct what noise does."""

import numpy as np
import pytest

from dvla.datasets.demonstrations import demonstrate
from dvla.envs.maniskill import ManiSkillEnv
from dvla.envs.maniskill_experts import ACTION_NAMES, EXPERTS, MUST_TURN, play
from dvla.envs.protocol import EnvSpec, Step

FIRST_SEED = 2_000_000_000


@pytest.fixture
def make():
    environments = []

    def build(task, control_mode, **options):
        environments.append(ManiSkillEnv(task=task, cameras=(), control_mode=control_mode, **options))
        return environments[-1]

    yield build
    for env in environments:
        env.close()


def demonstration(env, task, seed, noise=0.0):
    env.reset(0, seed)
    expert = play(env)
    rng = np.random.default_rng(seed)
    return demonstrate(env, expert, noise=noise, rng=rng, terminate_on_success=True)


# Each task in one of its control modes, so that both are tried on several.
CASES = [
    (task, "pd_ee_delta_pose" if task in MUST_TURN or number % 2 else "pd_ee_delta_pos")
    for number, task in enumerate(EXPERTS)
]


@pytest.mark.parametrize(("task", "mode"), CASES, ids=[task for task, _ in CASES])
def test_experts_succeed(make, task, mode):
    env = make(task, mode, max_episode_steps=100)
    episodes = [demonstration(env, task, FIRST_SEED + n) for n in range(3)]
    assert sum(episode.successes[-1] for episode in episodes) >= 2
    for episode in episodes:
        assert episode.actions.dtype == np.float32
        assert episode.actions.shape[1] == env.spec.action_dim == len(ACTION_NAMES[mode])
        assert np.abs(episode.actions).max() <= 1
        assert not episode.successes[:-1].any()


def test_an_expert_corrects_noise_and_repeats_itself(make):
    env = make("PushCube-v1", "pd_ee_delta_pos")
    clean, noisy, again = (demonstration(env, "PushCube-v1", FIRST_SEED, noise) for noise in (0.0, 0.3, 0.3))
    assert noisy.successes[-1]
    np.testing.assert_array_equal(noisy.actions, again.actions)
    np.testing.assert_array_equal(noisy.states, again.states)
    assert (noisy.states[5] != clean.states[5]).any()


class Recorder:
    """An environment whose state is the sum of the actions, and which keeps them."""

    spec = EnvSpec(
        name="sum", cameras=(), image_size=(0, 0), state_dim=2, action_dim=2, max_episode_steps=6, instructions=("",)
    )

    def __init__(self, success_at):
        self.executed, self._success_at = [], success_at

    def step(self, action):
        self.executed.append(action)
        return Step(0.5, len(self.executed) == self._success_at, False)

    def observe(self, images, state):
        state[:] = np.sum(self.executed, axis=0) if self.executed else 0.0


def constant(action):
    while True:
        yield np.array(action, np.float32)


def recorded(env, noise, terminate_on_success=True, action=(0.9, -1.0)):
    rng = np.random.default_rng(0)
    return demonstrate(env, constant(action), noise=noise, rng=rng, terminate_on_success=terminate_on_success)


def test_what_is_executed_is_noisy_and_what_is_recorded_is_not():
    env = Recorder(success_at=4)
    episode = recorded(env, noise=0.5)
    executed = np.array(env.executed)
    np.testing.assert_array_equal(episode.actions, np.tile(np.float32([0.9, -1.0]), (4, 1)))
    assert (executed[:, 0] != np.float32(0.9)).all()
    assert (np.abs(executed) <= 1).all()
    assert (executed[:, 1] == -1).all(), "the gripper's action stays"
    np.testing.assert_allclose(episode.states[1:], np.cumsum(executed, 0)[:-1], rtol=1e-6)
    np.testing.assert_array_equal(episode.successes, [False, False, False, True])


def test_an_episode_ends_with_its_first_success_or_with_the_time_limit():
    assert len(recorded(Recorder(success_at=4), 0.0).actions) == 4
    assert len(recorded(Recorder(success_at=4), 0.0, terminate_on_success=False).actions) == 6
    assert not recorded(Recorder(success_at=9), 0.0).successes.any()
