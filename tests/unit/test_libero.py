"""LIBERO as an environment: its own pipeline to the bit, steps without drawing, one object for a suite, clear errors."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from dvla.envs import libero, libero_setup
from dvla.envs.errors import EnvironmentSetupError, SimulationError
from dvla.envs.libero import LiberoEnv, _axis_angle
from dvla.envs.protocol import Environment
from dvla.envs.registry import environment_class

OPEN = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
CLOSE = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (4, 7)).astype(np.float32)
SIZE = (72, 96)


@pytest.fixture(scope="module")
def seeing():
    env = LiberoEnv(image_size=SIZE, render_backend="osmesa")
    yield env
    env.close()


@pytest.fixture(scope="module")
def blind():
    env = LiberoEnv(cameras=())
    yield env
    env.close()


def look(env):
    images = np.zeros((len(env.spec.cameras), *env.spec.image_size, 3), np.uint8)
    state = np.full(env.spec.state_dim, np.nan, np.float32)
    env.observe(images, state)
    return images, state


def play(env, task, seed):
    """Reset, and take some actions; everything that can be compared afterwards."""
    initial = env.reset(task, seed)
    first = look(env)
    for action in ACTIONS:
        env.step(action)
    return initial, [*first, *look(env)], env._simulator.sim.get_state().flatten()


def turn_on_stove(simulator):
    (knob,) = [name for name in simulator.sim.model.joint_names if name.startswith("flat_stove")]
    simulator.sim.data.set_joint_qpos(knob, 1.0)


def assert_same(one, other):
    assert one[0] == other[0]
    for mine, theirs in zip(one[1], other[1], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(one[2], other[2])


def test_spec_of_a_suite():
    env = LiberoEnv(cameras=("agentview",), image_size=SIZE)
    assert isinstance(env, Environment)
    spec = env.spec
    assert (spec.name, spec.cameras, spec.image_size) == ("libero/libero_spatial", ("agentview",), SIZE)
    assert (spec.state_dim, spec.action_dim, spec.gripper_open, spec.max_episode_steps) == (8, 7, -1.0, 240)
    assert len(spec.instructions) == 10
    assert spec.instructions[2] == "pick up the black bowl from table center and place it on the plate"
    env.close()
    assert environment_class("libero") is LiberoEnv
    assert LiberoEnv.expected_action_dim(task="libero_10", reflections=False) == 7


def test_libero_130_is_all_suites_in_one():
    parts = ["libero_90", "libero_spatial", "libero_object", "libero_goal", "libero_10"]
    specs = [LiberoEnv(part, cameras=()).spec for part in parts]
    assert [len(spec.instructions) for spec in specs] == [90, 10, 10, 10, 10]
    env = LiberoEnv("libero_130", cameras=())
    assert env.spec.instructions == sum((spec.instructions for spec in specs), ())
    assert (env.spec.cameras, env.spec.image_size, env.spec.max_episode_steps) == ((), (0, 0), 520)
    assert env._suite.problem_file(95) == LiberoEnv(cameras=())._suite.problem_file(5)
    assert all(len(env._suite.initial_states(task)) == 50 for task in (0, 89, 90, 129))


def test_some_tasks_of_a_suite():
    every, some = LiberoEnv("libero_goal", cameras=()), LiberoEnv("libero_goal", cameras=(), tasks=(7, 2))
    assert some.spec.instructions == (every.spec.instructions[7], every.spec.instructions[2])
    assert [some._suite.problem_file(task) for task in (0, 1)] == [every._suite.problem_file(task) for task in (7, 2)]
    assert some.spec.num_initial_states == (50, 50)


def test_observations_are_those_of_liberos_own_pipeline(seeing, monkeypatch):
    """Pictures and state are equal to the bit, both after a reset and after steps."""
    from libero.libero.envs import OffScreenRenderEnv
    from robosuite.renderers.context.osmesa_context import OSMesaGLContext
    from robosuite.utils import binding_utils

    monkeypatch.setattr(binding_utils, "GLContext", OSMesaGLContext, raising=False)
    height, width = SIZE
    plain = OffScreenRenderEnv(bddl_file_name=seeing._suite.problem_file(0), camera_heights=height, camera_widths=width)
    plain.seed(53)
    plain.reset()
    seen = plain.set_init_state(seeing._suite.initial_states(0)[3])  # of 50
    for action in [OPEN] * 10:
        seen = plain.step(action.astype(np.float64))[0]
    compared = [seen]
    for action in ACTIONS:
        seen = plain.step(action.astype(np.float64))[0]
    compared.append(seen)
    state = plain.get_sim_state()
    turn_on_stove(plain.env)
    burning = [plain.step(OPEN.astype(np.float64))[0] for _ in range(2)]
    plain.close()

    initial, mine, my_state = play(seeing, 0, 53)
    np.testing.assert_array_equal(my_state, state)
    assert len(initial) > state.nbytes
    for seen, images, proprioception in zip(compared, mine[::2], mine[1::2], strict=True):
        np.testing.assert_array_equal(images[0], seen["agentview_image"][::-1, ::-1])
        np.testing.assert_array_equal(images[1], seen["robot0_eye_in_hand_image"][::-1, ::-1])
        np.testing.assert_array_equal(proprioception[:3], seen["robot0_eef_pos"].astype(np.float32))
        np.testing.assert_array_equal(proprioception[6:], seen["robot0_gripper_qpos"].astype(np.float32))
    assert np.abs(mine[0].astype(int) - mine[2]).mean() > 0.1  # the robot moved
    turn_on_stove(seeing._simulator)
    for seen in burning:  # the flame, which is part of the model and not of the state, shows in the second
        seeing.step(OPEN)
        np.testing.assert_array_equal(look(seeing)[0][0], seen["agentview_image"][::-1, ::-1])
    assert np.abs(burning[0]["agentview_image"].astype(int) - burning[1]["agentview_image"]).max() > 20


def test_same_seed_same_episode_on_every_instance_and_after_others(seeing):
    first = play(seeing, 0, 3)
    context = seeing._renderer._context
    assert_same(play(seeing, 0, 3), first)
    assert seeing._renderer._context is context  # meshes and textures were not sent to OpenGL again
    other = LiberoEnv(image_size=SIZE, render_backend="osmesa")
    play(other, 1, 0)  # another task and OpenGL context in between
    assert_same(play(other, 0, 3), first)
    for mine, theirs in zip(look(seeing), look(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    other.close()
    np.testing.assert_array_equal(look(seeing)[0], first[1][2])


@pytest.mark.parametrize("task", [0, 4])  # in 4 a drawer is open, for which LIBERO draws a random number
def test_every_way_of_beginning_an_episode_gives_the_same(seeing, task):
    """LIBERO's own loading and compiling, our reset after another episode, and the snapshot, each with what follows."""
    from libero.libero.envs.env_wrapper import ControlEnv

    actions = np.random.default_rng(1).uniform(-1, 1, (40, 7))

    def follow(env):
        first = look(env)
        rewards = [env.step(action).reward for action in actions]
        return [*first, *look(env), env._simulator.sim.get_state().flatten(), rewards, np.random.get_state()[1]]  # noqa: NPY002

    seeing.reset(task, 8)
    follow(seeing)
    initial = seeing.reset(task, 7)
    fresh = follow(seeing)
    for _ in range(2):
        assert seeing.reset(task, 7) == initial  # from the snapshot, the second time after a snapshot's episode
        for mine, theirs in zip(follow(seeing), fresh, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    other = LiberoEnv(image_size=SIZE, render_backend="osmesa")
    assert other.reset(task, 7) == initial
    for mine, theirs in zip(follow(other), fresh, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    other.close()

    own = ControlEnv(
        bddl_file_name=seeing._suite.problem_file(task), use_camera_obs=False, has_offscreen_renderer=False
    )
    own.seed(7)
    own.reset()
    own.set_init_state(seeing._suite.initial_states(task)[7])
    for action in [OPEN.astype(np.float64)] * 10 + list(actions):
        own.step(action)
    np.testing.assert_array_equal(own.get_sim_state(), fresh[4])
    own.close()


def test_light_meshes_change_the_picture_little_and_the_physics_not_at_all(seeing, monkeypatch, tmp_path):
    monkeypatch.setenv("DVLA_CACHE_DIR", str(tmp_path))
    light = LiberoEnv(image_size=SIZE, render_backend="osmesa", meshes="light")
    mine, exact = play(light, 0, 2), play(seeing, 0, 2)
    assert mine[0] == exact[0]
    np.testing.assert_array_equal(mine[2], exact[2])
    for image, full in zip(mine[1][::2], exact[1][::2], strict=True):
        difference = np.abs(image.astype(int) - full).mean(axis=(1, 2, 3))
        assert (difference < 2.5).all()
        assert (difference > 0.05).any()  # the light meshes were used

    def faces(env):
        model = env._simulator.sim.model
        return sum(model.mesh_facenum[model.geom_dataid[(model.geom_group == 1) & (model.geom_type == 7)]])

    assert faces(light) < faces(seeing) / 6
    light.close()


def test_what_is_out_of_view_is_left_out_and_not_missed(seeing, monkeypatch):
    seeing.reset(0, 2)
    lean = look(seeing)[0]
    left_out = [~seeing._renderer._in_view(camera) for camera in range(seeing._renderer._model.ncam)]
    assert max(part.sum() for part in left_out) > 3
    monkeypatch.setattr(libero_setup.Renderer, "_in_view", lambda self, _: np.ones(self._model.ngeom, bool))
    np.testing.assert_array_equal(look(seeing)[0], lean)


def test_steps_do_not_draw(seeing, monkeypatch):
    import mujoco

    drawn = []
    render = mujoco.mjr_render
    monkeypatch.setattr(mujoco, "mjr_render", lambda *args: drawn.append(1) or render(*args))
    seeing.reset(0, 1)
    seeing.step(ACTIONS[0])
    assert drawn == []
    look(seeing)
    assert len(drawn) == 2


def test_faster_pictures_look_nearly_the_same(seeing):
    fast = LiberoEnv(image_size=SIZE, reflections=False, msaa=False, render_backend="osmesa")
    assert fast.reset(0, 1) == seeing.reset(0, 1)
    images, exact = look(fast)[0].astype(int), look(seeing)[0]
    fast.close()
    assert 0.1 < np.abs(images - exact).mean() < 5


def test_a_simulator_is_kept_until_the_task_changes(blind, monkeypatch):
    built = []
    create = libero_setup.create_simulator
    monkeypatch.setattr(libero, "create_simulator", lambda file, light: built.append(file) or create(file, light))
    states = [blind.reset(task, seed) for task, seed in [(4, 0), (4, 1), (4, 50), (5, 0)]]
    assert [("in_the_top_drawer" in file, "on_the_ramekin" in file) for file in built] == [(True, False), (False, True)]
    assert len(set(states)) == 4  # initial state 50 is that of seed 0 with its furniture elsewhere
    rows = [np.frombuffer(state) for state in states[:3]]
    np.testing.assert_allclose(rows[0][10:17], rows[2][10:17], atol=0.05)


def test_success_gives_the_reward_and_leaves_the_end_to_the_run(blind):
    blind.reset(0, 0)
    assert blind.step(OPEN).reward == 0.0
    objects, data = blind._simulator.objects_dict, blind._simulator.sim.data
    pose = data.get_joint_qpos(objects["plate_1"].joints[0]).copy()
    pose[2] += 0.02
    data.set_joint_qpos(objects["akita_black_bowl_1"].joints[0], pose)
    for _ in range(5):
        step = blind.step(OPEN)
    assert (step.reward, step.success, step.terminated) == (1.0, True, False)


def test_minus_one_opens_the_gripper(blind):
    blind.reset(0, 0)
    widths = []
    for action in (CLOSE, OPEN):
        for _ in range(15):
            blind.step(action)
        state = look(blind)[1]
        widths.append(state[6] - state[7])
    assert widths[1] > widths[0] + 0.03
    assert np.linalg.norm(state[3:6]) == pytest.approx(math.pi, abs=0.2)  # it points down
    assert np.isfinite(state).all()


def test_bad_input_while_running(blind, monkeypatch):
    blind.reset(0, 0)
    with pytest.raises(SimulationError, match="not finite"):
        blind.step(np.full(7, np.nan, np.float32))
    with pytest.raises(IndexError, match="10 tasks"):
        blind.reset(10, 0)
    monkeypatch.setattr(blind, "_initial_states", blind._initial_states[:, :-1])
    with pytest.raises(EnvironmentSetupError, match=r"91 numbers but the model under MuJoCo .* has 92"):
        blind.reset(0, 1)
    states = blind._suite.initial_states(0)
    for change, message in ((np.nan, "not finite"), (2.0, "not of unit length")):
        monkeypatch.setattr(blind, "_initial_states", states * change)
        with pytest.raises(EnvironmentSetupError, match=message):
            blind.reset(0, 1)


def test_a_diverged_simulation_is_reported(blind, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    blind.reset(0, 0)
    blind._simulator.sim.data.qvel[:] = 1e12
    with pytest.raises(SimulationError, match="diverged"):
        blind.step(OPEN)
    assert not list(tmp_path.iterdir())  # nor does MuJoCo leave its log file in the working folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "libero_spatail"}, "no suite 'libero_spatail': choose one of libero_spatial, libero_object"),
        ({"cameras": ("agentview", "front")}, "no camera 'front': choose from agentview, wrist"),
        ({"image_size": (0, 64)}, "must lie between 1 and"),
        ({"image_size": (64, 100_000)}, "must lie between 1 and"),
        ({"reward_mode": "dense"}, "LIBERO has no dense reward"),
        ({"meshes": "heavy"}, "meshes='heavy' must be one of: light, full"),
        ({"tasks": (10,)}, r"tasks=\[10\]: choose different ones of the 10 of libero_spatial, counted from 0"),
        ({"tasks": (1, 1)}, r"tasks=\[1, 1\]: choose different ones"),
        ({"tasks": ()}, r"tasks=\[\]: choose different ones"),
        ({"tasks": ("soup",)}, r"tasks=\['soup'\]: choose different ones"),
        ({"settle_steps": -1}, "must not be negative"),
        ({"render_backend": "gpu"}, "must be one of: auto, osmesa, egl"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(EnvironmentSetupError, match=message):
        LiberoEnv(**options)


def test_backend_follows_the_request_then_mujoco_gl(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert libero_setup.choose_backend("auto") == "egl"
    assert libero_setup.choose_backend("osmesa") == "osmesa"
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    assert libero_setup.choose_backend("auto") in {"osmesa", "egl"}


@pytest.mark.parametrize(
    ("quaternion", "expected"),
    [
        ([0, 0, 0, 1], [0, 0, 0]),
        ([0, 0, 0, -1.0000001], [0, 0, 0]),
        ([1, 0, 0, 0], [math.pi, 0, 0]),
        ([0, 0, math.sin(0.25), math.cos(0.25)], [0, 0, 0.5]),
    ],
)
def test_axis_angle(quaternion, expected):
    np.testing.assert_allclose(_axis_angle(np.array(quaternion, float)), expected, atol=1e-12)


def run(code, tmp_path, **variables):
    """Run code in a new process with an empty home folder."""
    home = tmp_path / "home"
    home.mkdir()
    environment = {key: value for key, value in os.environ.items() if key not in {"MUJOCO_GL", "PYOPENGL_PLATFORM"}}
    environment |= {"HOME": str(home), "OMP_NUM_THREADS": "1", **variables}
    result = subprocess.run(
        [sys.executable, "-c", "from dvla.envs.libero import LiberoEnv\n" + code],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert [*home.rglob("*"), *tmp_path.iterdir()] == [home]
    return result


def test_without_cameras_no_opengl_no_output_no_files(tmp_path):
    code = """
import sys
env = LiberoEnv(cameras=())
env.reset(0, 0)
env.close()
assert not any(name.startswith("OpenGL") for name in sys.modules)
"""
    result = run(code, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_no_opengl_is_one_clear_line(tmp_path):
    result = run("LiberoEnv(render_backend='osmesa')", tmp_path, PYOPENGL_PLATFORM="egl")
    assert result.stderr.splitlines()[-1].startswith(
        "dvla.envs.errors.EnvironmentSetupError: LIBERO cannot draw with osmesa (Cannot use OSMesa"
    )
