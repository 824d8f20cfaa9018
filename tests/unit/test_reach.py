"""The built-in reach task: how often chance succeeds, what is drawn, and that seeds settle everything."""

import subprocess
import sys

import numpy as np
import pytest

from dvla.envs.errors import EnvironmentSetupError, SimulationError
from dvla.envs.protocol import Environment
from dvla.envs.reach import ReachEnv


def look(env):
    spec = env.spec
    images = np.full((len(spec.cameras), *spec.image_size, 3), 7, np.uint8)
    state = np.full(spec.state_dim, np.nan, np.float32)
    env.observe(images, state)
    return images, state


def head_for_goal(env, task):
    """Actions of a policy that knows where to go."""
    _, (x, y, target_x, target_y) = look(env)
    sign = 1 if task == 0 else -1
    return np.clip(np.array([sign * target_x - x, sign * target_y - y]) * 10, -1, 1).astype(np.float32)


def test_it_follows_the_protocol():
    env = ReachEnv()
    assert isinstance(env, Environment)
    assert env.spec.cameras == ("top",)
    assert env.spec.image_size == (64, 64)
    assert len(env.spec.instructions) == 1
    assert len(ReachEnv(num_tasks=2).spec.instructions) == 2


@pytest.mark.parametrize("arguments", [{"cameras": ()}, {"image_size": None}])
def test_without_cameras_there_are_no_pictures(arguments):
    env = ReachEnv(**arguments)
    env.reset(0, 0)
    images, state = look(env)
    assert images.shape == (0, 0, 0, 3)
    assert np.isfinite(state).all()


@pytest.mark.parametrize("task", [0, 1])
def test_one_random_episode_in_ten_succeeds(task):
    env = ReachEnv(cameras=(), num_tasks=2)
    successes = 0
    for seed in range(600):
        env.reset(task, seed)
        actions = np.random.default_rng(seed).uniform(-1, 1, (32, 2)).astype(np.float32)
        successes += any(env.step(action).success for action in actions)
    assert 0.05 < successes / 600 < 0.15


@pytest.mark.parametrize("task", [0, 1])
def test_heading_for_the_goal_succeeds_and_nothing_starts_solved(task):
    env = ReachEnv(cameras=(), num_tasks=2)
    for seed in range(200):
        env.reset(task, seed)
        assert not env.step(np.zeros(2, np.float32)).success
        assert any(env.step(head_for_goal(env, task)).success for _ in range(12))


def test_the_second_task_is_the_opposite_place():
    env = ReachEnv(cameras=(), num_tasks=2)
    env.reset(1, 0)
    assert not any(env.step(head_for_goal(env, 0)).success for _ in range(32))


def test_a_reset_depends_on_task_and_seed_only():
    one, two = ReachEnv(num_tasks=2), ReachEnv(num_tasks=2)
    two.reset(0, 99)
    two.step(np.ones(2, np.float32))
    assert one.reset(0, 5) == two.reset(0, 5)
    assert np.array_equal(look(one)[0], look(two)[0])
    assert one.reset(0, 5) != one.reset(0, 6)
    assert one.reset(0, 5) != one.reset(1, 5)


def test_rewards():
    sparse, dense = ReachEnv(cameras=()), ReachEnv(cameras=(), reward_mode="dense")
    sparse.reset(0, 3)
    dense.reset(0, 3)
    for _ in range(12):
        action = head_for_goal(sparse, 0)
        one, other = sparse.step(action), dense.step(action)
        assert one.reward == float(one.success)
        assert 0 <= other.reward <= 1
        assert one.success == other.success
    assert other.reward > 0.9


def test_the_picture_shows_point_and_target_where_they_are():
    env = ReachEnv(image_size=(48, 80))
    for seed in range(20):
        env.reset(0, seed)
        images, (x, y, target_x, target_y) = look(env)
        for place, channel in (((x, y), 2), ((target_x, target_y), 0)):
            colour = images[0].astype(int)
            disc = colour[..., channel] - colour[..., 2 - channel] > 100
            row, column = (mean + 0.5 for mean in np.argwhere(disc).mean(0))
            assert disc.sum() > 10
            if channel == 2 and np.abs(place).max() < 0.85:  # the point lies on top and is whole
                assert abs(column / 80 * 2 - 1 - place[0]) < 0.05
                assert abs(1 - row / 48 * 2 - place[1]) < 0.05


@pytest.mark.parametrize("size", [(64, 64), (7, 13), (1, 1), (256, 256)])
def test_every_pixel_within_a_disc_has_its_colour_and_no_other(size):
    height, width = size
    env = ReachEnv(image_size=size)
    columns, rows = np.meshgrid((np.arange(width) + 0.5) / width * 2 - 1, 1 - (np.arange(height) + 0.5) / height * 2)
    picture, state = np.empty((1, *size, 3), np.uint8), np.empty(4, np.float32)
    for seed in range(40):
        env.reset(0, seed)
        for _ in range(seed % 4 * 8):  # some end up at the rim
            env.step(np.array([1.0, -1.0]))
        wanted = np.full((*size, 3), (24, 24, 32), np.uint8)
        for x, y, radius, colour in (
            (env._target_x, env._target_y, 0.2, (230, 60, 50)),
            (env._x, env._y, 0.12, (70, 150, 255)),
        ):
            wanted[(columns - x) ** 2 + (rows - y) ** 2 <= radius**2] = colour
        env.observe(picture, state)
        assert np.array_equal(picture[0], wanted)


def test_the_point_stays_in_the_square_and_actions_are_clipped():
    env = ReachEnv(cameras=())
    env.reset(0, 0)
    before = look(env)[1]
    env.step(np.array([-50, 0], np.float32))
    assert look(env)[1][0] == pytest.approx(max(before[0] - 0.1, -1))
    for _ in range(40):
        env.step(np.array([1, 1], np.float32))
    assert look(env)[1][:2].tolist() == [1, 1]


def test_bad_arguments_and_actions_are_refused():
    for arguments in (
        {"task": "push"},
        {"cameras": ("side",)},
        {"reward_mode": "shaped"},
        {"num_tasks": 3},
        {"target_radius": 0.5},
    ):
        with pytest.raises(EnvironmentSetupError, match=next(iter(arguments))):
            ReachEnv(**arguments)
    env = ReachEnv(cameras=())
    with pytest.raises(IndexError):
        env.reset(1, 0)
    env.reset(0, 0)
    with pytest.raises(SimulationError, match="not finite"):
        env.step(np.array([np.nan, 0], np.float32))


def test_it_needs_numpy_only():
    code = "import sys, dvla.envs.reach; print({'torch', 'gymnasium', 'mani_skill'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"
