"""Messages of plain values and arrays, as openpi's client packs them: MessagePack, never pickle.

An array is a map of ``__ndarray__``, ``data``, ``dtype`` and ``shape``, a NumPy scalar one of ``__npgeneric__``, ``data`` and
``dtype``; these keys are bytes, so that no text is taken for one.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

_KINDS = "biuf"  # arrays of booleans and real numbers: others could hold pointers, or mean something else elsewhere


def pack(message: Any) -> bytes:
    """To bytes; what is no plain value and no array of numbers is a `TypeError`."""
    return msgpack.packb(message, default=_as_map)


def unpack(data: bytes) -> Any:
    """From bytes of anybody; arrays are read-only.

    Raises:
        ValueError: They are no such message.
        TypeError: Likewise.
    """
    return msgpack.unpackb(data, object_hook=_as_array)


def _as_map(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in _KINDS:
        raise TypeError(f"cannot be sent: {type(value).__name__} {getattr(value, 'dtype', '')}")
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def _as_array(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return np.frombuffer(value[b"data"], _dtype(value)).reshape(value[b"shape"])
    if b"__npgeneric__" in value:
        return _dtype(value).type(value[b"data"])
    return value


def _dtype(value: dict[Any, Any]) -> np.dtype:
    dtype = np.dtype(str(value[b"dtype"]))
    if dtype.kind not in _KINDS:
        raise ValueError(f"arrays of {dtype} are not taken")
    return dtype
