"""Behaviour cloning from the command line: what it leaves, that it goes on as if nothing had happened, and what it refuses."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from pages import Page
from recordings import episode, write_v2
from safetensors.torch import load_file

from e2e.launch import REPOSITORY, Run, finish, train, wait_for_step

pytestmark = pytest.mark.e2e

QUICK = (
    "sft.num_steps=6",
    "sft.global_batch_size=8",
    "sft.micro_batch_size=4",
    "sft.held_out_fraction=0.3",
    "run.checkpoint_every=3",
    "run.eval_every=2",
    "run.name=test",
    "runtime.torch_threads=1",
    "telemetry.tensorboard=false",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """As the built-in reach with a camera shows itself, but with random actions."""
    from dvla.envs.reach import ReachEnv

    spec = ReachEnv(
        task="reach", cameras=("top",), image_size=(64, 64), max_episode_steps=32, reward_mode="sparse"
    ).spec
    sizes = {"actions": spec.action_dim, "states": spec.state_dim, "size": (64, 64)}
    folder = tmp_path_factory.mktemp("data") / "reach"
    return write_v2(folder, [episode(seed, 6 + seed, **sizes) for seed in range(4)], task=spec.instructions[0])


def start(root, dataset, *overrides, ranks=1):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.Popen(
        [
            sys.executable,
            *launch,
            "-m",
            "dvla.sft",
            f"run.root={root}",
            f"data.paths=[{dataset}]",
            "data.cameras=[front]",
            *QUICK,
            *overrides,
        ],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def clone(root, dataset, *overrides, ranks=1) -> Run:
    return finish(start(root, dataset, *overrides, ranks=ranks), root)


def weights(run):
    return load_file(run.folder / "policy/model.safetensors")


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory, dataset):
    """A run on one rank from beginning to end."""
    run = clone(tmp_path_factory.mktemp("whole"), dataset)
    assert run.code == 0, run.output
    return run


def test_two_ranks_clone_and_reinforcement_learning_goes_on_from_it(tmp_path, dataset, whole):
    run = clone(tmp_path, dataset, "run.eval_every=null", ranks=2)
    assert run.code == 0, run.output
    assert "4 episodes, 30 steps, 1 tasks, cameras front" in run.output
    summary = run.summary
    assert (summary["exit"], summary["steps"], summary["policy_version"], summary["world_size"]) == (
        "completed",
        6,
        6,
        2,
    )
    assert summary["loss"] > 0 and summary["held_out_loss"] > 0 and summary["samples_per_s"] > 0
    statistics = json.loads((run.folder / "policy/dataset_statistics.json").read_text())
    actions = np.concatenate([episode(seed, 6 + seed, actions=2).actions for seed in range(4)])
    assert list(statistics) == ["reach"]
    assert statistics["reach"]["num_trajectories"] == 4
    assert len(statistics["reach"]["action"]["q01"]) == actions.shape[1]

    for (name, one), two in zip(weights(run).items(), weights(whole).values(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-4, msg=name)

    trained = train(
        tmp_path / "rl",
        "env=reach",
        "env.cameras=[top]",
        "model=openvla_oft_nano",
        f"model.checkpoint={run.folder / 'policy'}",
        "algo.group_size=2",
        "algo.groups_per_step=2",
        "algo.num_steps=1",
        "algo.filter_zero_signal=false",
        "runtime.num_envs=2",
        "telemetry.tensorboard=false",
        "run.name=test",
        ranks=1,
    )
    assert trained.code == 0, trained.output
    assert trained.summary["policy_version"] == 1
    wrong = train(
        tmp_path / "rl",
        "env=reach",
        "env.cameras=[top]",
        "model=openvla_oft_nano",
        f"model.checkpoint={run.folder / 'policy'}",
        "model.unnorm_key=bridge",
        "run.name=wrong",
        ranks=0,
    )
    assert wrong.code == 2
    assert "model.unnorm_key='bridge'" in wrong.output and "it has: reach" in wrong.output


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, dataset, whole):
    lines = whole.metrics
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["sft/loss"] > 0 and line["sft/lr"] >= 0 for line in lines)
    assert [line["sft/held_out_loss"] is not None for line in lines] == [False, True] * 3
    process = start(tmp_path, dataset, "run.checkpoint_every=1")
    wait_for_step(process, tmp_path / "test", 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)
    resumed = clone(tmp_path, dataset, "resume=auto", "run.checkpoint_every=1")
    assert resumed.code == 0, resumed.output
    assert "resumed from" in resumed.output
    assert_equal(weights(whole), weights(resumed))
    for one, two in zip(lines, resumed.metrics, strict=True):
        assert one["sft/loss"] == two["sft/loss"]
    assert [path.name for path in (tmp_path / "test/policies").iterdir()] == ["step_000006"]

    other = clone(tmp_path, dataset, "resume=auto", "sft.global_batch_size=4")
    assert other.code == 2
    assert "sft.global_batch_size=4, but the checkpoint to resume from" in other.output


def test_ctrl_c_saves_and_says_how_it_went(tmp_path, dataset):
    process = start(tmp_path, dataset, "sft.num_steps=100000")
    wait_for_step(process, tmp_path / "test", 2)
    os.killpg(process.pid, signal.SIGINT)
    run = finish(process, tmp_path)
    assert run.code == 0, run.output
    assert "Traceback" not in run.output
    assert run.summary["exit"] == "stopped"
    assert run.summary["steps"] == run.metrics[-1]["policy_version"] >= 2
    assert (run.folder / "policy/model.safetensors").exists()
    assert "Cloning loss" in Page((run.folder / "report.html").read_text()).charts()
    assert (run.folder / f"checkpoints/step_{run.summary['steps']:06d}/COMPLETE.json").exists()


def test_pi05_from_videos_of_two_cameras(tmp_path):
    folder = write_v2(tmp_path / "set", [episode(seed, 8, size=(48, 48)) for seed in range(2)], videos=True)
    run = clone(tmp_path, folder, "model=pi05_nano", "data.cameras=null", "sft.num_steps=3", "data.image_size=[32,32]")
    assert run.code == 0, run.output
    assert (run.folder / "policy/assets/set/norm_stats.json").exists()
    assert run.metrics[-1]["sft/accuracy"] is None
    assert run.metrics[-1]["sft/held_out_action_error"] > 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.paths=[/nowhere]"], "/nowhere holds neither"),
        (["model=mlp"], "model.name=mlp: openvla_oft and pi05 can be trained by cloning"),
        (["model.unnorm_key=x"], "model.unnorm_key names statistics of model.checkpoint"),
        (["model.temperature=1.6"], "model.temperature must be 1"),
        (["model=pi05_nano", "sft.label_smoothing=0.1"], "sft.label_smoothing"),
        (["data.paths=[a,b]"], "data.name"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, dataset, overrides, words):
    run = clone(tmp_path, dataset, *overrides)
    assert run.code == 2, run.output
    assert words in run.output
    assert "Traceback" not in run.output
    assert not run.folder.exists()


def test_a_corrupt_video_ends_the_run_with_its_name(tmp_path):
    folder = write_v2(tmp_path / "set", [episode(seed, 8) for seed in range(2)], videos=True)
    file = next(folder.glob("videos/**/observation.images.front/episode_000001.mp4"))
    file.write_bytes(file.read_bytes()[:50])
    run = clone(tmp_path, folder)
    assert run.code == 2
    assert str(file) in run.output
    assert run.summary["exit"] == "failed" and str(file) in run.summary["error"]
