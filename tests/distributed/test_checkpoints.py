"""Checkpoints of real ranks: written beside training, given up together, read by others, checked to the byte."""

import errno
import json
import shutil
import threading
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dvla.runtime.checkpoint import COMPLETE, METADATA, TRAIN_STATE, CheckpointError, find, load, step_folder
from dvla.runtime.checkpoint_writer import CheckpointWriter

pytestmark = pytest.mark.distributed


class Spans:
    """In the place of the tracer: does something as a span begins."""

    def __init__(self):
        self.at = {}

    @contextmanager
    def span(self, name, /, **args):
        self.at.get(name, lambda: None)()
        yield


def full_disk():
    raise OSError(errno.ENOSPC, "No space left on device")


def learner(world, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    fully_shard(model, mesh=world.learner_mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer):
    model(torch.linspace(-1, 1, 12).view(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model, optimizer):
    """Parameters and moments, gathered."""
    found = []
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for what, tensor in (("value", parameter), *((key, state[key]) for key in ("exp_avg", "exp_avg_sq", "step"))):
            tensor = tensor.detach()
            found.append((name, what, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()))
    return found


def life(world, root):
    """Save versions 1 to 5, of which two fail; what was seen on the way, and the states of versions 1 and 5."""
    model, optimizer = learner(world, seed=3)
    spans, warnings, seen = Spans(), [], {}
    writer = CheckpointWriter(
        root, keep=2, group=world.checkpoint_pg, overlaps=True, timeout_s=60, saved_version=None,
        warn=warnings.append, tracer=spans,
    )  # fmt: skip

    def save(version):
        step(model, optimizer)
        writer.save(version, model, optimizer, {"policy_version": version, "rank": world.rank})

    def names():
        dist.barrier(world.learners_pg)  # the first rank clears up after it has told the others
        return sorted(path.name for path in root.iterdir())

    # Version 1 is held up in its thread while training goes on.
    go_on = threading.Event()
    spans.at["checkpoint write"] = lambda: go_on.wait(60)
    save(1)
    seen["first"] = whole(model, optimizer)
    seen["before"] = (step_folder(root, 1).exists(), writer.saved_version)
    step(model, optimizer)
    go_on.set()
    writer.finish()
    seen["after"] = (step_folder(root, 1).exists(), writer.saved_version)
    seen["costs"] = writer.metrics()
    seen["first as read"] = read(world, step_folder(root, 1))

    # Version 2 does not fit on the disk of the last rank, version 3 not on that of the one that commits.
    spans.at = {"checkpoint write": full_disk} if world.rank == world.world_size - 1 else {}
    save(2)
    writer.wait()
    seen["one failed"] = (writer.saved_version, names())
    spans.at = {"checkpoint commit": full_disk}
    save(3)
    with pytest.raises(CheckpointError) as failure:
        writer.finish()
    seen["two failed"] = (writer.saved_version, names(), str(failure.value))

    spans.at = {}
    save(4)
    save(5)
    writer.finish()
    seen["end"] = (writer.saved_version, names(), len(warnings))
    seen["failures"] = (writer.metrics()["checkpoint/failures"], warnings[0])
    seen["last"] = whole(model, optimizer)
    return seen


def read(world, folder):
    """The state of a checkpoint, read into a learner of other beginnings."""
    model, optimizer = learner(world, seed=4)
    step(model, optimizer)
    load(folder, model=model, optimizer=optimizer, group=world.learners_pg)
    return whole(model, optimizer)


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "two ranks"])
def lives(request, tmp_path_factory):
    """What each rank saw, and where the checkpoints are."""
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    return run_ranks(life, request.param, root), root


def same(state, wanted):
    return all(torch.equal(one[-1], other[-1]) for one, other in zip(state, wanted, strict=True))


def test_a_version_is_written_as_it_was_while_training_goes_on(lives):
    for seen in lives[0]:
        assert same(seen["first as read"], seen["first"])
        assert seen["before"] == (False, None)
        assert seen["after"] == (True, 1)
        assert seen["costs"]["checkpoint/bytes"] > 0 and seen["costs"]["checkpoint/failures"] == 0
        assert seen["costs"]["checkpoint/write_s"] > 0 and seen["costs"]["checkpoint/block_s"] > 0


def test_a_save_that_fails_on_one_rank_is_said_on_all_and_costs_nothing_else(lives):
    found, root = lives
    last = len(found) - 1
    for seen in found:
        assert seen["one failed"] == (1, ["latest", "step_000001"])
        assert seen["failures"][0] == 2
        assert f"{root}/step_000002 failed on rank {last}: OSError: [Errno 28] No space left" in seen["failures"][1]
        version, names, failure = seen["two failed"]
        assert (version, names) == (1, ["latest", "step_000001"])
        assert "step_000003 failed on rank 0: OSError" in failure


def test_the_next_save_succeeds_and_old_ones_go(lives):
    found, root = lives
    for seen in found:
        assert seen["end"] == (5, ["latest", "step_000004", "step_000005"], 2)
    assert (root / "latest").readlink().name == "step_000005"
    assert json.loads((root / "latest" / TRAIN_STATE).read_text()) == {"policy_version": 5, "rank": 0}
    assert find("auto", root) == (root / "step_000005", {})


def test_another_number_of_ranks_reads_it_to_the_bit(lives):
    found, root = lives
    for state in run_ranks(read, 3 - len(found), root / "step_000005"):
        assert same(state, found[0]["last"])
        assert not same(state, found[0]["first"])


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [truncate, flip, lambda path: path.unlink()], ids=["truncated", "flipped", "removed"]
)
def test_whatever_happens_to_a_file_the_checkpoint_before_is_used_and_said(lives, damage, tmp_path):
    found, root = lives
    names = {path.name for path in (root / "step_000005").iterdir()}
    assert names == {COMPLETE, METADATA, TRAIN_STATE} | {f"__{rank}_0.distcp" for rank in range(len(found))}
    for name in sorted(names):
        copy = tmp_path / name.strip("._") / "checkpoints"
        shutil.copytree(root, copy, symlinks=True)
        damage(copy / "step_000005" / name)
        used, torn = find("auto", copy)
        assert used == copy / "step_000004", name
        assert list(torn) == [copy / "step_000005"] and name in torn[copy / "step_000005"], torn
