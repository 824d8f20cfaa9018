"""A process that stands still where it is until somebody has seen it there: tests hit a moment exactly, without guessing."""

from __future__ import annotations

import os
import time
from pathlib import Path


def stand(file: Path, seconds: float = 60.0) -> None:
    """Write this process's id to `file` and wait until somebody removes it.

    Raises:
        TimeoutError: Nobody did.
    """
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    aside.write_text(str(os.getpid()))
    aside.rename(file)  # whoever sees it can read it
    deadline = time.monotonic() + seconds
    while file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody removed {file}")
        time.sleep(0.01)
