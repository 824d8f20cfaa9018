"""Checkpoints are read back whole; what a stranger has put into one is refused, not run."""

import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dvla.runtime.confined_path import inside
from dvla.runtime.safe_reading import DamagedMetadataError, parse_metadata, planner, reader


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def state(seed):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed, betas=(0.5, 0.25))
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


@pytest.fixture
def folder(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        save(state(1), checkpoint_id=tmp_path / "step")
    return tmp_path / "step"


def read(folder, into):
    with warnings.catch_warnings(action="ignore"):
        load(into, storage_reader=reader(folder), planner=planner(), no_dist=True)


def change(folder, edit):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_tensors_and_values_come_back(folder):
    got, want = state(2), state(1)
    read(folder, got)
    for part in (got["model"], got["optimizer"]["state"]):
        assert part
    torch.testing.assert_close(got["model"], want["model"], rtol=0, atol=0)
    torch.testing.assert_close(got["optimizer"]["state"], want["optimizer"]["state"], rtol=0, atol=0)
    assert got["optimizer"]["param_groups"] == want["optimizer"]["param_groups"]
    assert got["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert got["optimizer"]["param_groups"][0]["betas"] == (0.5, 0.25)


@pytest.mark.parametrize("protocol", range(6))
def test_code_in_the_metadata_does_not_run(folder, tmp_path, protocol):
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran"), protocol))
    with pytest.raises(CheckpointException):
        read(folder, state(2))
    with pytest.raises(DamagedMetadataError, match="does not belong there"):
        parse_metadata((folder / ".metadata").read_bytes(), folder)
    assert not (tmp_path / "ran").exists()


def test_code_in_a_value_does_not_run(folder, tmp_path):
    torch.save(Evil(tmp_path / "ran"), tmp_path / "value")
    file = folder / "__0_0.distcp"
    begin = file.stat().st_size
    file.write_bytes(file.read_bytes() + (tmp_path / "value").read_bytes())

    def edit(metadata):
        for index, place in metadata.storage_data.items():
            if index.fqn.endswith("lr"):
                metadata.storage_data[index] = replace(place, offset=begin, length=file.stat().st_size - begin)

    change(folder, edit)
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        read(folder, state(2))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../stolen", "/etc/passwd", "a/../../b", "", 3])
def test_files_of_other_folders_are_not_read(folder, name):
    def edit(metadata):
        metadata.storage_data = {i: replace(p, relative_path=name) for i, p in metadata.storage_data.items()}

    change(folder, edit)
    with pytest.raises(CheckpointException):
        read(folder, state(2))
    with pytest.raises(DamagedMetadataError, match=r"leads out of|no file name"):
        parse_metadata((folder / ".metadata").read_bytes(), folder)


def test_a_damaged_one_is_said_to_be(folder):
    data = (folder / ".metadata").read_bytes()
    for content in (b"", data[:-1], data[:100], pickle.dumps({"a": 1}), pickle.dumps([1] * 3)):
        with pytest.raises(DamagedMetadataError, match=r"\.metadata cannot be read"):
            parse_metadata(content, folder)


def test_memory_without_end_is_not_asked_for(folder):
    """LONG_BINPUT of place 2^32 - 1 in the memo makes the unpickler take 64 GiB."""
    with pytest.raises(DamagedMetadataError, match="LONG_BINPUT"):
        parse_metadata(b"\x80\x04Nr\xff\xff\xff\xff.", folder)


@pytest.mark.parametrize("name", ["..", "a/../b", "/a", "a/..", "", ".", "a\0b", None, 1])
def test_names_that_could_lead_out_are_refused(name):
    with pytest.raises(ValueError, match=r"leads out|no file name"):
        inside(Path("folder"), name)


@pytest.mark.parametrize("name", ["a", "a/b.c", "..a", "a..", "./a"])
def test_names_within_are_not(name):
    assert inside(Path("folder"), name) == Path("folder") / name
