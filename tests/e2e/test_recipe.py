"""launch/recipe.sh: what is made already is not made again, signals end every part, and mistakes are named."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from e2e.launch import REPOSITORY, Run

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

SMALL = (
    "run.eval_every=1",
    "evaluation.episodes_per_task=2",
    "env.max_episode_steps=8",
    "algo.num_steps=1",
    "algo.group_size=2",
    "algo.groups_per_step=2",
    "algo.filter_zero_signal=false",
    "runtime.num_envs=2",
)


def recipe(root, *arguments):
    return subprocess.Popen(
        [REPOSITORY / "launch/recipe.sh", *arguments],
        env=os.environ | {"ROOT": str(root), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def stop_when(process, ready):
    """Signal the script alone once `ready` holds; its output. Nothing that it started may live on."""
    deadline = time.monotonic() + 120
    while not ready():
        if time.monotonic() > deadline or process.poll() is not None:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(process.communicate()[0])
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    psutil.wait_procs(family, timeout=10)
    assert not [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
    return output


def test_each_part_can_be_stopped_and_what_is_made_is_not_made_again(tmp_path):
    datasets, runs = tmp_path / "datasets", tmp_path / "runs"
    process = recipe(tmp_path, "pushcube_oft", *SMALL)
    output = stop_when(process, (datasets / "pushcube.part/meta/info.json").exists)
    assert process.returncode == 0, output
    assert "stopped: " in output
    assert not (datasets / "pushcube").exists(), "half of the demonstrations are not taken for all"

    def made(module, *arguments):
        subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            timeout=120,
        )

    few = ("num_episodes=2", "num_workers=1", "pace=[1,1]", f"out={datasets / 'pushcube'}")
    made("dvla.collect", "demonstrations=pushcube", *few)
    # Nor is a clone that was stopped taken for a finished one.
    process = recipe(tmp_path, "pushcube_oft", *SMALL)
    clone = runs / "pushcube_oft_sft"
    output = stop_when(process, lambda: (clone / "metrics.jsonl").exists() and (clone / "metrics.jsonl").stat().st_size)
    assert process.returncode == 0, output
    assert "1 of 3" not in output, "they are there"
    assert "3 of 3" not in output
    assert (clone / "checkpoints/latest").exists(), "it can be gone on with"

    where = (f"data.paths=[{datasets / 'pushcube'}]", f"run.root={runs}", "run.name=pushcube_oft_sft", "run.clean=true")
    made("dvla.sft", "cloning=pushcube_oft", *where, "sft.num_steps=1", "sft.warmup_steps=0")
    process = recipe(tmp_path, "pushcube_oft", *SMALL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "2 of 3" not in output
    run = Run(0, output, runs / "pushcube_oft")
    assert run.summary["eval_success_before"] is not None
    assert run.summary["eval_success_after"] is not None
    assert len(list(run.folder.rglob("*.mp4"))) == 2, "a film from before and one from after"


def test_a_mistake_in_the_overrides_shows_before_anything_is_made(tmp_path):
    process = recipe(tmp_path, "pushcube_oft", "algo.lrr=1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "lrr" in output
    assert not list(tmp_path.iterdir())


def test_a_recipe_that_there_is_not_is_named_with_those_that_there_are(tmp_path):
    for arguments, words in (((), "name one of:"), (("pushcup_oft",), "no recipe pushcup_oft")):
        process = recipe(tmp_path, *arguments)
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 2
        assert words in output
        assert "pushcube_oft" in output
