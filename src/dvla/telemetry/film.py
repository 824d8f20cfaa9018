"""A strip of what the policy saw: the frames of one episode side by side, a row per camera."""

from __future__ import annotations

from pathlib import Path

import numpy as np

_MIN_HEIGHT = 128  # pixels; smaller frames are magnified for the human eye


def film_strip(frames: np.ndarray) -> np.ndarray:
    """Lay frames out in one picture.

    Args:
        frames: (T, cameras, H, W, 3) uint8.

    Returns:
        (cameras * H', T * W', 3) uint8, magnified by a whole number.
    """
    scale = max(1, -(-_MIN_HEIGHT // frames.shape[2]))
    rows = frames.transpose(1, 2, 0, 3, 4).reshape(frames.shape[1] * frames.shape[2], -1, 3)
    return rows.repeat(scale, 0).repeat(scale, 1)


def save_film(path: Path, frames: np.ndarray) -> None:
    """Write a film strip as PNG, or leave none; raises OSError."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        Image.fromarray(film_strip(frames)).save(path)
    except OSError:
        path.unlink(missing_ok=True)
        raise
