"""Environments behind gymnasium's interface, checked by gymnasium's own checker."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from dvla.envs import gymnasium_env, libero_setup
from dvla.envs.reach import ReachEnv

REACH = "dvla.envs.gymnasium_env:dvla/reach-v0"


@pytest.mark.parametrize("arguments", [{"num_tasks": 2, "render_mode": "rgb_array"}, {"cameras": ()}])
def test_the_checker_finds_nothing_wrong(arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*infinity.*")  # a state has no known bounds
        env = gymnasium.make(REACH, **arguments)
        check_env(env.unwrapped, skip_render_check="render_mode" not in arguments)


def test_an_episode_is_the_environments_own():
    env, direct = (
        gymnasium.make(REACH, num_tasks=2, max_episode_steps=3, render_mode="rgb_array"),
        ReachEnv(num_tasks=2),
    )
    seen, _ = env.reset(seed=5, options={"task": 1})
    direct.reset(1, 5)
    images, state = np.empty((1, 64, 64, 3), np.uint8), np.empty(4, np.float32)
    for number in range(1, 4):
        direct.observe(images, state)
        np.testing.assert_array_equal(seen["top"], images[0])
        np.testing.assert_array_equal(seen["state"], state)
        np.testing.assert_array_equal(env.render(), images[0])
        assert seen["prompt"] == direct.spec.instructions[1]
        action = np.array([0.1, -0.1], np.float32)
        seen, reward, terminated, truncated, info = env.step(action)
        assert (reward, info["success"]) == (direct.step(action).reward, False)
        assert (terminated, truncated) == (False, number == 3)


def test_success_ends_an_episode_unless_it_should_not():
    for ends in (True, False):
        env = gymnasium.make(REACH, cameras=(), terminate_on_success=ends)
        seen, _ = env.reset(seed=1)
        for _ in range(20):
            x, y, goal_x, goal_y = seen["state"]
            seen, _, terminated, truncated, info = env.step(np.clip(10 * np.array([goal_x - x, goal_y - y]), -1, 1))
            if info["success"]:
                break
        assert (terminated, truncated, info["success"]) == (ends, False, True)


def test_every_simulator_has_its_names():
    ids = {name for name in gymnasium.registry if name.startswith("dvla/")}
    assert {"dvla/reach-v0", "dvla/PickCube-v1", "dvla/libero_10-v0"} <= ids
    assert set(gymnasium_env._LIBERO_SUITES) == set(libero_setup.STEP_LIMITS)
    with pytest.raises(ValueError, match="with cameras"):
        gymnasium.make("dvla/reach-v0", cameras=(), render_mode="rgb_array")
