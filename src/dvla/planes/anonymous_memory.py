"""Shared memory without a name: gone when the last process that has it is, and for this user's processes only."""

from __future__ import annotations

import os


def create_anonymous_memory(name: str, num_bytes: int) -> int:
    """Make a file of zeros in memory; the caller has looked whether there is room for it.

    Returns:
        Its file descriptor.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)  # the name is shown in /proc only
    os.fchmod(descriptor, 0o600)  # other users could open it by /proc/PID/fd
    os.ftruncate(descriptor, num_bytes)
    return descriptor
