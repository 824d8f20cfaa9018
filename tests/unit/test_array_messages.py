"""Messages in the format of openpi's client: as it packs them, and nothing that could do harm."""

import msgpack
import numpy as np
import pytest

from dvla.serving.array_messages import pack, unpack

ARRAY = {b"__ndarray__": True, b"data": b"\1\0\2\0", b"dtype": "<i2", b"shape": (2,)}


def test_what_is_packed_comes_back():
    message = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [np.zeros((0, 4), np.uint8), np.float32(0.5)]}
    got = unpack(pack({**message, "c": "text", "d": None, "e": 3}))
    assert got["a"].dtype == np.float32
    np.testing.assert_array_equal(got["a"], message["a"])
    assert (got["b"][0].shape, got["b"][0].dtype) == ((0, 4), np.uint8)
    assert (got["b"][1], type(got["b"][1])) == (0.5, np.float32)
    assert (got["c"], got["d"], got["e"]) == ("text", None, 3)


def test_the_format_is_the_clients():
    np.testing.assert_array_equal(unpack(msgpack.packb(ARRAY)), [1, 2])
    assert msgpack.unpackb(pack(np.array([1, 2], "<i2"))) == {**ARRAY, b"shape": [2]}
    scalar = {b"__npgeneric__": True, b"data": 2.0, b"dtype": "<f4"}
    assert msgpack.unpackb(pack(np.float32(2))) == scalar
    assert unpack(msgpack.packb(scalar)) == np.float32(2)


@pytest.mark.parametrize(
    "change",
    [
        {b"dtype": "|O"},
        {b"dtype": "|V2"},
        {b"dtype": "<U1"},
        {b"dtype": "i2,i2"},
        {b"dtype": "no such"},
        {b"shape": (3,)},
        {b"data": b"\1"},
        {b"data": "text"},
    ],
)
def test_arrays_that_are_none_are_refused(change):
    with pytest.raises((ValueError, TypeError)):
        unpack(msgpack.packb(ARRAY | change))


@pytest.mark.parametrize("value", [np.array([None]), np.array(["a"]), np.complex64(1), object()])
def test_what_the_client_cannot_read_is_not_sent(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        pack({"a": value})
