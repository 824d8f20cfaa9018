"""Picture resizing that equals, to the byte, what published checkpoints were trained and are evaluated with.

Resizing follows Pillow and cropping follows TensorFlow, both on whole batches and on any device. A tensor library's own
antialiased resize differs from Pillow by a grey level, which is enough to change sampled actions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Filter = Literal["bilinear", "bicubic"]
"""How a resized pixel is interpolated; both filters widen when shrinking, that is, they antialias."""

_FRACTION_BITS = 22  # of Pillow's fixed-point coefficients
_SUPPORT: dict[Filter, float] = {"bilinear": 1.0, "bicubic": 2.0}


def resize(images: Tensor, size: tuple[int, int], filter: Filter) -> Tensor:
    """Stretch pictures to a size, as ``PIL.Image.resize`` does: along the width first, then along the height.

    Pillow 13 takes the height first where that shrinks much more than the width; what was trained before it did not.

    Args:
        images: uint8 (N, H, W, 3).
        size: New height and width in pixels, both > 0.
        filter: Interpolation.

    Returns:
        uint8 (N, height, width, 3) on the same device; `images` itself if it has that size.
    """
    _require_pictures(images)
    if min(size) < 1:
        raise ValueError(f"pictures of {images.shape[1]} × {images.shape[2]} cannot become {size[0]} × {size[1]}")
    for dim, new, product in ((2, size[1], "ow,nhwc->nhoc"), (1, size[0], "oh,nhwc->nowc")):
        if images.shape[dim] != new:
            weights = _coefficients(images.shape[dim], new, filter, images.device)
            images = _to_bytes(torch.einsum(product, weights, images.double()))
    return images


def resize_with_pad(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Fit pictures into a size: bilinear, aspect kept, centred on black, as openpi does.

    Args:
        images: uint8 (N, H, W, 3).
        size: New height and width in pixels, both > 0.

    Returns:
        uint8 (N, height, width, 3) on the same device; `images` itself if it has that size.
    """
    _require_pictures(images)
    old = images.shape[1:3]
    if tuple(old) == size:
        return images
    ratio = max(old[1] / size[1], old[0] / size[0])
    height, width = int(old[0] / ratio), int(old[1] / ratio)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    padded = images.new_zeros(len(images), *size, 3)
    padded[:, top : top + height, left : left + width] = resize(images, (height, width), "bilinear")
    return padded


def center_crop(images: Tensor, area: float = 0.9) -> Tensor:
    """The middle of pictures, enlarged to the old size, as the evaluation of OpenVLA-OFT does with TensorFlow.

    Args:
        images: uint8 (N, H, W, 3).
        area: Part of the picture's area that is kept, in (0, 1]. The aspect stays.

    Returns:
        uint8 (N, H, W, 3) on the same device.
    """
    _require_pictures(images)
    if not 0 < area <= 1:
        raise ValueError(f"area must be in (0, 1], got {area}")
    pixels = images.float() * (1 / 255)
    for dim in (2, 1):
        below, above, part = _crop_positions(images.shape[dim], area, images.device)
        first = pixels.index_select(dim, below)
        pixels = first + (pixels.index_select(dim, above) - first) * part.view(-1, *[1] * (3 - dim))
    # TensorFlow scales by 255.5 and truncates, instead of rounding.
    return (pixels.clamp(0, 1) * 255.5).to(torch.uint8)


def _require_pictures(images: Tensor) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        raise ValueError(f"expected uint8 pictures (N, H, W, 3), got {images.dtype} {tuple(images.shape)}")


@lru_cache(maxsize=64)
def _coefficients(old: int, new: int, filter: Filter, device: torch.device) -> Tensor:
    """Fixed-point weights of old pixels in new ones, whole numbers as float64 (new, old).

    Their products with bytes stay far below 2^53, so float64 sums of them are exact in any order and on any device.
    """
    scale = old / new
    stretch = max(scale, 1.0)
    centers = (torch.arange(new, dtype=torch.float64) + 0.5) * scale
    x = ((torch.arange(old, dtype=torch.float64) - centers[:, None] + 0.5) * (1 / stretch)).abs()
    if filter == "bilinear":
        weights = 1 - x
    else:
        a = -0.5
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = (((x - 5) * x + 8) * x - 4) * a
        weights = torch.where(x < 1, near, far)
    weights = torch.where(x < _SUPPORT[filter], weights, 0)
    weights = weights / weights.cumsum(dim=1)[:, -1:]
    rounded = (weights * (1 << _FRACTION_BITS) + torch.where(weights < 0, -0.5, 0.5)).trunc()
    return rounded.to(device)


def _to_bytes(sums: Tensor) -> Tensor:
    """Fixed point, float64, to uint8, rounding halves up."""
    half, one = 1 << (_FRACTION_BITS - 1), 1 << _FRACTION_BITS
    return sums.add_(half).div_(one).floor_().clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=64)
def _crop_positions(side: int, area: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where the new pixels of one axis lie in the old: neighbours int64 (side,), part of the second float32 (side,)."""
    # Everything in float32 and in the order of TensorFlow, for equal bits; but torch's float32 root can be a bit off.
    length = torch.tensor(area, dtype=torch.float32).double().sqrt().float()
    start = (1 - length) / 2
    last = side - 1
    step = (start + length - start) * last / max(last, 1)
    positions = start * last + torch.arange(side, dtype=torch.float32) * step
    below, above = positions.floor(), positions.ceil().clamp(max=last)
    return below.long().to(device), above.long().to(device), (positions - below).to(device)
