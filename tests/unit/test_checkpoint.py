"""Which checkpoints count as complete; saving and loading themselves are tested by resuming real runs."""

import hashlib
import json

import pytest

from dvla.config import ConfigError
from dvla.runtime.checkpoint import (
    COMPLETE,
    METADATA,
    TRAIN_STATE,
    CheckpointError,
    complete_checkpoints,
    fault_of,
    find,
    read_train_state,
    set_aside,
    step_folder,
    take_back,
)

DATA = "__0_0.distcp"


def make(root, version):
    folder = step_folder(root, version)
    folder.mkdir(parents=True)
    contents = {DATA: b"12345", METADATA: b"67", TRAIN_STATE: json.dumps({"policy_version": version}).encode()}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    (folder / COMPLETE).write_text(json.dumps({"files": files}))
    return folder


def test_the_newest_complete_one_is_found(tmp_path):
    for version in (10, 100, 20, 1_000_000):
        make(tmp_path, version)
    (tmp_path / "step_2000000.tmp").mkdir()
    (tmp_path / "step_30").mkdir()
    names = ["step_1000000", "step_000100", "step_000020", "step_000010"]
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == names
    assert find("auto", tmp_path) == (tmp_path / "step_1000000", {})
    assert find("none", tmp_path) == (None, {})
    assert find("auto", tmp_path / "elsewhere") == (None, {})
    assert find(str(tmp_path / "step_000010"), tmp_path) == (tmp_path / "step_000010", {})


def test_going_back_takes_back_what_came_after(tmp_path):
    for version in (10, 20, 30, 1_000_000):
        make(tmp_path, version)
    (tmp_path / "step_000040.tmp").mkdir()
    (tmp_path / "step_000005.old.tmp").mkdir()
    take_back(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000010", "step_000020"]
    assert (tmp_path / "latest").resolve().name == "step_000020"
    take_back(tmp_path / "elsewhere", 20)


def test_one_that_is_being_removed_is_none_any_more(tmp_path):
    make(tmp_path, 10)
    set_aside(make(tmp_path, 20))
    aside = set_aside(make(tmp_path, 20))  # what was left of it once is replaced
    assert aside.name == "step_000020.old.tmp"
    (aside / DATA).unlink()  # killed midway
    assert find("auto", tmp_path) == (tmp_path / "step_000010", {})


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / COMPLETE).unlink(), "COMPLETE.json is missing"),
        (write(COMPLETE, "{"), "COMPLETE.json cannot be read"),
        (write(COMPLETE, "[]"), "COMPLETE.json cannot be read"),
        (write(COMPLETE, "{}"), "COMPLETE.json cannot be read"),
        (write(COMPLETE, '{"files": []}'), "COMPLETE.json cannot be read"),
        (write(COMPLETE, '{"files": {"a": 5}}'), "COMPLETE.json cannot be read"),
        (write(COMPLETE, '{"files": {}}'), "COMPLETE.json does not name .metadata"),
        (write(COMPLETE, '{"a":' * 100_000 + "1" + "}" * 100_000), "COMPLETE.json cannot be read"),
        (lambda folder: (folder / COMPLETE).write_bytes(b"\xff\xfe"), "COMPLETE.json cannot be read"),
        (lambda folder: (folder / DATA).unlink(), f"{DATA} is missing"),
        (write(DATA, "123"), f"{DATA} has 3 bytes instead of 5"),
        (write(DATA, "12346"), f"{DATA} is not what was written"),
        (write(METADATA, "68"), f"{METADATA} is not what was written"),
    ],
)
def test_a_torn_one_is_passed_over_and_its_fault_named(tmp_path, damage, words):
    make(tmp_path, 10)
    torn = make(tmp_path, 20)
    damage(torn)
    fault = fault_of(torn, hashes=True)
    assert words in fault
    assert find("auto", tmp_path) == (tmp_path / "step_000010", {torn: fault})
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        find(str(torn), tmp_path)


@pytest.mark.parametrize(
    "name", ["../step_000010/__0_0.distcp", "/etc/hostname", "a" * 1000, "a\0b", ".", "", "\ud800"]
)
def test_a_name_that_is_no_file_of_the_folder_is_a_fault(tmp_path, name):
    make(tmp_path, 10)
    torn = make(tmp_path, 20)
    content = json.loads((torn / COMPLETE).read_text())
    content["files"][name] = content["files"][DATA]
    (torn / COMPLETE).write_text(json.dumps(content))
    assert fault_of(torn, hashes=True) is not None


def test_a_run_whose_checkpoints_are_all_torn_does_not_begin_anew_by_itself(tmp_path):
    (make(tmp_path, 10) / DATA).unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is complete \(step_000010: __0_0.distcp is missing\)"):
        find("auto", tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"policy_version": "1"}', '{"policy_version": true}', "[" * 100_000])
def test_counters_that_cannot_be_read_are_an_error_of_the_checkpoint(tmp_path, text):
    folder = make(tmp_path, 10)
    assert read_train_state(folder) == {"policy_version": 10}
    (folder / TRAIN_STATE).write_text(text)
    with pytest.raises(
        CheckpointError, match=r"train_state.json (cannot be read|holds no object|has no policy_version)"
    ):
        read_train_state(folder)
