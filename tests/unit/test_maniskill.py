"""ManiSkill as an environment: reproducible resets, steps without rendering, light meshes, helpful errors."""

import builtins
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from dvla.envs import light_meshes
from dvla.envs.errors import EnvironmentSetupError, SimulationError
from dvla.envs.light_meshes import light_mesh
from dvla.envs.maniskill import ManiSkillEnv
from dvla.envs.maniskill_batch import ManiSkillBatchEnv, action_ranges
from dvla.envs.maniskill_setup import SimulatorOptions, buffer_sizes, equal_scenes, explained, limits_in_batches
from dvla.envs.protocol import Environment


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One cache folder of light meshes for this file."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("DVLA_CACHE_DIR")
    os.environ["DVLA_CACHE_DIR"] = str(folder)
    yield folder
    os.environ.pop("DVLA_CACHE_DIR")
    if before is not None:
        os.environ["DVLA_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def nobody_to_ask(monkeypatch):
    def ask(*_):
        raise AssertionError("a question was asked on standard input")

    monkeypatch.setattr(builtins, "input", ask)


@pytest.fixture
def make():
    environments = []

    def build(task="PushCube-v1", **options):
        environments.append(ManiSkillEnv(task, **options))
        return environments[-1]

    yield build
    for env in environments:
        env.close()


def look(env):
    images = np.zeros((len(env.spec.cameras), *env.spec.image_size, 3), np.uint8)
    state = np.full(env.spec.state_dim, np.nan, np.float32)
    env.observe(images, state)
    return images, state


def part(env, name):
    """The named part of the present state vector."""
    start = 0
    for key, length in env.state_layout:
        if key == name:
            return look(env)[1][start : start + length]
        start += length
    raise KeyError(name)


def simulator_state(env):
    return env._batch._simulator.get_state()[0].numpy().copy()


def play(env, seed, steps=12):
    """Reset and take some random actions; everything that can be compared afterwards."""
    initial = env.reset(0, seed)
    actions = np.random.default_rng(1).uniform(-1, 1, (steps, env.spec.action_dim)).astype(np.float32)
    rewards = [env.step(action).reward for action in actions]
    return initial, rewards, simulator_state(env).tobytes(), look(env)


def difference(one, other):
    return np.abs(one.astype(int) - other.astype(int)).mean()


def test_importing_it_is_cheap():
    code = "import sys, dvla.envs.maniskill; print({'torch', 'mani_skill', 'sapien'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"


def test_spec(make):
    env = make(image_size=(48, 64))
    assert isinstance(env, Environment)
    assert env.spec.name == "maniskill/PushCube-v1"
    assert env.spec.image_size == (48, 64)
    assert (env.spec.action_dim, env.spec.state_dim, env.spec.max_episode_steps) == (4, 16, 50)
    assert "cube" in env.spec.instructions[0]
    env.reset(0, 0)
    images, state = look(env)
    assert images.shape == (1, 48, 64, 3)
    assert images.std() > 20
    assert np.isfinite(state).all()
    with pytest.raises(IndexError):
        env.reset(1, 0)


def test_a_seed_settles_the_episode_on_every_instance(make):
    used, fresh = make(), make()
    play(used, 99)
    one, other = play(used, 7), play(fresh, 7)
    assert one[:3] == other[:3]
    assert np.array_equal(one[3][0], other[3][0])
    assert np.array_equal(one[3][1], other[3][1])
    assert used.reset(0, 8) != one[0]
    assert used.reset(0, 2**40 + 7) == used.reset(0, 7 + 2**32)


def test_environments_of_one_process_do_not_disturb_each_other(make):
    alone = play(make(), 3)
    pair = make(), make()
    for env, seed in zip(pair, (3, 4), strict=True):
        env.reset(0, seed)
    for action in np.random.default_rng(1).uniform(-1, 1, (12, 4)).astype(np.float32):
        for env in pair:
            env.step(action)
    assert simulator_state(pair[0]).tobytes() == alone[2]
    assert np.array_equal(look(pair[0])[0], alone[3][0])


def test_another_process_starts_alike(make):
    code = (
        "import hashlib, dvla.envs.maniskill as m; env = m.ManiSkillEnv(cameras=()); "
        "print(hashlib.sha256(env.reset(0, 11)).hexdigest())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split()[-1] == hashlib.sha256(make().reset(0, 11)).hexdigest()


def test_a_chunk_renders_once_and_only_the_chosen_camera(make, monkeypatch):
    from mani_skill.sensors.camera import Camera

    env = make("StackCube-v1", cameras=("hand_camera",))
    rendered = []
    capture = Camera.capture
    monkeypatch.setattr(Camera, "capture", lambda self: (rendered.append(self.config.uid), capture(self)))
    env.reset(0, 0)
    for _ in range(8):
        env.step(np.zeros(4, np.float32))
    assert rendered == []
    look(env)
    assert rendered == ["hand_camera"]


def test_tasks_that_always_observe_pictures_do_not_render_while_stepping_either(make, monkeypatch):
    from mani_skill.sensors.camera import Camera
    from mani_skill.utils.registration import REGISTERED_ENVS

    task = "SO100GraspCube-v1"  # of the kind that overlays photographs; most of that kind know this mode only
    monkeypatch.setattr(REGISTERED_ENVS[task].cls, "SUPPORTED_OBS_MODES", ["rgb+segmentation"])
    with pytest.raises(EnvironmentSetupError, match="no privileged state"):
        make(task, control_mode="pd_joint_delta_pos", privileged_state=True)
    env = make(task, control_mode="pd_joint_delta_pos")
    capture, rendered = Camera.capture, []
    monkeypatch.setattr(Camera, "capture", lambda self: (rendered.append(1), capture(self)))
    play(env, 0)
    assert len(rendered) == 1
    assert look(env)[0].std() > 20


def test_the_picture_follows_the_simulation(make):
    env = make()
    env.reset(0, 0)
    before, state = look(env)
    for _ in range(6):
        env.step(np.array([0, 1, 0, -1], np.float32))
    after, moved = look(env)
    assert difference(before, after) > 1
    assert moved[10] - state[10] > 0.1  # the tool's y: qpos has 9 elements, then x, y, z


def test_without_cameras_nothing_is_rendered_and_physics_is_the_same(make):
    blind, seeing = make(cameras=()), make()
    one, other = play(blind, 5), play(seeing, 5)
    assert one[:3] == other[:3]
    assert np.array_equal(one[3][1], other[3][1])
    assert not blind._batch._simulator.scene.can_render()
    assert blind.spec.cameras == ()
    assert blind.spec.image_size == (0, 0)


@pytest.mark.parametrize("size", [64, 128])
def test_light_meshes_change_the_picture_little_and_the_physics_not_at_all(make, size):
    light = play(make(image_size=(size, size)), 2)
    full = play(make(image_size=(size, size), meshes="full"), 2)
    assert light[:3] == full[:3]
    mean = difference(light[3][0], full[3][0])
    assert 0 < mean <= 2  # 0: the light meshes were not used
    assert min(light[3][0].std(), full[3][0].std()) > 20


def test_the_shortcut_past_the_reflectance_table_does_not_show(make, monkeypatch):
    quick = play(make(), 6)[3][0]
    monkeypatch.setattr("dvla.envs.maniskill_setup.prepare_cameras", lambda *_: None)
    assert np.array_equal(quick, play(make(), 6)[3][0])


def test_light_meshes_are_light_also_in_rebuilt_scenes(make):
    def triangles(env):
        bodies = env._batch._simulator.scene.sub_scenes[0].render_system.render_bodies
        return sum(
            len(mesh.triangles)
            for body in bodies
            if "panda" in body.entity.name
            for shape in body.render_shapes
            for mesh in shape.parts
        )

    env = make("PegInsertionSide-v1")  # builds its scene anew at every reset
    env.reset(0, 0)
    assert 3_000 < triangles(env) < 20_000
    assert list(env._batch._simulator.scene.sensors) == ["base_camera"]
    assert triangles(make(meshes="full")) > 100_000


def test_a_light_mesh_keeps_materials_and_extent(cache):
    import mani_skill
    import trimesh

    source = Path(mani_skill.PACKAGE_ASSET_DIR) / "robots/panda/franka_description/meshes/visual/link6.glb"
    target = light_mesh(source)
    assert target.parent == cache / "meshes"
    before, after = (trimesh.load_scene(path, process=False) for path in (source, target))

    def faces(scene):
        return sum(len(mesh.faces) for mesh in scene.geometry.values())

    def colours(scene):
        return sorted(tuple(mesh.visual.material.baseColorFactor) for mesh in scene.geometry.values())

    assert faces(after) < 0.1 * faces(before)
    assert colours(after) == colours(before)
    assert np.abs(after.bounds - before.bounds).max() < 0.003
    assert light_mesh(source.with_name("finger.glb")) == source.with_name("finger.glb")  # light already


def test_textured_meshes_are_left_alone():
    import mani_skill

    table = Path(mani_skill.PACKAGE_DIR) / "utils/scene_builder/table/assets/table.glb"
    assert light_mesh(table) == table


def test_several_processes_make_a_light_mesh_once(tmp_path):
    import mani_skill
    import trimesh

    source = Path(mani_skill.PACKAGE_ASSET_DIR) / "robots/panda/franka_description/meshes/visual/hand.glb"
    code = (
        "import sys, pathlib, dvla.envs.light_meshes as m; made = m._make\n"
        "def make(*args): print('made'); made(*args)\n"
        f"m._make = make; print(m.light_mesh(pathlib.Path({str(source)!r})))"
    )
    environment = os.environ | {"DVLA_CACHE_DIR": str(tmp_path)}
    jobs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    lines = [job.communicate()[0].split() for job in jobs]
    assert sorted(len(words) for words in lines) == [1, 1, 2]
    assert len({words[-1] for words in lines}) == 1
    assert len(trimesh.load_scene(lines[0][-1]).geometry) == 2
    assert not list(tmp_path.rglob("*.partial"))


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, monkeypatch, make):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("DVLA_CACHE_DIR", str(blocked))
    with pytest.raises(EnvironmentSetupError, match="DVLA_CACHE_DIR"):
        make()
    make(cameras=())  # needs no meshes


def test_the_cache_folder_is_where_users_expect_it(monkeypatch):
    monkeypatch.delenv("DVLA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert light_meshes.cache_folder() == Path("/somewhere/dvla/meshes")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert light_meshes.cache_folder() == Path.home() / ".cache/dvla/meshes"


def test_hidden_goals_are_in_the_state(make):
    env = make("PickCube-v1")
    env.reset(0, 1)
    assert np.array_equal(part(env, "goal_pos"), env._batch._simulator.goal_site.pose.p[0].numpy())
    goal = part(env, "goal_pos")
    env.reset(0, 2)
    assert not np.array_equal(goal, part(env, "goal_pos"))
    assert not any("obj" in name or "cube" in name for name, _ in env.state_layout)
    both = make("TwoRobotPickCube-v1", cameras=())  # does not tell its goal by itself
    both.reset(0, 1)
    assert np.array_equal(part(both, "goal_site_pos"), both._batch._simulator.goal_site.pose.p[0].numpy())


def test_the_privileged_state_knows_the_cube_and_changes_nothing_else(make):
    env, plain = make(privileged_state=True), make()
    one, other = play(env, 4), play(plain, 4)
    assert one[:3] == other[:3]
    assert np.array_equal(one[3][0], other[3][0])
    cube = env._batch._simulator.obj.pose.p[0].numpy()
    state = look(env)[1]
    assert env.spec.state_dim > plain.spec.state_dim
    assert any(np.array_equal(state[i : i + 3], cube) for i in range(state.size - 2))


def test_actions_are_scaled_to_the_controller(make):
    env = make(cameras=(), control_mode="pd_joint_pos")
    box = env._batch._simulator.single_action_space
    assert np.allclose(env._batch._to_controllers(torch.full((1, 8), -1.0)), box.low)
    assert np.allclose(env._batch._to_controllers(torch.full((1, 8), 3.0)), box.high)  # clipped
    same = torch.linspace(-1, 1, 4)[None]
    assert torch.equal(make(cameras=())._batch._to_controllers(same), same)


def test_controllers_without_limits_are_refused():
    box = Box(-np.inf, np.inf, (3,))
    with pytest.raises(EnvironmentSetupError, match="no limits"):
        action_ranges("Some-v1", "pd_free", box)


def test_two_arms_share_one_action(make):
    env = make("TwoRobotStackCube-v1", cameras=())
    assert env.spec.action_dim == 8
    env.reset(0, 0)
    before = simulator_state(env)
    env.step(np.array([0, 0, 0, 0, 1, 0, 0, 0], np.float32))
    names = [name for name, _ in env.state_layout]
    assert "panda_wristcam-1.qpos" in names
    assert not np.array_equal(simulator_state(env), before)


def test_rewards_and_success(make):
    sparse, dense = make(cameras=()), make(cameras=(), reward_mode="dense")
    for env in (sparse, dense):
        env.reset(0, 0)
        goal = env._batch._simulator.goal_region.pose.p.clone()
        goal[:, 2] = 0.02
        env._batch._simulator.obj.set_pose(type(env._batch._simulator.obj.pose).create_from_pq(goal))
    still = np.zeros(4, np.float32)
    for env in (sparse, dense):
        step = env.step(still)
        assert step.success
        assert step.reward == 1.0
        assert not step.terminated  # success ends an episode only if the run says so
        assert (type(step.reward), type(step.success)) == (float, bool)
    sparse.reset(0, 0)
    dense.reset(0, 0)
    assert sparse.step(still).reward == 0.0
    assert 0 < dense.step(still).reward < 0.5


def test_failure_ends_the_episode(make):
    env = make("MS-CartpoleBalance-v1", cameras=(), control_mode="pd_joint_delta_pos", reward_mode="dense")
    env.reset(0, 0)
    assert any(env.step(np.ones(1, np.float32)).terminated for _ in range(200))


def test_a_diverged_simulation_is_an_error(make, monkeypatch):
    env = make(cameras=(), reward_mode="dense")
    env.reset(0, 0)
    with pytest.raises(SimulationError, match="action"):
        env.step(np.array([np.nan, 0, 0, 0], np.float32))
    monkeypatch.setattr(env._batch._simulator, "compute_normalized_dense_reward", lambda **_: torch.tensor([torch.nan]))
    with pytest.raises(SimulationError, match="reward"):
        env.step(np.zeros(4, np.float32))
    monkeypatch.setattr(env._batch, "_state_parts", lambda: [("qpos", torch.full((1, 16), torch.inf))])
    with pytest.raises(SimulationError, match="state is not finite"):
        look(env)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"task": "PushCub-v1"}, "PushCube-v1"),
        ({"control_mode": "pd_magic"}, "pd_ee_delta_pos, pd_ee_delta_pose"),
        ({"task": "PickCubeSO100-v1"}, "pd_joint_delta_pos"),
        ({"cameras": ("wrist",)}, "it has: base_camera"),
        ({"task": "PlugCharger-v1", "reward_mode": "dense"}, "none, sparse"),
        ({"task": "MS-AntWalk-v1", "control_mode": "pd_joint_delta_pos"}, "no sparse reward"),
        ({"reward_mode": "shaped"}, "sparse, dense"),
        ({"meshes": "tiny"}, "light, full"),
        ({"task": "Empty-v1"}, "no success"),
        ({"task": "PutOnPlateInScene25Main-v3"}, "not in ManiSkill but in RLinf.*env.options.task_module"),
        ({"task_module": "no_such_module"}, "task_module='no_such_module' cannot be imported.*PYTHONPATH"),
        ({"cameras": ("hand_camera",)}, "no camera hand_camera .*hand_camera needs env.options.robot=panda_wristcam"),
        ({"robot": "panda_wristcan"}, "no robot 'panda_wristcan': did you mean panda_wristcam"),
        (
            {"robot": "allegro_hand_left", "control_mode": "pd_joint_pos"},
            "PushCube-v1 does not run with robot=allegro_hand_left",
        ),
        ({"cameras": ("base_camera",), "image_size": (0, 64)}, r"image_size=\[0, 64\].*between 1 and 4096"),
        ({"control_freq": 30}, "sim_freq must be a multiple of control_freq"),
        ({"sim_freq": 0}, "sim_freq=0 must be at least 1 Hz"),
        ({"sim_backend": "tpu"}, "sim_backend='tpu' must be one of: cpu, gpu"),
        ({"sim_backend": "gpu", "render_backend": "cpu"}, "render_backend='cpu' must be one of: gpu"),
    ],
)
def test_what_cannot_be_set_up_says_why(make, options, expected):
    with pytest.raises(EnvironmentSetupError, match=expected) as error:
        make(**{"cameras": ()} | options)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_simulation_on_a_gpu_that_is_not_there_is_refused(make):
    with pytest.raises(EnvironmentSetupError, match=r"needs an NVIDIA GPU.*sim_backend=cpu"):
        make(sim_backend="gpu")
    with pytest.raises(EnvironmentSetupError, match=r"finds no Vulkan device.*render_backend=cpu"):
        make(render_backend="gpu")


def test_a_missing_physx_library_and_a_wrong_buffer_are_named(make, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(EnvironmentSetupError, match=r"libPhysXGpu_64.so.*linux-so.zip.*sapien-sim/physx-precompiled"):
        make(sim_backend="gpu")
    library = tmp_path / ".sapien/physx/105.1-physx-5.3.1.patch0/libPhysXGpu_64.so"
    library.parent.mkdir(parents=True)
    library.touch()
    with pytest.raises(EnvironmentSetupError, match=r"gpu_memory has no 'contacts': choose from .*max_rigid_contact"):
        make(sim_backend="gpu", gpu_memory={"contacts": 1})


def buffers_of(task, num_envs):
    import mani_skill.envs  # noqa: F401 - registers the tasks
    from mani_skill.utils.registration import REGISTERED_ENVS

    return buffer_sizes(REGISTERED_ENVS[task].cls, num_envs)


def test_physx_s_buffers_grow_with_the_environments_and_are_never_below_the_task_s_own():
    own = buffers_of("PushCube-v1", 1)
    assert own == buffers_of("PushCube-v1", 1024)
    assert (own["max_rigid_contact_count"], own["heap_capacity"]) == (2**19, 2**26)
    many = buffers_of("PushCube-v1", 4000)
    assert (many["max_rigid_contact_count"], many["max_rigid_patch_count"]) == (2**21, 2**20)
    assert (many["heap_capacity"], many["collision_stack_size"]) == (2**28, 2**24)
    assert many["found_lost_pairs_capacity"] == own["found_lost_pairs_capacity"] == 2**25


def test_tasks_that_count_their_contacts_themselves_are_left_to_it():
    task = "RotateSingleObjectInHandLevel0-v1"
    assert buffers_of(task, 64)["max_rigid_contact_count"] == 64 * 1024 * 8
    assert buffers_of(task, 4096)["max_rigid_contact_count"] == 4096 * 4096 * 8
    assert buffers_of(task, 2**15)["max_rigid_contact_count"] == 2**32 - 1


def test_a_gpu_without_memory_is_not_taken_for_one_without_a_driver():
    error = RuntimeError("vk::Device::allocateMemoryUnique: ErrorOutOfDeviceMemory")
    with pytest.raises(RuntimeError, match="ErrorOutOfDeviceMemory") as raised, explained(SimulatorOptions()):
        raise error
    assert raised.value is error


def test_one_environment_is_all_there_is_on_a_cpu():
    with pytest.raises(EnvironmentSetupError, match="simulates one environment"):
        ManiSkillEnv.batch(2, torch.device("cpu"), cameras=())


def batch_of(num_envs, agent=None):
    """The parts of a batch that need no GPU, without its simulator."""
    env = ManiSkillBatchEnv.__new__(ManiSkillBatchEnv)
    env.num_envs, env.device, env._simulator, env._initial_states = (
        num_envs,
        torch.device("cpu"),
        SimpleNamespace(agent=agent),
        {},
    )
    return env


def test_resetting_one_of_a_batch_leaves_the_others_targets_alone():
    class Agent:
        def get_controller_state(self):
            return {"arm": {"target_pose": torch.zeros(3, 7)}, "hand": {}}

        def set_controller_state(self, state):
            self.state = state

    env = batch_of(3, Agent())
    env._restore_targets({"arm": {"target_pose": torch.ones(3, 7)}, "hand": {}}, besides=1)
    assert env._simulator.agent.state["arm"]["target_pose"][:, 0].tolist() == [1, 0, 1]


def test_the_rounding_of_places_makes_no_other_initial_state():
    env = batch_of(2)
    first = np.ones(3, np.float32)
    assert env._canonical(5, first) is first
    assert env._canonical(5, first + 1e-6) is first
    assert env._canonical(5, first + 1e-3) is not first
    assert env._canonical(6, first + 1e-6) is not first
    for seed in range(10_000):
        env._canonical(seed, first)
    assert len(env._initial_states) < 5_000


@pytest.mark.parametrize(
    ("task", "words"),
    [("PushCube-v1", []), ("PegInsertionSide-v1", ["same ones"]), ("PutCarrotOnPlateInScene-v1", ["others move on"])],
)
def test_what_is_different_in_a_batch_is_said(task, words):
    import mani_skill.envs  # noqa: F401 - registers the tasks
    from mani_skill.utils.registration import REGISTERED_ENVS

    limits = limits_in_batches(REGISTERED_ENVS[task].cls)
    assert len(limits) == len(words)
    assert all(word in limit for word, limit in zip(words, limits, strict=True))


def test_all_environments_of_a_batch_are_built_from_one_seed():
    from mani_skill.envs.sapien_env import BaseEnv

    env = SimpleNamespace(num_envs=3, _batched_rng_backend="numpy:random_state", _enhanced_determinism=False)
    with equal_scenes():
        BaseEnv._set_episode_rng(env, [2022, 2023, 2024], torch.arange(3))
    assert len(set(env._batched_episode_rng.uniform(0, 1).tolist())) == 1
    BaseEnv._set_episode_rng(env, [2022, 2023, 2024], torch.arange(3))
    assert len(set(env._batched_episode_rng.uniform(0, 1).tolist())) == 3


@pytest.mark.parametrize("task", ["PushCube-v1", "PickCube-v1", "StackCube-v1"])
def test_the_camera_in_the_hand(make, task):
    env = make(task, cameras=("base_camera", "hand_camera"), robot="panda_wristcam")
    env.reset(0, 0)
    before = look(env)[0]
    for _ in range(6):
        env.step(np.array([0, 0, -1, 1], np.float32))
    after = look(env)[0]
    assert min(picture.std() for picture in after) > 15
    assert difference(before[1], after[1]) > difference(before[0], after[0]) > 0.5  # the hand sees its own motion more
    assert difference(after[0], after[1]) > 10


def test_frequencies(make):
    usual, fine = make(cameras=()), make(cameras=(), sim_freq=240, control_freq=10)
    assert (usual._batch._simulator.sim_freq, usual._batch._simulator.control_freq) == (100, 20)
    assert (fine._batch._simulator.sim_freq, fine._batch._simulator.control_freq) == (240, 10)


def test_a_task_of_the_users_own(make, tmp_path, monkeypatch):
    (tmp_path / "own_tasks.py").write_text(
        "from mani_skill.envs.tasks import PushCubeEnv\nfrom mani_skill.utils.registration import register_env\n"
        "@register_env('OwnPush-v1', max_episode_steps=30, override=True)\nclass OwnPush(PushCubeEnv): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = {"task": "OwnPush-v1", "task_module": "own_tasks", "cameras": ()}
    with pytest.raises(EnvironmentSetupError, match=r"no instruction for OwnPush-v1.*env.options.instruction"):
        make(**options)
    env = make(**options, instruction="push it")
    assert (env.spec.max_episode_steps, env.spec.instructions) == (30, ("push it",))
    assert env.reset(0, 3) == make(cameras=()).reset(0, 3)


@pytest.mark.parametrize(
    ("task", "asset"),
    [
        ("PutCarrotOnPlateInScene-v1", "bridge_v2_real2sim"),
        ("PickSingleYCB-v1", "ycb"),
        ("OpenCabinetDrawer-v1", "partnet_mobility/"),
        ("OpenCabinetDoor-v1", "partnet_mobility/"),  # does not list them
    ],
)
def test_assets_that_are_not_here_are_named_with_their_folder(make, monkeypatch, task, asset):
    from mani_skill.utils import assets

    monkeypatch.setattr(assets, "is_data_source_downloaded", lambda _: False)
    with pytest.raises(EnvironmentSetupError, match=rf"needs the ManiSkill asset {asset}.*in /.*MS_ASSET_DIR") as error:
        make(task)
    assert "\n" not in str(error.value)


def test_missing_assets_are_named_and_not_downloaded(make, monkeypatch, tmp_path):
    from mani_skill.agents import REGISTERED_AGENTS
    from mani_skill.utils.assets import DATA_SOURCES

    monkeypatch.setenv("MS_SKIP_ASSET_DOWNLOAD_PROMPT", "1")  # means "download without asking" to ManiSkill
    for source in ("ycb", "unitree_h1"):
        monkeypatch.setattr(DATA_SOURCES[source], "output_dir", tmp_path)
    robot = REGISTERED_AGENTS["unitree_h1_simplified"].agent_cls
    monkeypatch.setattr(robot, "urdf_path", str(tmp_path / "h1.urdf"))
    for options, expected in (
        ({"task": "PickSingleYCB-v1"}, f"asset ycb.*{tmp_path}/assets/mani_skill2_ycb.*MS_ASSET_DIR"),
        ({"task": "UnitreeH1Stand-v1", "control_mode": "pd_joint_pos"}, f"asset unitree_h1.*{tmp_path}"),
    ):
        with pytest.raises(EnvironmentSetupError, match=expected):
            make(**options)
    (tmp_path / "robots/unitree_h1").mkdir(parents=True)  # a download that was broken off
    with pytest.raises(EnvironmentSetupError, match="only in part"):
        make("UnitreeH1Stand-v1", control_mode="pd_joint_pos")


def test_a_missing_vulkan_driver_is_explained():
    code = (
        "from dvla.envs.errors import EnvironmentSetupError\nfrom dvla.envs.maniskill import ManiSkillEnv\n"
        "try: ManiSkillEnv()\nexcept EnvironmentSetupError as error: print('EXPLAINED', error)"
    )
    environment = os.environ | {"VK_ICD_FILENAMES": "/nowhere.json"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment).stdout
    assert "EXPLAINED" in out
    assert "make setup" in out
    assert "/nowhere.json" in out
