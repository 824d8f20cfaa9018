"""Files that are there whole or not at all, whenever the process is killed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, pieces: Iterable[str]) -> None:
    """Write text to a new file beside `path` and move it there, making the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # what fits of it would keep a full disk full
        raise
