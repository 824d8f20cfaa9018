"""The weight files of a checkpoint: safetensors, whole or in shards, read and written one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dvla.config import ConfigError
from dvla.runtime.confined_path import inside
from dvla.runtime.json_file import parse

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TensorPlan = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor that is to be written."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    key: str
    """Its name within the file."""


class CheckpointFiles:
    """The tensors of a folder: ``model.safetensors``, or shards and their index.

    Opening reads headers only. At most one tensor is in memory at a time, if the caller keeps none.

    Args:
        folder: The checkpoint's folder.

    Raises:
        ConfigError: There are no weights in it, or they are not whole.
    """

    tensors: dict[str, TensorInfo]
    """By name, in the order of the files."""
    metadata: dict[str, str]
    """Free text that the weight files carry."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tensors, self.metadata = folder, {}, {}
        self._open: dict[Path, Any] = {}
        if not folder.is_dir():
            raise self.error("no such folder")
        if (folder / SINGLE_FILE).exists():
            self.add(folder / SINGLE_FILE)
        elif (folder / INDEX_FILE).exists():
            self._add_shards()
        else:
            there = listed(sorted(path.name for path in folder.iterdir()))
            raise self.error(f"no {SINGLE_FILE} nor {INDEX_FILE}; it holds {there or 'nothing'}")

    def error(self, message: str) -> ConfigError:
        """An error that names the folder."""
        return ConfigError(f"model.checkpoint={self.folder}: {message}")

    def read_json(self, name: str) -> Any:
        """Content of a JSON file of the folder; raises ConfigError if it is not there or no JSON."""
        try:
            return parse((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise self.error(f"no {name}") from None
        except (OSError, ValueError) as error:
            raise self.error(f"{name} cannot be read ({error})") from error

    def add(self, path: Path, prefix: str = "") -> None:
        """Add the tensors of another file, of safetensors or of `torch.save`, with `prefix` before their names.

        Raises:
            ConfigError: It cannot be read, or a name is there already.
        """
        found = self._safetensors_header(path) if path.suffix == ".safetensors" else self._load_torch(path)
        for name, info in found.items():
            if prefix + name in self.tensors:
                raise self.error(f"{prefix + name} is in {path.name} and in {self.tensors[prefix + name].file.name}")
            self.tensors[prefix + name] = info

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; raises ConfigError if there is none of that name."""
        if name not in self.tensors:
            raise self.error(f"tensor {name} is missing")
        return self.tensors[name].shape

    def count(self, prefix: str) -> int:
        """How many blocks there are, going by the highest number that follows `prefix` in a name."""
        rests = (name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix))
        numbers = (rest.split(".")[0] for rest in rests)
        return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU; its bytes may belong to the file, so they must not be changed.

        Raises:
            ConfigError: It cannot be read.
        """
        info = self.tensors[name]
        try:
            if info.file not in self._open:
                self._open[info.file] = safe_open(info.file, framework="pt")
            file = self._open[info.file]
            return file[info.key] if isinstance(file, dict) else file.get_tensor(info.key)
        except (OSError, SafetensorError) as error:
            raise self.error(f"{name} of {info.file.name} cannot be read ({error})") from error

    def _add_shards(self) -> None:
        index = self.read_json(INDEX_FILE)
        shard_of = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(shard_of, dict):
            raise self.error(f"{INDEX_FILE} has no weight_map")
        for shard in dict.fromkeys(map(str, shard_of.values())):
            try:
                path = inside(self.folder, shard)
                is_there = path.is_file()
            except (OSError, ValueError) as error:
                raise self.error(f"{INDEX_FILE}: {error}") from error
            if not is_there:
                raise self.error(f"{shard}, named in {INDEX_FILE}, is missing")
            found = self._safetensors_header(path)
            named = {name for name, place in shard_of.items() if place == shard}
            if absent := sorted(named - set(found)):
                raise self.error(f"{absent[0]} is not in {shard}, where {INDEX_FILE} says it is")
            if stray := sorted(set(found) - named):
                raise self.error(f"{shard} holds {stray[0]}, which {INDEX_FILE} does not name")
            self.tensors |= found

    def _safetensors_header(self, path: Path) -> dict[str, TensorInfo]:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > size:
                    raise ValueError(f"its header should be {length} bytes long")
                header = parse(file.read(length))
            self.metadata |= header.pop("__metadata__", {})
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            found = {name: _tensor_info(path, name, entry) for name, entry in header.items()}
        except Exception as error:  # a header may hold anything
            raise self.error(f"{path.name} cannot be read ({error})") from error
        if end != size:
            raise self.error(f"{path.name} is damaged: it has {size} bytes, its header says {end}")
        return found

    def _load_torch(self, path: Path) -> dict[str, TensorInfo]:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path) or None)
            self._open[path] = state
            return {
                key.removeprefix("module."): TensorInfo(tuple(tensor.shape), tensor.dtype, path, key)
                for key, tensor in state.items()
            }
        except Exception as error:  # unpickling fails in many ways
            raise self.error(f"{path.name} cannot be read ({error})") from error


def _tensor_info(path: Path, name: str, entry: Mapping[str, Any]) -> TensorInfo:
    """A tensor by its entry in the header of `path`; raises what comes if that is damaged."""
    shape, dtype = tuple(torch.Size(entry["shape"])), _DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    if min((begin, *shape)) < 0 or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{name} of shape {shape} cannot take up bytes {begin} to {end}")
    return TensorInfo(shape, dtype, path, name)


def write_safetensors(
    path: Path, tensors: Sequence[TensorPlan], read: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file without ever holding more than one tensor.

    The file appears under its name once it is whole.

    Args:
        path: The file; one that is there is replaced.
        tensors: What it will hold, in this order.
        read: Gives the tensor of a name; called once for each, in order.
        metadata: Free text to go with it.

    Raises:
        ValueError: A tensor is not as stated.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            for name, dtype, shape in tensors:
                tensor = read(name).detach()
                if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                    raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
                file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def listed(names: Sequence[str]) -> str:
    """The first ten names, and how many more there are."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
