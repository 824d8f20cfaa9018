"""The main job on the real things: OpenVLA-OFT from rendered pictures in ManiSkill and LIBERO."""

import json

import numpy as np
import pytest
from PIL import Image

from e2e.launch import train

pytestmark = pytest.mark.e2e


def test_openvla_oft_trains_in_maniskill_from_pictures(tmp_path):
    run = train(
        tmp_path,
        "experiment=pushcube_oft",
        "run.name=test",
        "run.eval_every=null",
        "env.reward_mode=dense",
        "env.max_episode_steps=24",
        "env.terminate_on_success=false",
        "algo.warmup_steps=0",
        "model.checkpoint=null",
        "model.freeze=[]",
        "algo.group_size=2",
        "algo.groups_per_step=4",
        "algo.num_steps=3",
        "runtime.num_envs=2",
        "runtime.verify_weights=true",
        "run.checkpoint_every=3",
    )
    assert run.code == 0, run.output
    summary = run.summary
    assert (summary["env"], summary["model"]) == ("maniskill/PushCube-v1", "openvla_oft/nano")
    assert summary["episodes"] == 24
    assert summary["logprob_gap_max"] < 1e-4
    assert all(line["rollout/return"] > 0 for line in run.metrics), "the dense reward is positive everywhere"
    first, last = (np.asarray(Image.open(run.folder / "frames" / f"step_00000{n}.png")) for n in (1, 3))
    assert first.std() > 20, "a picture of something"
    assert (first != last).any()
    steps = json.loads((run.folder / "checkpoints" / "latest" / "train_state.json").read_text())
    assert steps["policy_version"] == 3


def test_a_group_plays_one_initial_state_on_any_environment(tmp_path):
    # Members are spread over two workers; a state that differed would end the run (GroupMixupError).
    run = train(
        tmp_path,
        "env=maniskill",
        "env.cameras=[]",
        "env.task=PickCube-v1",
        "env.max_episode_steps=16",
        "env.reward_mode=dense",
        "env.terminate_on_success=false",
        "model=mlp",
        "algo.groups_per_step=2",
        "algo.num_steps=2",
        "runtime.num_envs=4",
        "runtime.num_workers=2",
        "run.name=test",
        ranks=0,
    )
    assert run.code == 0, run.output
    assert run.summary["groups"] == 4


def test_openvla_oft_trains_in_libero_from_two_cameras(tmp_path):
    run = train(
        tmp_path,
        *("env=libero_spatial", "model=openvla_oft_nano", "run.name=test", "env.max_episode_steps=16"),
        *("algo.group_size=2", "algo.groups_per_step=2", "algo.num_steps=1", "algo.filter_zero_signal=false"),
        *("runtime.num_envs=1", "runtime.verify_weights=true"),
    )
    assert run.code == 0, run.output
    assert run.summary["env"] == "libero/libero_spatial"
    assert run.summary["episodes"] == 4
    assert run.summary["logprob_gap_max"] < 1e-4
    picture = np.asarray(Image.open(run.folder / "frames" / "step_000001.png"))
    assert picture.std() > 20, "a picture of something"
