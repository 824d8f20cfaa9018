"""Damages valid files and settings in every way that comes to mind, and hands them to what reads them.

A reader may accept them or refuse them with its own error. Any other error, and a reader that takes long, is a fault.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from recordings import episode, write_libero, write_v2, write_v3
from torch.distributed.checkpoint.state_dict_saver import save

from dvla.collect import CollectConfig
from dvla.config import Config, ConfigError, DataConfig, EvaluateConfig, ModelConfig, SftConfig, load_as, to_plain
from dvla.datasets.reading import read_dataset
from dvla.models.checkpoint import open_checkpoint
from dvla.models.checkpoint_files import CheckpointFiles, write_safetensors
from dvla.plan import PlanConfig
from dvla.runtime.json_file import read_object
from dvla.runtime.safe_reading import DamagedMetadataError, parse_metadata

GOLDEN = Path(__file__).parent / "data/golden"
LIMIT_S = 60
"""For one input; they take milliseconds, but the machine may be busy."""
NATIVE = ("tables", "hdf5")
"""Targets whose readers are written in C or C++, so that a crash would end the process."""

# -- what is done to valid inputs ---------------------------------------------------------------------------------------

# fmt: off
VALUES = [
    *(None, True, False, 0, -1, 3, 2**31, 2**63, -(2**64), 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *("", ".", "..", "../x", "/etc/passwd", "\0", "a" * 300, "{episode_index.__class__}", "{x:99999999d}", "${oc.env:HOME}"),
    *([], {}, [[]], [0], [None], ["x"], {"x": {}}, [{}], [[1, 2], [3]], {"": ""}, "[1,2", "{a:1}", "1,2", "\ud83d"),
]
# fmt: on
values = st.one_of(st.sampled_from(VALUES), st.integers(), st.floats(), st.text(max_size=8))
edits = st.lists(
    st.tuples(st.sampled_from("rdkic"), st.integers(0, 2**16), st.integers(0, 2**16), values), min_size=1, max_size=3
)
cuts = st.lists(
    st.tuples(
        st.sampled_from("foidtc"), st.integers(0, 2**24), st.integers(0, 2**24), st.binary(min_size=1, max_size=9)
    ),
    min_size=1,
    max_size=4,
)


def damaged_bytes(valid: bytes, steps: list) -> bytes:
    """Bits flipped, bytes overwritten, inserted, deleted, the end cut off, a part copied elsewhere."""
    data = bytearray(valid)
    for kind, first, second, new in steps:
        at, length = first % (len(data) + 1), second % 64
        if kind == "f" and at < len(data):
            data[at] ^= 1 << second % 8
        elif kind == "o":
            data[at : at + len(new)] = new
        elif kind == "i":
            data[at:at] = new
        elif kind == "d":
            del data[at : at + length]
        elif kind == "t":
            del data[at:]
        elif kind == "c":
            data[at:at] = data[second % (len(data) + 1) :][:length]
    return bytes(data)


def damaged_tree(valid: Any, steps: list) -> Any:
    """Values replaced, deleted, moved under another key, inserted, copied from elsewhere."""
    tree = copy.deepcopy(valid)
    for kind, first, second, value in steps:
        new = copy.deepcopy(value)
        places = list(_places(tree))
        if not places:
            break
        container, key = places[first % len(places)]
        other, other_key = places[second % len(places)]
        if kind == "r":
            container[key] = new
        elif kind == "d":
            del container[key]
        elif kind == "k" and isinstance(container, dict):
            container[str(new)] = container.pop(key)
        elif kind == "i" and isinstance(container, list):
            container.insert(key, new)
        elif kind == "c":
            container[key] = copy.deepcopy(other[other_key])
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


def damaged_json(valid: Any) -> st.SearchStrategy[bytes]:
    """The text of a JSON value, damaged as a value or as a text."""
    text = json.dumps(valid).encode()
    trees = edits.map(lambda steps: json.dumps(damaged_tree(valid, steps)).encode())
    deep = st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"[]", b"3", b"null", b"", b'"\\ud800"'])
    return st.one_of(trees, trees, trees, cuts.map(lambda steps: damaged_bytes(text, steps)), deep)


# -- who reads them: each gives a strategy, and a function that takes what it draws ---------------------------------------

Target = tuple[st.SearchStrategy, Callable[[Any], object]]


def _overrides(folder: Path) -> Target:
    """Single settings, as they are written on the command line, in every section of a config."""
    fields = [*dataclasses.fields(Config), *dataclasses.fields(SftConfig)]
    owners = {field.default_factory for field in fields if dataclasses.is_dataclass(field.default_factory)}
    owners |= {PlanConfig, CollectConfig, EvaluateConfig}
    sections = sorted(owners, key=lambda owner: owner.__name__)
    keys = st.sampled_from(sections).flatmap(
        lambda owner: st.tuples(
            st.just(owner),
            st.sampled_from([*(field.name for field in dataclasses.fields(owner)), "other", "a.b", "", "1"]),
        )
    )
    parser = OverridesParser.create()

    def read(drawn: Any) -> object:
        (owner, key), value = drawn
        override = parser.parse_overrides([f"{key}={value}"])[0]
        if override.is_sweep_override():
            raise ConfigError("no single value")
        return load_as(owner, OmegaConf.create({override.key_or_group: override.value()}))

    texts = st.one_of(
        values.map(lambda value: value if isinstance(value, str) else json.dumps(value)), st.text(max_size=12)
    )
    return st.tuples(keys, texts), read


def _config(folder: Path) -> Target:
    """Whole configs."""
    plain = {
        Config: to_plain(Config()),
        SftConfig: {"data": {"paths": ["x"]}, "model": {"name": "pi05"}, "sft": {"lr": 1}},
    }

    def read(drawn: Any) -> object:
        schema, steps = drawn
        return load_as(schema, OmegaConf.create(damaged_tree(plain[schema], steps)))

    return st.tuples(st.sampled_from(list(plain)), edits), read


def _safetensors(folder: Path) -> Target:
    """A weight file: its bytes, and its header as a value."""
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c.d": torch.tensor(1)}
    file = folder / "model.safetensors"
    write_safetensors(file, [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()], tensors.__getitem__, {"x": "y"})
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    headers = damaged_json(header).map(lambda text: struct.pack("<Q", len(text)) + text + rest)

    def read(data: bytes) -> object:
        file.write_bytes(data)
        files = CheckpointFiles(folder)
        return [files.read(name) for name in files.tensors]

    return st.one_of(headers, cuts.map(lambda steps: damaged_bytes(content, steps))), read


def _index(folder: Path) -> Target:
    """The index of a checkpoint in shards."""
    for name in "ab":
        write_safetensors(folder / f"{name}.safetensors", [(name, torch.float32, (2,))], lambda _: torch.ones(2))
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}

    def read(data: bytes) -> object:
        (folder / "model.safetensors.index.json").write_bytes(data)
        files = CheckpointFiles(folder)
        return [files.read(name) for name in files.tensors]

    return damaged_json(index), read


def _model_json(folder: Path) -> Target:
    """The JSON files of a model's checkpoint."""
    heads = {"openvla_oft": {"dino_heads": 4, "siglip_heads": 4}, "pi05": {"vision_heads": 4}}
    models, drawn = {}, []
    for name in heads:
        shutil.copytree(GOLDEN / f"{name}_tiny", folder / name)
        models[name] = ModelConfig(name=name, checkpoint=str(folder / name), options=heads[name])
    statistics = {"openvla_oft": "dataset_statistics.json", "pi05": "assets/tiny/libero/norm_stats.json"}
    # One of the two data sets is enough: which of several is meant, a setting tells.
    file = folder / "openvla_oft" / statistics["openvla_oft"]
    file.write_text(json.dumps(dict([next(iter(json.loads(file.read_text()).items()))])))
    for name in heads:
        for one in ("config.json", statistics[name]):
            valid = json.loads((folder / name / one).read_text())
            drawn.append(st.tuples(st.just(name), st.just(one), damaged_json(valid)))

    def read(case: tuple[str, str, bytes]) -> object:
        name, one, data = case
        file = folder / name / one
        valid = file.read_bytes()
        file.write_bytes(data)
        try:
            return open_checkpoint(models[name], with_tokenizer=False)
        finally:
            file.write_bytes(valid)

    return st.one_of(drawn), read


def _json(folder: Path) -> Target:
    """Any JSON file."""
    file = folder / "state.json"
    state = {"policy_version": 3, "cursors": [{"a": 1}], "report": {"x": 0.5}, "files": {"a": 1}}

    def read(data: bytes) -> object:
        file.write_bytes(data)
        return read_object(file, ConfigError)

    return damaged_json(state), read


def _dataset(folder: Path) -> None:
    whole = read_dataset(DataConfig(paths=(str(folder),)))
    for one in whole.episodes:
        for _ in one.read_pictures():
            pass


def _notes(folder: Path) -> Target:
    """The notes of a LeRobot dataset."""
    write_v2(folder / "set", [episode(0, 2), episode(1, 3)])
    files = [folder / "set/meta" / name for name in ("info.json", "tasks.jsonl", "episodes.jsonl")]
    contents = {file: file.read_bytes() for file in files}
    drawn = [st.tuples(st.just(files[0]), damaged_json(json.loads(contents[files[0]])))] * 2
    for file in files[1:]:
        lines = [json.loads(line) for line in contents[file].splitlines()]
        trees = edits.map(lambda steps, lines=lines: damaged_tree(lines, steps))
        texts = trees.map(lambda tree: "\n".join(map(json.dumps, tree)).encode())
        torn = cuts.map(lambda steps, content=contents[file]: damaged_bytes(content, steps))
        drawn.append(st.tuples(st.just(file), st.one_of(texts, texts, torn)))

    def read(case: tuple[Path, bytes]) -> None:
        file, data = case
        file.write_bytes(data)
        try:
            _dataset(folder / "set")
        finally:
            file.write_bytes(contents[file])

    return st.one_of(drawn), read


def _one_of_files(files: list[Path], dataset: Path) -> Target:
    contents = {file: file.read_bytes() for file in files}

    def read(case: tuple[Path, list]) -> None:
        file, steps = case
        file.write_bytes(damaged_bytes(contents[file], steps))
        try:
            _dataset(dataset)
        finally:
            file.write_bytes(contents[file])

    return st.tuples(st.sampled_from(files), cuts), read


def _tables(folder: Path) -> Target:
    """The tables of a LeRobot dataset: notes, numbers and pictures."""
    dataset = write_v3(folder / "set", [episode(0, 2), episode(1, 3)], videos=False, tasks=["a", "b"])
    return _one_of_files(sorted(dataset.rglob("*.parquet")), dataset)


def _hdf5(folder: Path) -> Target:
    """A file of LIBERO's."""
    file = write_libero(folder / "pick_it_demo.hdf5", [episode(seed, 2, actions=7, states=8) for seed in range(2)])
    return _one_of_files([file], file)


def _metadata(folder: Path) -> Target:
    """What a training checkpoint says of itself."""
    with warnings.catch_warnings(action="ignore"):
        save({"model": {"a": torch.ones(2, 3)}, "lr": 0.5, "betas": [1, 2]}, checkpoint_id=folder, no_dist=True)
    content = (folder / ".metadata").read_bytes()
    return cuts, lambda steps: parse_metadata(damaged_bytes(content, steps), folder)


TARGETS: dict[str, tuple[int, Callable[[Path], Target]]] = {
    "overrides": (30_000, _overrides),
    "config": (1_000, _config),
    "safetensors": (12_000, _safetensors),
    "index": (8_000, _index),
    "model_json": (15_000, _model_json),
    "json": (10_000, _json),
    "notes": (20_000, _notes),
    "tables": (2_000, _tables),
    "hdf5": (2_000, _hdf5),
    "metadata": (5_000, _metadata),
}
"""By name: inputs of a whole run, and what makes its valid files in an empty folder."""


def fuzz(name: str, inputs: int, start: int = 0) -> dict[str, Any]:
    """Hand `inputs` inputs to a target, drawn by the seed `start`; how many it accepted, and its errors.

    Raises:
        BaseException: What a reader raised that was not its own error; the input is noted with it.
    """
    taken: Counter[str] = Counter()
    signal.signal(signal.SIGALRM, _give_up)
    with tempfile.TemporaryDirectory() as folder:
        drawn, read = TARGETS[name][1](Path(folder))

        @seed(start)
        @settings(
            max_examples=inputs, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
        )
        @given(drawn)
        def feed(case: Any) -> None:
            signal.alarm(LIMIT_S)
            try:
                read(case)
                taken["accepted"] += 1
            except (ConfigError, DamagedMetadataError, HydraException) as error:
                taken[type(error).__name__] += 1
            finally:
                signal.alarm(0)

        feed()
    return {"target": name, "inputs": sum(taken.values()), **taken}


class TooSlowError(BaseException):
    """A reader hangs."""


def _give_up(*_: object) -> None:
    raise TooSlowError


def fuzz_apart(name: str, inputs: int, start: int, timeout_s: float) -> dict[str, Any]:
    """`fuzz` in a process of its own, which a reader in C may crash."""
    command = [sys.executable, __file__, name, str(inputs), str(start)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if ended.returncode:
        raise AssertionError(f"{name} ended with {ended.returncode}\n{ended.stdout}{ended.stderr}")
    return json.loads(ended.stdout.splitlines()[-1])


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # a file that asks for more is told no
    logging.getLogger("dvla").setLevel(logging.ERROR)
    print(json.dumps(fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
