"""Recording demonstrations from the command line."""

import json
import os
import signal
import subprocess
import sys
import time

import av
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from dvla.collect import CollectConfig, demonstrator_arguments
from dvla.config import ConfigError, load_as
from dvla.entry import CONFIG_FOLDER
from dvla.envs.maniskill import ManiSkillEnv
from e2e.launch import REPOSITORY

pytestmark = pytest.mark.e2e

KEY = "observation.images.base_camera"


def start(out, *overrides):
    return subprocess.Popen(
        [sys.executable, "-m", "dvla.collect", f"out={out}", "render.meshes=light", *overrides],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process):
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, output


def lines(folder, name):
    return [json.loads(line) for line in (folder / f"meta/{name}.jsonl").read_text().splitlines()]


def check_complete(folder):
    """Every file that the notes speak of is there and fits them; the number of episodes."""
    info = json.loads((folder / "meta/info.json").read_text())
    episodes = lines(folder, "episodes")
    assert len(episodes) == len(lines(folder, "episodes_stats")) == info["total_episodes"]
    assert sum(episode["length"] for episode in episodes) == info["total_frames"]
    for number, episode in enumerate(episodes):
        table = pq.read_table(folder / f"data/chunk-000/episode_{number:06d}.parquet")
        assert table.num_rows == episode["length"]
        with av.open(str(folder / f"videos/chunk-000/{KEY}/episode_{number:06d}.mp4")) as file:
            assert sum(1 for _ in file.decode(video=0)) == episode["length"]
    assert not (folder / ".staging").exists()
    assert len(list(folder.rglob("*.parquet"))) == len(list(folder.rglob("*.mp4"))) == len(episodes)
    return len(episodes)


def wait_for_episode(process, folder):
    deadline = time.monotonic() + 100
    while not (folder / "meta/info.json").exists():
        assert time.monotonic() < deadline and process.poll() is None, finish(process)
        time.sleep(0.05)


def check_replay(folder, noise, slowest, fastest):
    """Playing the recorded actions, with the noise that was added, gives the recorded states and successes."""
    env = ManiSkillEnv(task="PushCube-v1", cameras=())
    state, images = np.empty(env.spec.state_dim, np.float32), np.empty((0, 0, 0, 3), np.uint8)
    for number, episode in enumerate(lines(folder, "episodes")):
        table = pq.read_table(folder / f"data/chunk-000/episode_{number:06d}.parquet").to_pydict()
        rng = np.random.default_rng(episode["seed"])
        pace = np.random.default_rng((episode["seed"], 1)).uniform(slowest, fastest)
        assert np.abs(np.array(table["action"])[:, :3]).max() == pytest.approx(0.6 * pace), "the expert's speed is 0.6"
        env.reset(0, episode["seed"])
        success = False
        for row, action in enumerate(np.array(table["action"], np.float32)):
            env.observe(images, state)
            np.testing.assert_array_equal(state, np.array(table["observation.state"][row], np.float32))
            executed = action.copy()
            executed[:-1] += noise * pace * rng.standard_normal(3)
            success = env.step(executed.clip(-1, 1)).success
            assert success == table["next.success"][row] == table["next.done"][row]
        assert success
    env.close()


def test_the_dataset_is_the_same_with_more_workers_and_plays_back_exactly(tmp_path):
    options = ("num_episodes=3", "action_noise=0.2")
    one, two = (tmp_path / name for name in ("a", "b"))
    for folder, workers in ((one, 1), (two, 2)):
        code, output = finish(start(folder, *options, f"num_workers={workers}"))
        assert code == 0, output
    assert "3 episodes" in output
    assert check_complete(one) == 3
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file())
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file

    info = json.loads((one / "meta/info.json").read_text())
    assert info["fps"] == 20
    assert info["robot_type"] == "panda"
    assert lines(one, "tasks")[0]["task"] == "push the blue cube onto the red and white target"
    env = ManiSkillEnv(task="PushCube-v1", cameras=())
    names = [f"{name}.{n}" for name, length in env.state_layout for n in range(length)]
    env.close()
    assert info["features"]["observation.state"]["names"] == names
    check_replay(one, 0.2, 1, 1)


def test_a_pace_slows_movements_and_noise_alike(tmp_path):
    code, output = finish(start(tmp_path / "a", "num_episodes=3", "action_noise=0.2", "pace=[0.5,0.9]"))
    assert code == 0, output
    check_replay(tmp_path / "a", 0.2, 0.5, 0.9)


def test_libero_is_recorded_as_its_policies_see_it(tmp_path):
    options = (
        "env=libero_object",
        "+env.options.tasks=[5]",
        "num_episodes=1",
        "env.image_size=[32,32]",
        "pace=[0.9,1]",
    )
    code, output = finish(start(tmp_path / "a", *options))
    assert code == 0, output
    info = json.loads((tmp_path / "a/meta/info.json").read_text())
    shapes = {name: feature["shape"] for name, feature in info["features"].items() if name.startswith(("obs", "act"))}
    assert shapes == {
        "observation.images.agentview": [32, 32, 3],
        "observation.images.wrist": [32, 32, 3],
        "observation.state": [8],
        "action": [7],
    }
    assert (info["fps"], info["total_episodes"]) == (20, 1)
    assert lines(tmp_path / "a", "tasks")[0]["task"] == "pick up the tomato sauce and place it in the basket"
    actions = np.array(pq.read_table(tmp_path / "a/data/chunk-000/episode_000000.parquet").to_pydict()["action"])
    assert actions[0, -1] == -1, "LIBERO's grippers open at -1"


def test_ctrl_c_leaves_a_complete_dataset(tmp_path):
    process = start(tmp_path / "a", "num_episodes=1000")
    wait_for_episode(process, tmp_path / "a")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes
    code, output = finish(process)
    assert code == 0, output
    assert "stopped: " in output
    assert "Traceback" not in output
    assert 1 <= check_complete(tmp_path / "a") < 1000


def test_a_dead_worker_ends_the_recording_and_leaves_a_complete_dataset(tmp_path):
    process = start(tmp_path / "a", "num_episodes=1000")
    wait_for_episode(process, tmp_path / "a")
    workers = [p for p in psutil.Process(process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
    workers[0].kill()
    code, output = finish(process)
    assert code == 1
    assert "dvla: error: a worker process died" in output
    assert "Traceback" not in output
    assert check_complete(tmp_path / "a") >= 1


def test_a_simulator_that_cannot_start_leaves_nothing(tmp_path):
    code, output = finish(start(tmp_path / "a", "env.cameras=[left]"))
    assert code == 1
    assert "dvla: error: a worker failed: PushCube-v1 has no camera left (it has: base_camera)" in output
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.task=PushT-v1"], ["no expert", "env.task=PushT-v1", "PushCube-v1, ", "StackCube-v1"]),
        (["env=reach"], ["no expert", "env.name=reach", "maniskill"]),
        (["env=libero_10"], ["no expert", "env.task=libero_10", "libero_object"]),
        (["env=libero_object"], ["env.options.tasks=[]", "libero_object", "0, 2, 3"]),
        (["env=libero_object", "+env.options.tasks=[0,2]"], ["env.options.tasks=[0, 2]", "the one task"]),
        (["env=libero_object", "+env.options.tasks=[1]"], ["env.options.tasks=[1]", "0, 2, 3"]),
        (
            ["env.options.control_mode=pd_joint_pos"],
            ["control_mode=pd_joint_pos", "pd_ee_delta_pos or pd_ee_delta_pose"],
        ),
        (["env.task=PullCubeTool-v1"], ["control_mode=pd_ee_delta_pos", "plays in pd_ee_delta_pose"]),
        (["env.cameras=[]"], ["env.cameras is empty"]),
        (["env.image_size=[63,64]"], ["env.image_size=[63, 64]", "even", "images=parquet"]),
        (["num_episodes=0"], ["num_episodes must be at least 1"]),
        (["num_workers=0"], ["num_workers"]),
        (["action_noise=-1"], ["action_noise"]),
        (["pace=[0,1]"], ["pace must be"]),
        (["pace=[0.9,0.8]"], ["pace must be"]),
        (["pace=[0.5]"], ["pace must be"]),
        (["pace=[0.1,0.2,0.3]"], ["pace must be"]),
        (["seed=-1"], ["seed"]),
    ],
    ids=lambda value: value[0] if "=" in value[0] else "",
)
def test_what_cannot_be_recorded(overrides, words):
    ConfigStore.instance().store(name="collect_config", node=CollectConfig)
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"), pytest.raises(ConfigError) as error:
        demonstrator_arguments(load_as(CollectConfig, compose("collect", ["out=x", *overrides])))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("out", ["existing", "/proc/dataset"])
def test_a_folder_that_cannot_be_used(tmp_path, out):
    (tmp_path / "existing").mkdir()
    code, output = finish(start(tmp_path / out))
    assert code == 2, output
    assert f"dvla: error: out={tmp_path / out} " in output
    assert len(output.splitlines()) == 1
