"""Which checkpoints count as complete; saving and loading themselves are tested by resuming real runs."""

import json

import pytest

from dvla.config import ConfigError
from dvla.runtime.checkpoint import (
    COMPLETE,
    complete_checkpoints,
    fault_of,
    find,
    take_back,
    torn_checkpoints,
)


def make(root, version, data=b"12345"):
    folder = root / f"step_{version:06d}"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(data)
    (folder / COMPLETE).write_text(json.dumps({"policy_version": version, "files": {"__0_0.distcp": 5}}))
    return folder


def test_the_newest_complete_one_is_found(tmp_path):
    for version in (10, 100, 20):
        make(tmp_path, version)
    (tmp_path / "step_000200.tmp").mkdir()
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == ["step_000100", "step_000020", "step_000010"]
    assert find("auto", tmp_path).name == "step_000100"
    assert find("none", tmp_path) is None
    assert find("auto", tmp_path / "elsewhere") is None
    assert find(str(tmp_path / "step_000010"), tmp_path).name == "step_000010"


def test_going_back_takes_back_what_came_after(tmp_path):
    for version in (10, 20, 30):
        make(tmp_path, version)
    (tmp_path / "step_000040.tmp").mkdir()
    take_back(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000010", "step_000020"]
    assert (tmp_path / "latest").resolve().name == "step_000020"
    take_back(tmp_path / "elsewhere", 20)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / COMPLETE).unlink(), "COMPLETE.json is missing"),
        (lambda folder: (folder / COMPLETE).write_text("{"), "COMPLETE.json cannot be read"),
        (lambda folder: (folder / COMPLETE).write_text("[]"), "COMPLETE.json cannot be read"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"123"), "has 3 bytes instead of 5"),
    ],
)
def test_a_torn_one_is_passed_over_and_its_fault_named(tmp_path, damage, words):
    make(tmp_path, 10)
    torn = make(tmp_path, 20)
    damage(torn)
    assert words in fault_of(torn)
    assert torn_checkpoints(tmp_path) == {torn: fault_of(torn)}
    assert find("auto", tmp_path).name == "step_000010"
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        find(str(torn), tmp_path)
