"""JSON from files that anyone may have written: one kind of error, whatever is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parse(text: str | bytes) -> Any:
    """The value that `text` spells.

    Raises:
        ValueError: It is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_object(path: Path, error: Callable[[str], Exception]) -> dict[str, Any]:
    """The object that a file holds; raises `error` of a message if there is no file, or no object in it."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise error(f"{path} cannot be read ({reason})") from reason
    if not isinstance(content, dict):
        raise error(f"{path} holds no object")
    return content
