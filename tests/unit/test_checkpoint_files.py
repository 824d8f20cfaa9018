"""Reading and writing of weight files: whole, in shards, damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dvla.config import ConfigError
from dvla.models.checkpoint_files import CheckpointFiles, write_safetensors

TENSORS = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "half": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "scalar": torch.tensor(2.5),
    "long": torch.arange(4),
    "empty": torch.zeros(0, 2),
    "naïve": torch.ones(2, 2, dtype=torch.float64).T,
}
PLANS = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]
SHARD_OF = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(TENSORS)}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor] = TENSORS) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


def read_all(files: CheckpointFiles) -> dict[str, Tensor]:
    return {name: files.read(name) for name in files.tensors}


def test_written_file_is_read_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, PLANS, TENSORS.__getitem__, {"format": "pt"})
    assert_same(load_file(path))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    files = CheckpointFiles(tmp_path)
    assert list(files.tensors) == list(TENSORS)
    assert files.metadata == {"format": "pt"}
    assert files.tensors["half"].shape == files.shape("half") == (5, 3)
    assert files.tensors["half"].dtype == torch.bfloat16
    assert_same(read_all(files))


def test_writing_asks_for_one_tensor_at_a_time_in_order(tmp_path: Path) -> None:
    asked = []
    write_safetensors(tmp_path / "x.safetensors", PLANS, lambda name: asked.append(name) or TENSORS[name])
    assert asked == list(TENSORS)


@pytest.mark.parametrize("other", [torch.zeros(5, 3), torch.zeros(3, 5).bfloat16()])
def test_writing_another_tensor_than_stated_leaves_nothing(tmp_path: Path, other: Tensor) -> None:
    with pytest.raises(ValueError, match=r"half is .*, not torch.bfloat16 \(5, 3\)"):
        write_safetensors(tmp_path / "x.safetensors", PLANS, (TENSORS | {"half": other}).__getitem__)
    assert not list(tmp_path.iterdir())


def write_shards(folder: Path) -> None:
    for shard in dict.fromkeys(SHARD_OF.values()):
        plans = [plan for plan in PLANS if SHARD_OF[plan[0]] == shard]
        write_safetensors(folder / shard, plans, TENSORS.__getitem__)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": SHARD_OF}))


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    assert_same(read_all(CheckpointFiles(tmp_path)))


def fails(folder: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        CheckpointFiles(folder)
    assert str(caught.value).startswith(f"model.checkpoint={folder}: ")


def test_no_weights(tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", "no such folder")
    (tmp_path / "pytorch_model.bin").touch()
    fails(tmp_path, "no model.safetensors nor model.safetensors.index.json; it holds pytorch_model.bin")


def test_damaged_files(tmp_path: Path) -> None:
    write_shards(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    fails(tmp_path, f"{shard.name} is damaged: it has {len(content) - 1} bytes, its header says {len(content)}")
    shard.write_bytes(content[:20])
    fails(tmp_path, f"{shard.name} cannot be read")
    shard.write_bytes(content[:5])
    fails(tmp_path, f"{shard.name} cannot be read")
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    fails(tmp_path, f"{shard.name} cannot be read")
    save_file({"other": torch.zeros(1)}, shard)
    fails(tmp_path, f"half is not in {shard.name}")
    shard.unlink()
    fails(tmp_path, f"{shard.name}, named in model.safetensors.index.json, is missing")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    fails(tmp_path, "has no weight_map")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    fails(tmp_path, "cannot be read")


def test_shards_of_other_folders_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    write_safetensors(tmp_path / "other.safetensors", PLANS, TENSORS.__getitem__)
    index = tmp_path / "theirs" / "model.safetensors.index.json"
    for name in ("../other.safetensors", str(tmp_path / "other.safetensors")):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, name)}))
        fails(tmp_path / "theirs", "leads out of")


@pytest.mark.parametrize(
    "change", [{"shape": [3, 5, 2]}, {"shape": [-5, -3]}, {"data_offsets": [33, 3]}, {"dtype": "F3"}]
)
def test_a_header_that_contradicts_itself(tmp_path: Path, change: dict) -> None:
    header = {"half": {"dtype": "BF16", "shape": [5, 3], "data_offsets": [0, 30]} | change}
    encoded = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(30))
    fails(tmp_path, "model.safetensors cannot be read")


@pytest.mark.parametrize("zipped", [True, False])
def test_additional_files(tmp_path: Path, zipped: bool) -> None:
    write_safetensors(tmp_path / "model.safetensors", PLANS, TENSORS.__getitem__)
    extra = {"fc1.weight": torch.ones(2, 2).bfloat16(), "fc1.bias": torch.zeros(2)}
    state = {f"module.{name}": tensor for name, tensor in extra.items()}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    save_file(extra, tmp_path / "b.safetensors")
    files = CheckpointFiles(tmp_path)
    files.add(tmp_path / "a.pt", prefix="a.")
    files.add(tmp_path / "b.safetensors", prefix="b.")
    expected = TENSORS | {f"{file}.{name}": tensor for file in "ab" for name, tensor in extra.items()}
    assert_same(read_all(files), expected)
    with pytest.raises(ConfigError, match=r"b\.fc1\..* is in b.safetensors and in b.safetensors"):
        files.add(tmp_path / "b.safetensors", prefix="b.")
    (tmp_path / "c.pt").write_bytes(b"no pickle")
    with pytest.raises(ConfigError, match=r"c\.pt cannot be read"):
        files.add(tmp_path / "c.pt")


def test_lookups(tmp_path: Path) -> None:
    save_file({f"blocks.{i}.weight": torch.zeros(1) for i in (0, 2, 10)}, tmp_path / "model.safetensors")
    files = CheckpointFiles(tmp_path)
    assert files.count("blocks.") == 11
    assert files.count("layers.") == 0
    with pytest.raises(ConfigError, match="tensor x is missing"):
        files.shape("x")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        files.read_json("config.json")
