"""A run that is killed goes on as if nothing had happened: to the bit on as many ranks, to a rounding on others."""

import json
import os
import shutil
import signal

import pytest
import torch
from e2e.launch import finish, start, wait_for_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]

RUN = (
    *("env=reach", "env.reward_mode=dense", "model.preset=nano", "algo.group_size=4", "algo.groups_per_step=4"),
    *("runtime.num_envs=4", "runtime.schedule=serial", "algo.max_staleness=0", "algo.num_steps=20", "algo.lr=1e-4"),
    *("algo.entropy_coef=0.01",),
    *("run.checkpoint_every=10", "run.keep_checkpoints=1000", "run.name=test", "telemetry.tensorboard=false"),
)
TIMES = ("time/", "perf/", "lane/", "plane/", "memory/", "checkpoint/")  # of the machine, not of the training


def numbers(run):
    """Lines of metrics without what depends on the machine."""
    return [{key: value for key, value in line.items() if not key.startswith(TIMES)} for line in run.metrics]


def tensors(run, tmp_path, version=20):
    """Parameters and moments of a checkpoint, by name."""
    dcp_to_torch_save(run.folder / "checkpoints" / f"step_{version:06d}", tmp_path / "all.pt")
    found = {}

    def collect(name, value):
        if isinstance(value, dict):
            for key, part in value.items():
                collect(f"{name}/{key}", part)
        elif isinstance(value, torch.Tensor):
            found[name] = value

    collect("", torch.load(tmp_path / "all.pt", weights_only=True))
    assert sum("exp_avg_sq" in name for name in found) == sum(name.startswith("/model/") for name in found) > 0
    return found


def state(run):
    """Tickets and counters of the last checkpoint."""
    whole = json.loads((run.folder / "checkpoints" / "step_000020" / "train_state.json").read_text())
    whole["report"].pop("wall_s")
    whole.pop("config")
    return whole


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run from beginning to end, by its number of ranks."""
    runs = {}

    def get(ranks):
        if ranks not in runs:
            root = tmp_path_factory.mktemp("whole")
            runs[ranks] = finish(start(root, *RUN, ranks=ranks), root)
            assert runs[ranks].code == 0, runs[ranks].output
        return runs[ranks]

    return get


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_to_the_bit(whole, tmp_path, ranks):
    wanted = whole(ranks)
    process = start(tmp_path, *RUN, "algo.num_steps=100000", ranks=ranks)
    kept = tmp_path / "test" / "checkpoints" / "step_000010"
    wait_for_file(process, kept / "COMPLETE.json")
    os.killpg(process.pid, signal.SIGKILL)
    assert finish(process, tmp_path).code == -signal.SIGKILL
    resumed = finish(start(tmp_path, *RUN, f"resume={kept}", ranks=ranks, module="reseeded_train"), tmp_path)
    assert resumed.code == 0, resumed.output
    assert f"resuming from {kept}" in resumed.output
    assert numbers(resumed) == numbers(wanted)
    assert len({line["train/loss"] for line in wanted.metrics}) == 20, "a run that stands still proves nothing"
    assert state(resumed) == state(wanted)
    one, other = tensors(resumed, tmp_path), tensors(wanted, tmp_path)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_other_ranks_but_for_roundings(whole, tmp_path, before, after):
    wanted = whole(before)
    shutil.copytree(wanted.folder, tmp_path / "test", symlinks=True)
    kept = tmp_path / "test" / "checkpoints" / "step_000010"
    run = finish(start(tmp_path, *RUN, f"resume={kept}", ranks=after), tmp_path)
    assert run.code == 0, run.output
    assert [cursor["next_group"] for cursor in state(run)["cursors"]] == list(range(80, 80 + after))
    for line, other in zip(numbers(run), numbers(wanted), strict=True):
        assert line.keys() == other.keys()
        for tag, value in line.items():
            assert value == other[tag] or value == pytest.approx(other[tag], rel=1e-6, abs=1e-6), tag
    one, other = tensors(run, tmp_path), tensors(wanted, tmp_path)
    for name in other:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6, msg=name)
