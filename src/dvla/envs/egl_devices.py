"""Which EGL device is the GPU with a given CUDA index; the two count in different orders."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dvla.envs.errors import EnvironmentSetupError

_CUDA_DEVICE_NV = 0x323A
_DEVICE_UUID_EXT = 0x335C


@dataclass(frozen=True)
class EglDevice:
    """What EGL tells of a device; None where it does not (software, other makers)."""

    cuda: int | None
    """Its CUDA index when all GPUs are visible."""
    uuid: str | None
    """32 lower-case hexadecimal digits."""


def egl_index(cuda: int, query: Callable[[], Sequence[EglDevice]] | None = None) -> int:
    """Index among EGL's devices of the GPU that this process calls CUDA device `cuda`.

    Like CUDA, it counts within CUDA_VISIBLE_DEVICES, be these indices or (beginnings of) UUIDs.

    Raises:
        EnvironmentSetupError: There is no such GPU, or EGL does not know it.
    """
    devices = (query or query_devices)()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in sorted(device.cuda for device in devices if device.cuda is not None)]
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
    if not 0 <= cuda < len(names):
        raise EnvironmentSetupError(
            f"render_device={cuda}: EGL sees {sum(device.cuda is not None for device in devices)} NVIDIA GPUs among "
            f"{len(devices)} devices (CUDA_VISIBLE_DEVICES={visible or 'not set'}): choose another, or render_backend=osmesa"
        )
    name = names[cuda]
    uuid = name.removeprefix("GPU-").replace("-", "").lower()
    for index, device in enumerate(devices):
        if str(device.cuda) == name or (not name.isdecimal() and (device.uuid or "").startswith(uuid)):
            return index
    raise EnvironmentSetupError(f"render_device={cuda}, the GPU {name}, is not among EGL's {len(devices)} devices")


def query_devices() -> list[EglDevice]:
    """Ask EGL for its devices.

    Raises:
        EnvironmentSetupError: There is no EGL, or it cannot list devices.
    """
    before = os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # NVIDIA's EGL might count within it; names above do not
    try:
        egl = ctypes.CDLL("libEGL.so.1")
        egl.eglGetProcAddress.restype = ctypes.c_void_p
        egl.eglGetProcAddress.argtypes = (ctypes.c_char_p,)

        def function(name: bytes, *types: type) -> Callable[..., int]:
            return ctypes.CFUNCTYPE(ctypes.c_uint, *types)(egl.eglGetProcAddress(name))

        handle, number, pointer = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
        handles, count = (handle * 64)(), ctypes.c_int()
        listed = function(b"eglQueryDevicesEXT", number, pointer, pointer)(64, handles, ctypes.byref(count))
        if not listed:
            raise OSError("EGL does not list its devices")
        attribute = function(b"eglQueryDeviceAttribEXT", handle, number, pointer)
        text = ctypes.CFUNCTYPE(ctypes.c_char_p, handle, number)(egl.eglGetProcAddress(b"eglQueryDeviceStringEXT"))
        devices = []
        for device in handles[: count.value]:
            extensions = (text(device, 0x3055) or b"").split()
            cuda, uuid, size = ctypes.c_ssize_t(-1), (ctypes.c_ubyte * 16)(), ctypes.c_int()
            known = b"EGL_NV_device_cuda" in extensions and attribute(device, _CUDA_DEVICE_NV, ctypes.byref(cuda))
            named = b"EGL_EXT_device_persistent_id" in extensions and function(
                b"eglQueryDeviceBinaryEXT", handle, number, number, pointer, pointer
            )(device, _DEVICE_UUID_EXT, 16, uuid, ctypes.byref(size))
            devices.append(EglDevice(cuda.value if known else None, bytes(uuid).hex() if named else None))
        return devices
    except OSError as error:
        raise EnvironmentSetupError(f"EGL cannot be asked for its devices ({error}): install libegl1") from error
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
