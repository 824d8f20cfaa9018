"""Names that a file gives to other files: they must lie in the folder that the file came with."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def inside(folder: Path, name: object) -> Path:
    """The file `name` of `folder`, going by the name alone: a link, as Hugging Face's cache is made of, may lead elsewhere.

    Raises:
        ValueError: The name is none, or could lead out of the folder.
    """
    if not isinstance(name, str):
        raise ValueError(f"{type(name).__name__} is no file name")
    if "\0" in name or not PurePosixPath(name).name:
        raise ValueError(f"{name!r} is no file name")
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name!r} leads out of {folder}")
    return folder / name
