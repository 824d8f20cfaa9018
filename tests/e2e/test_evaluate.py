"""`dvla.evaluate` from the command line: each episode once on any number of ranks, results of a stopped one, videos."""

import json
import os
import signal
import subprocess
import sys
import time

import av
import psutil
import pytest

from e2e.launch import QUICK, REPOSITORY, train

pytestmark = pytest.mark.e2e


def command(*arguments, ranks=0):
    start = [sys.executable, "-m"]
    if ranks:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [*start, "dvla.evaluate", *map(str, arguments)]


def evaluate(*arguments, ranks=0):
    done = subprocess.run(command(*arguments, ranks=ranks), capture_output=True, text=True, cwd=REPOSITORY, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def result(folder):
    return json.loads((folder / "evaluation.json").read_text())


def count_frames(path):
    with av.open(str(path)) as video:
        assert video.streams.video[0].codec_context.name == "h264"
        assert video.streams.video[0].codec_context.height >= 240, "large enough for a person"
        return sum(1 for _ in video.decode(video=0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run with pictures and two tasks."""
    run = train(
        tmp_path_factory.mktemp("runs"),
        *QUICK,
        "env.cameras=[top]",
        "+env.options.num_tasks=2",
        "algo.num_steps=2",
        ranks=0,
    )
    assert run.code == 0, run.output
    return run


@pytest.mark.parametrize(("ranks", "workers"), [(0, 1), (1, 3), (2, 1), (2, 5)])
def test_each_episode_is_played_once_and_the_results_are_the_same(trained, tmp_path, ranks, workers):
    checkpoint = trained.folder / "checkpoints" / "latest"
    output = evaluate(
        f"checkpoint={checkpoint}",
        "evaluation.episodes_per_task=9",
        f"runtime.num_envs={workers}",
        f"runtime.num_workers={workers}",
        f"out={tmp_path / 'here'}",
        "device=cpu",
        ranks=ranks,
    )
    summary = result(tmp_path / "here")
    outcomes = [(o["task"], o["seed"]) for o in summary["outcomes"]]
    assert outcomes == [(task, 1_000_000 + state) for task in range(2) for state in range(9)]
    assert (summary["exit"], summary["policy_version"], summary["world_size"]) == ("completed", 2, max(ranks, 1))
    assert "move the point to the place opposite the target" in output
    # The policy decides alike whatever the batch, but for rounding; successes of this one are beyond that.
    again = tmp_path.parent / "outcomes.json"
    successes = [o["success"] for o in summary["outcomes"]]
    if again.exists():
        assert json.loads(again.read_text()) == successes
    again.write_text(json.dumps(successes))


def test_results_lie_beside_the_checkpoints_and_videos_show_every_step(trained):
    arguments = (f"checkpoint={trained.folder / 'checkpoints' / 'latest'}", "evaluation.episodes_per_task=2")
    evaluate(*arguments, "evaluation.videos_per_task=1")
    evaluate(*arguments, "env.max_episode_steps=10")  # an earlier evaluation is kept
    first, second = (trained.folder / "evaluations" / name for name in ("reach_step_000002", "reach_step_000002_2"))
    assert max(o["steps"] for o in result(second)["outcomes"]) <= 10
    videos = sorted((first / "videos" / "step_000002").iterdir())
    assert [path.name.rsplit("_", 1)[0] for path in videos] == ["task00_seed1000000", "task01_seed1000000"]
    for path, outcome in zip(videos, [o for o in result(first)["outcomes"] if o["seed"] == 1_000_000], strict=True):
        assert path.stem.endswith("success" if outcome["success"] else "failure")
        assert count_frames(path) == outcome["steps"] + 1


def test_a_stopped_evaluation_keeps_what_it_has(tmp_path):
    folder = tmp_path / "here"
    process = subprocess.Popen(
        command(
            "model=mlp",
            "env=reach",
            "env.name=counting_env:CountingEnv",
            "+env.options.fault=slow",
            "env.cameras=[top]",
            "env.image_size=[32,32]",
            "env.max_episode_steps=20",
            "evaluation.episodes_per_task=1000",
            "evaluation.videos_per_task=1000",
            f"out={folder}",
        ),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(list(folder.glob("videos/*/*_failure.mp4"))) < 3 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    everyone = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    summary = result(folder)
    assert summary["exit"] == "stopped"
    assert 3 <= summary["episodes"] == len(summary["outcomes"]) < 1000
    videos = list(folder.glob("videos/*/*.mp4"))
    assert any(path.stem.endswith("_stopped") for path in videos)
    assert all(count_frames(path) >= 1 for path in videos)
    _, alive = psutil.wait_procs(everyone, timeout=10)
    assert not alive


SLOW = (
    "model=mlp",
    "env=reach",
    "env.name=counting_env:CountingEnv",
    "env.max_episode_steps=8",
    "evaluation.episodes_per_task=40",
)


def test_an_evaluation_of_which_one_rank_was_stopped_is_not_complete(tmp_path):
    process = subprocess.Popen(
        command(*SLOW, "+env.options.fault=slow", f"out={tmp_path / 'here'}", ranks=2),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = tmp_path / "here" / "logs" / "dvla-eval-r1-w0.log"
    deadline = time.monotonic() + 60
    while not log.exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rank = next(p for p in psutil.Process(process.pid).children() if "dvla:eval:r1" in " ".join(p.cmdline()))
    rank.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    summary = result(tmp_path / "here")
    assert summary["exit"] == "stopped"
    assert 20 <= summary["episodes"] < 40


def test_an_evaluation_that_fails_leaves_what_it_has(tmp_path):
    done = subprocess.run(
        command(*SLOW, "+env.options.fault=bad_state", "runtime.num_envs=1", f"out={tmp_path / 'here'}"),
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
    )
    assert done.returncode == 1
    summary = result(tmp_path / "here")
    assert (summary["exit"], summary["episodes"]) == ("failed", 3)
    assert "this state cannot be" in summary["error"]
    assert "failed: mlp/default at step 0 in counting, 3 episodes" in done.stdout
