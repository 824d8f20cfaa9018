"""What may differ between ranks, or be asked of them, when a run begins."""

import os
import subprocess
import sys

import pytest

from e2e.launch import QUICK, REPOSITORY, Run

pytestmark = pytest.mark.e2e


def run_ranks(root, *overrides, environment="", stdin=subprocess.DEVNULL, closed=""):
    """A run of two ranks, each started by a shell with some environment of its own."""
    words = " ".join(f"'{word}'" for word in (*QUICK, f"run.root={root}", *overrides))
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", "sh", "-c",
         f"exec env {environment} {sys.executable} -m dvla.train {words} {closed}"],
        cwd=REPOSITORY, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    try:
        process.wait(120)
        return Run(process.returncode, process.stdout.read(), root / "test")
    finally:
        process.kill()
        for pipe in filter(None, (process.stdin, process.stdout)):
            pipe.close()


def test_ranks_whose_sets_have_another_order_agree_on_every_parameter(tmp_path):
    model = ("model=openvla_oft_nano", "model.lora_rank=2", "env.cameras=[top]", "algo.micro_batch_size=16")
    run = run_ranks(
        *(tmp_path, *model, "algo.num_steps=2", "runtime.verify_weights=true", "algo.filter_zero_signal=false"),
        environment="PYTHONHASHSEED=$((RANK + 1))",
    )
    assert run.code == 0, run.output
    assert run.summary["policy_version"] == 2


def test_a_library_that_asks_on_the_terminal_ends_the_run(tmp_path):
    run = run_ranks(tmp_path, "model.name=asking_policy:AskingPolicy", stdin=subprocess.PIPE)  # which nobody writes to
    assert run.code == 1, run.output
    assert "EOFError" in run.summary["error"]


def test_ranks_without_an_input_begin_as_others_do(tmp_path):
    words = ("algo.num_steps=1", "algo.filter_zero_signal=false")
    run = run_ranks(tmp_path, *words, closed="<&-")
    assert run.code == 0, run.output
    assert run.summary["policy_version"] == 1
