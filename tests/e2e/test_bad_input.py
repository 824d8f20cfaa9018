"""What people get wrong: one clear line that names the thing and the remedy, an exit code, nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from e2e.launch import QUICK, REPOSITORY, finish, ranks_of, start, train, wait_for_step

pytestmark = pytest.mark.e2e


def error_lines(run):
    """The lines in which the program itself says what is wrong."""
    return [line for line in run.output.splitlines() if line.startswith("dvla: rank")]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.name=reech"], ["env.name='reech'", "did you mean reach"]),
        (["+env.options.colour=red"], ["env.options.colour", "target_radius"]),
        (["+model.options.width=3"], ["model.options.width"]),
        (["model.num_action_chunks=33"], ["model.num_action_chunks=33", "env.max_episode_steps=32"]),
        (["device=cuda"], ["device=cuda", "device=cpu"]),
        (["resume=runs/nothing"], ["resume=runs/nothing", "no complete checkpoint"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and "=" in value[-1] else "",
)
def test_a_wrong_value_ends_before_any_simulator_starts(tmp_path, overrides, words):
    run = train(tmp_path, *QUICK, *overrides, ranks=0)
    assert run.code == 2, run.output
    (line,) = error_lines(run)
    assert all(word in line for word in words), line
    assert "Traceback" not in run.output
    assert not list(tmp_path.rglob("*-w0.log"))


def test_an_unknown_key_is_named(tmp_path):
    run = train(tmp_path, *QUICK, "algo.groupsize=4", ranks=0)
    assert run.code != 0
    assert "algo.groupsize" in run.output


def test_a_batch_that_does_not_divide_among_the_ranks(tmp_path):
    run = train(tmp_path, *QUICK, "algo.groups_per_step=3")
    assert run.code != 0
    assert any(
        "algo.groups_per_step=3 must be a multiple of the number of training ranks (2)" in x for x in error_lines(run)
    )
    assert not list(tmp_path.rglob("*-w0.log"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one step that has ended well."""
    run = train(tmp_path_factory.mktemp("finished"), *QUICK, "algo.num_steps=1", ranks=0)
    assert run.code == 0, run.output
    return run


def test_a_folder_in_use_is_kept_unless_told_otherwise(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "test", symlinks=True)
    second = train(tmp_path, *QUICK, "algo.num_steps=1")
    assert second.code != 0
    (line,) = error_lines(second)  # all ranks fail, one says why
    assert all(word in line for word in ("is not empty", "run.name", "run.clean=true", "resume=auto"))
    assert line.removeprefix("dvla: rank 0: error: ") in second.output.split("Root Cause")[-1], "torchrun's last word"
    third = train(tmp_path, *QUICK, "algo.num_steps=1", "run.clean=true", ranks=0)
    assert third.code == 0, third.output


def test_clean_never_removes_the_checkpoint_to_resume_from(finished, tmp_path):
    path = shutil.copytree(finished.folder, tmp_path / "test", symlinks=True) / "checkpoints" / "step_000001"
    for resume in (path, "auto"):
        run = train(tmp_path, *QUICK, "run.clean=true", f"resume={resume}", ranks=0)
        assert run.code == 2
        assert "run.clean=true" in error_lines(run)[0]
    assert path.exists()


def test_resuming_elsewhere_does_not_touch_another_run(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "other", symlinks=True)
    path = finished.folder / "checkpoints" / "step_000001"
    run = train(tmp_path, *QUICK, "run.name=other", f"resume={path}", ranks=0)
    assert run.code == 2
    assert "is not empty" in error_lines(run)[0]
    assert (tmp_path / "other" / "checkpoints" / "step_000001" / "COMPLETE.json").exists()


def test_clean_never_removes_what_is_no_run(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "thesis.tex").write_text("important")
    run = train(tmp_path, *QUICK, "run.clean=true", ranks=0)
    assert run.code == 2
    assert "does not look like a run" in error_lines(run)[0]
    assert (tmp_path / "test" / "thesis.tex").exists()


def test_a_disk_that_cannot_be_written(tmp_path):
    run = train(tmp_path, *QUICK, "run.root=/proc/runs", ranks=0)
    assert run.code == 2
    assert "run.root" in error_lines(run)[0]


def test_a_simulator_that_always_fails_ends_the_run_with_its_task_and_cause(tmp_path):
    run = train(
        tmp_path,
        *QUICK,
        "env.name=counting_env:CountingEnv",
        "+env.options.disaster='raise step 3'",
        "runtime.max_worker_failures=2",
    )
    assert run.code != 0
    (line,) = [line for line in error_lines(run) if "in a row" in line][:1]
    assert "3 simulator workers failed in a row (task 0, initial state" in line
    assert "ValueError: the arm fell off" in line
    assert run.summary["exit"] == "failed"
    assert "the arm fell off" in run.summary["error"]


@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "torchrun"])
def test_a_killed_process_takes_all_others_with_it(tmp_path, victim):
    process = start(tmp_path, *QUICK, "algo.num_steps=100000")
    wait_for_step(process, tmp_path / "test", 2)
    everyone = psutil.Process(process.pid).children(recursive=True)
    assert len(everyone) >= 4  # two ranks, two workers
    target = psutil.Process(process.pid) if victim == "torchrun" else ranks_of(process)[int(victim[-1])]
    os.kill(target.pid, signal.SIGKILL)
    begin = time.monotonic()
    finish(process, tmp_path)
    _, alive = psutil.wait_procs(everyone, timeout=60 - (time.monotonic() - begin))
    assert not alive, f"still running: {alive}"


def test_no_vulkan_device(tmp_path, monkeypatch):
    monkeypatch.setenv("VK_ICD_FILENAMES", str(tmp_path / "none.json"))
    monkeypatch.setenv("VK_DRIVER_FILES", str(tmp_path / "none.json"))
    run = train(tmp_path, *QUICK, "env=maniskill", "model=openvla_oft_nano", ranks=0)
    assert run.code == 1
    (line,) = error_lines(run)
    assert "Vulkan" in line
    assert "make setup" in line or "system_packages.sh" in line


def test_a_missing_simulator_package(tmp_path, monkeypatch):
    package = tmp_path / "fake" / "mani_skill"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'mani_skill'\", name='mani_skill')"
    )
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{os.environ['PYTHONPATH']}")
    run = train(tmp_path, *QUICK, "env=maniskill", "model=openvla_oft_nano", ranks=0)
    assert run.code != 0
    (line,) = error_lines(run)
    assert "mani_skill" in line
    assert "make setup" in line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env=libero_spatial", "env.task=libero_spacial"], "LIBERO has no suite 'libero_spacial': choose one of"),
        (["env=maniskill", "env.task=PushKube-v1"], "ManiSkill has no task 'PushKube-v1': did you mean PushCube-v1"),
        (["runtime.num_envs=80", "runtime.num_workers=80"], "runtime.num_workers=80 processes for 32 episode slots"),
        (["env=maniskill", "+env.options.sim_backend=gpu"], "sim_backend=gpu needs an NVIDIA GPU"),
        (["env.cameras=[top]", "render.meshes=light"], "render.meshes=light: reach has no light meshes"),
        (["+env.options.sim_backend=gpu"], "env.options.sim_backend"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_simulators_that_cannot_be_had_are_refused_in_one_line(tmp_path, overrides, words):
    if "gpu needs" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = ["model=openvla_oft_nano"] if "env=" in overrides[0] else []
    run = train(tmp_path, *QUICK, *overrides, *model, ranks=0)
    assert run.code in {1, 2}, run.output
    (line,) = error_lines(run)
    assert words in line
    assert "Traceback" not in run.output


def test_evaluation_says_what_it_lacks(tmp_path):
    for arguments, words in (
        ([], "say what to evaluate"),
        ([f"checkpoint={tmp_path}"], "no complete checkpoint"),
        (["model=mlp", "evaluation.episodes_per_task=0"], "evaluation.episodes_per_task must be at least 1"),
        (["model=mlp", "evaluation.videos_per_task=1", f"out={tmp_path / 'a'}"], "nothing to film without env.cameras"),
        (["model=mlp", f"out={tmp_path}"], "exists: give a new folder"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "dvla.evaluate", *arguments],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            timeout=120,
        )
        assert done.returncode == 2, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("dvla: ")]
        assert words in line
