"""A file that grows by lines, and what becomes of them while the disk is full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_MAX_BYTES = 64 * 2**20


class LineFile:
    """Every line is with the system once `add` returns. What a full disk refuses waits for the next line, 64 MiB at most.

    Args:
        path: The file; made with the first line.
        warn: Told when lines begin to wait, and when some are lost.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn = path, warn
        self._waiting = b""

    @property
    def is_behind(self) -> bool:
        """Whether lines wait."""
        return bool(self._waiting)

    def add(self, line: str) -> None:
        """Append a line, after those that wait."""
        was_behind, new = self.is_behind, f"{line}\n".encode()
        self._waiting += new
        error = self._write()
        if error is not None and not was_behind:
            self._warn(f"{self._path} cannot be written, its lines wait until there is room: {error}")
        if len(self._waiting) > _MAX_BYTES:
            self._waiting = self._waiting[: -len(new)]

    def close(self) -> None:
        """Try a last time to write what waits."""
        error = self._write()
        if error is not None:
            self._warn(f"the last lines of {self._path} are lost: {error}")
            self._waiting = b""

    def _write(self) -> OSError | None:
        try:
            if self._waiting:
                with self._path.open("ab", buffering=0) as file:  # no buffer: what has been taken is known to the byte
                    while self._waiting:
                        self._waiting = self._waiting[file.write(self._waiting) :]
        except OSError as error:
            return error
        return None
