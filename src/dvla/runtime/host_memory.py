"""How much of the host's memory a process has and may still take: all, or less where a cgroup (container, job) says so."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


class HostMemory:
    """The memory of this machine as this process sees it; sizes in bytes."""

    def free(self) -> int:
        """What all processes of the cgroup together can still take."""
        return max(0, min([psutil.virtual_memory().available, *cgroup_rooms(_OWN_CGROUPS, _CGROUPS)]))

    def own(self) -> int:
        """What this process has for itself: neither memory it shares with others nor its programs' files."""
        info = psutil.Process().memory_info()
        return info.rss - info.shared

    def unused(self) -> int:
        """The part of it that the C library keeps for later; 0 where it does not tell."""
        heap = heap_account()
        return heap.fordblks if heap else 0


class HeapAccount(ctypes.Structure):
    """What `mallinfo2` returns, in bytes: `fordblks` are free, `uordblks` and, as mappings of their own, `hblkhd` in use."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def heap_account() -> HeapAccount | None:
    """The C library's account of the heap of this process; None where it gives none."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc from 2.33
    if mallinfo is None:
        return None
    mallinfo.restype = HeapAccount
    account: HeapAccount = mallinfo()
    return account


def cgroup_rooms(own: Path, mount: Path) -> Iterator[int]:
    """What the limit of each memory cgroup of this process leaves, itself and those around it.

    Args:
        own: ``/proc/self/cgroup``: lines ``number:controllers:path``, the controllers empty for version 2.
        mount: Where cgroups are mounted; those of version 1 have a folder ``memory`` there.
    """
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root = mount / "memory"
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if (group / limit).is_file() and (group / usage).is_file():
                text = (group / limit).read_text().strip()
                if text != "max":
                    yield int(text) - int((group / usage).read_text()) + _reclaimable(group / "memory.stat", cache)
            if group == root:
                break


def _reclaimable(stat: Path, key: str) -> int:
    """Pages of files that are not in use: counted as used, but given up at once."""
    if stat.is_file():
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0
