"""How a rank says that it failed: one line for people, a file for the other ranks, torchrun's error file for torchrun."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SETTLE_S = 0.5  # the ranks of a run fail within moments of each other: give the first one time to write its file


def describe(error: BaseException) -> str:
    """The error in one line, with what was noted on its way (`BaseException.add_note`)."""
    text = " ".join(str(error).split())
    text += "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def tell_torchrun(message: str) -> None:
    """Put the message where torchrun's own report at the end shows it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with open(path, "w") as file:  # noqa: PTH123 - torchrun's path, may be a device
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def first_failure(folder: Path, rank: int, message: str) -> tuple[int, str]:
    """Leave this rank's failure in `folder` and find the earliest of all ranks, the one that caused the others.

    Returns:
        (rank, message) of the earliest failure.
    """
    mine = folder / f"failure_rank{rank:05d}.json"
    temporary = mine.with_suffix(".tmp")
    temporary.write_text(json.dumps({"time": time.time(), "rank": rank, "message": message}))
    temporary.replace(mine)
    time.sleep(_SETTLE_S)
    failures = [json.loads(path.read_text()) for path in folder.glob("failure_rank*.json")]
    first = min(failures, key=lambda failure: failure["time"])
    return first["rank"], first["message"]
