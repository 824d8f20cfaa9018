"""Reads checkpoints of torch.distributed.checkpoint without running what they hold.

torch unpickles ``.metadata`` and single values as they are, so that a folder from elsewhere could run any code. Here both are
limited to the plain types that such checkpoints are made of, and the files they name to their own folder.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from dvla.runtime.confined_path import inside

_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},  # a name, looked up among layouts
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
}
_WASTEFUL = {"PUT", "BINPUT", "LONG_BINPUT"}
"""Of older protocols; a few bytes can ask for gigabytes."""


class DamagedMetadataError(ValueError):
    """``.metadata`` is damaged, or holds what no checkpoint of ours does."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only what metadata are made of."""
        if name in _TYPES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


def parse_metadata(data: bytes, folder: Path) -> Metadata:
    """What a checkpoint says of itself.

    Args:
        data: Content of its ``.metadata``.
        folder: Where it lies.

    Raises:
        DamagedMetadataError: It is not of the one form that torch writes.
    """
    try:
        if foreign := {op.name for op, _, _ in pickletools.genops(data)} & _WASTEFUL:
            raise pickle.UnpicklingError(f"{', '.join(sorted(foreign))} does not belong there")
        metadata = _Unpickler(io.BytesIO(data)).load()
        _check(metadata, folder)
    except Exception as error:  # unpickling fails in many ways
        raise DamagedMetadataError(f"{folder / '.metadata'} cannot be read ({error})") from error
    return metadata


def _check(metadata: Any, folder: Path) -> None:
    """Raise what comes if a part is of another kind than torch takes it to be."""
    _require(metadata, Metadata)
    for name, entry in metadata.state_dict_metadata.items():
        _require(name, str)
        _require(entry, TensorStorageMetadata, BytesStorageMetadata)
        if isinstance(entry, TensorStorageMetadata):
            _require(entry.size, torch.Size)
            _require(entry.properties.dtype, torch.dtype)
            for chunk in entry.chunks:
                _require(chunk, ChunkStorageMetadata)
                _require(chunk.sizes, torch.Size)
                _require(chunk.offsets, torch.Size)
    for index, place in metadata.storage_data.items():
        _require(index, MetadataIndex)
        inside(folder, place.relative_path)
        if min(place.offset, place.length) < 0 or place.transform_descriptors:
            raise ValueError(f"{index.fqn} lies nowhere")
    _require(metadata.storage_meta, StorageMeta, type(None))


def _require(value: object, *kinds: type) -> None:
    if type(value) not in kinds:
        raise TypeError(f"{type(value).__name__} instead of {kinds[0].__name__}")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As torch's own, but for the unpickling; the caller has checked that the folder is complete."""
        metadata = parse_metadata(Path(self._get_metadata_path(kwargs.get("rank"))).read_bytes(), Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As torch's own, but for values of plain types only."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def reader(folder: Path) -> FileSystemReader:
    """For `torch.distributed.checkpoint.load`: reads a folder's files; raises DamagedMetadataError in it."""
    return _Reader(folder)


def planner() -> DefaultLoadPlanner:
    """For `torch.distributed.checkpoint.load`: puts values into a state dict."""
    return _Planner()
