"""A checkpoint in use: the example of the documentation, and the server as a program."""

import contextlib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch.distributed import checkpoint as dcp
from websockets.sync.client import connect

from dvla.config import Config, ConfigError, EnvConfig, ModelConfig, ServeConfig, load_as, register, to_plain
from dvla.envs.reach import ReachEnv
from dvla.models.trained import trained_policy
from dvla.robot_policy import RobotPolicy
from dvla.serving.array_messages import pack, unpack
from e2e.launch import REPOSITORY

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with ``runs/reach/checkpoints/latest``."""
    root = tmp_path_factory.mktemp("root")
    config = Config(env=EnvConfig(cameras=("top",)), model=ModelConfig(preset="nano"), seed=1)
    spec = ReachEnv(cameras=("top",)).spec
    policy = trained_policy(config.model, spec=spec, seed=1, checkpoint=None)
    torch.nn.init.normal_(policy.net[-1].weight, generator=torch.Generator().manual_seed(0))  # unlike the seed's
    folder = root / "runs" / "reach" / "checkpoints" / "latest"
    dcp.save({"model": policy.state_dict()}, checkpoint_id=folder, no_dist=True)
    state = {"policy_version": 1, "config": to_plain(config), "env_spec": asdict(spec)}
    (folder / "train_state.json").write_text(json.dumps(state))
    files = {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
    }
    (folder / "COMPLETE.json").write_text(json.dumps({"files": files}))
    return root


def observation(seed):
    env = ReachEnv(cameras=("top",))
    env.reset(0, seed)
    obs = {"top": np.empty((64, 64, 3), np.uint8), "state": np.empty(4, np.float32)}
    env.observe(obs["top"][None], obs["state"])
    return obs


def test_the_example_of_the_documentation_runs(root, monkeypatch):
    example, *_ = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "serving.md").read_text(), flags=re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 10
    monkeypatch.chdir(root)
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(example, "docs/serving.md", "exec"), names)
    assert said.getvalue().count("[") >= 8
    wanted = RobotPolicy.load(root / "runs/reach/checkpoints/latest").infer(names["observation"])["actions"]
    np.testing.assert_array_equal(names["action"], wanted[-1])
    assert np.abs(wanted).max() > 0.01, "the checkpoint's weights, not the seed's, which begin near zero"


def test_the_server_gives_the_policys_actions_until_it_is_stopped(root):
    checkpoint = root / "runs" / "reach" / "checkpoints" / "latest"
    local = RobotPolicy.load(checkpoint, "cpu")
    process = subprocess.Popen(
        [sys.executable, "-m", "dvla.serve", f"checkpoint={checkpoint}", "port=0", "device=cpu"],
        cwd=root,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith(f"serving {checkpoint} at ws://127.0.0.1:"), line + process.stderr.read()
        with connect(re.search(r"ws://\S+:\d+", line)[0]) as client:
            assert unpack(client.recv()) == local.description
            for seed in range(3):
                client.send(pack(observation(seed)))
                got = unpack(client.recv())["actions"]
                np.testing.assert_array_equal(got, local.infer(observation(seed))["actions"])
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("overrides", "words"), [([], "checkpoint: .*missing"), (["checkpoint=x", "port=70000"], "port must lie between")]
)
def test_settings_that_cannot_work_are_named(overrides, words):
    register()
    with (
        initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"),
        pytest.raises(ConfigError, match=words),
    ):
        load_as(ServeConfig, compose("serve", overrides))
