"""Resizing equals Pillow, openpi and TensorFlow's crop to the byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from dvla.models.resize import center_crop, resize, resize_with_pad

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
SIDES = st.integers(1, 150)


def pictures(height: int, width: int, seed: int = 0, *, number: int = 2) -> torch.Tensor:
    """Noise, and noise of black and white only, which makes the bicubic filter overshoot."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (number, height, width, 3), generator=generator, dtype=torch.uint8)
    images[-1] = (images[-1] > 127) * 255
    return images


def by_pillow(images: torch.Tensor, size: tuple[int, int], filter: str) -> torch.Tensor:
    # Two calls, because Pillow 13 swaps the passes for some shapes.
    wide = [Image.fromarray(x.numpy()).resize((size[1], x.shape[0]), PILLOW[filter]) for x in images]
    new = [x.resize(size[::-1], PILLOW[filter]) for x in wide]
    return torch.from_numpy(np.stack([np.asarray(x) for x in new]))


@pytest.mark.parametrize("filter", PILLOW)
@settings(max_examples=60, deadline=None)
@given(old=st.tuples(SIDES, SIDES), new=st.tuples(SIDES, SIDES), seed=st.integers(0, 1000))
def test_resize_equals_pillow(filter, old, new, seed):
    images = pictures(*old, seed)
    assert torch.equal(resize(images, new, filter), by_pillow(images, new, filter))


@pytest.mark.parametrize("filter", PILLOW)
@pytest.mark.parametrize(
    ("old", "new"),
    [((480, 640), (224, 224)), ((256, 256), (224, 224)), ((128, 128), (224, 224)), ((300, 224), (224, 224))],
)
def test_resize_equals_pillow_at_the_sizes_in_use(filter, old, new):
    images = pictures(*old)
    expected = [np.asarray(Image.fromarray(x.numpy()).resize(new[::-1], PILLOW[filter])) for x in images]
    assert torch.equal(resize(images, new, filter), torch.from_numpy(np.stack(expected)))


def test_pictures_of_the_right_size_are_passed_through():
    images = pictures(8, 6)
    assert resize(images, (8, 6), "bicubic") is images
    assert resize_with_pad(images, (8, 6)) is images


def test_views_and_empty_batches():
    images = pictures(20, 31)
    rotated = images.flip(1, 2)
    assert torch.equal(resize(rotated, (13, 40), "bicubic"), by_pillow(rotated, (13, 40), "bicubic"))
    assert resize(images[:0], (7, 5), "bilinear").shape == (0, 7, 5, 3)


@settings(max_examples=40, deadline=None)
@given(
    old=st.tuples(st.integers(20, 120), st.integers(20, 120)), new=st.tuples(st.integers(10, 90), st.integers(10, 90))
)
def test_resize_with_pad_equals_openpi(old, new):
    images = pictures(*old, number=1)
    ratio = max(old[1] / new[1], old[0] / new[0])
    height, width = int(old[0] / ratio), int(old[1] / ratio)
    canvas = Image.new("RGB", new[::-1])
    small = Image.fromarray(by_pillow(images, (height, width), "bilinear")[0].numpy())
    canvas.paste(small, (max(0, int((new[1] - width) / 2)), max(0, int((new[0] - height) / 2))))
    assert torch.equal(resize_with_pad(images, new)[0], torch.from_numpy(np.array(canvas)))


def crop_like_tensorflow(image: np.ndarray, area: float) -> np.ndarray:
    """One picture, pixel by pixel: `convert_image_dtype`, `crop_and_resize`, `convert_image_dtype`."""
    f = np.float32
    length = np.sqrt(f(area))
    start = (f(1) - length) / f(2)
    height, width, _ = image.shape
    source, out = image.astype(f) * f(1 / 255), np.zeros_like(image)
    y_step, x_step = ((start + length - start) * f(n - 1) / f(max(n - 1, 1)) for n in (height, width))
    for i in range(height):
        y = start * f(height - 1) + f(i) * y_step
        top, bottom = int(np.floor(y)), int(np.ceil(y))
        for j in range(width):
            x = start * f(width - 1) + f(j) * x_step
            left, right = int(np.floor(x)), int(np.ceil(x))
            above = source[top, left] + (source[top, right] - source[top, left]) * (x - f(left))
            below = source[bottom, left] + (source[bottom, right] - source[bottom, left]) * (x - f(left))
            value = above + (below - above) * (y - f(top))
            out[i, j] = np.floor(np.clip(value, f(0), f(1)) * f(255.5))
    return out


@pytest.mark.parametrize(("height", "width", "area"), [(56, 56, 0.9), (31, 48, 0.9), (20, 20, 0.5), (1, 9, 0.9)])
def test_center_crop_equals_tensorflow(height, width, area):
    images = pictures(height, width)
    expected = np.stack([crop_like_tensorflow(x, area) for x in images.numpy()])
    assert torch.equal(center_crop(images, area), torch.from_numpy(expected))


def test_center_crop_keeps_the_whole_and_flat_colours():
    images = pictures(24, 17)
    assert torch.equal(center_crop(images, 1.0), images)
    flat = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 12, 12, 3)
    assert torch.equal(center_crop(flat), flat)


def test_refuses_what_are_no_pictures():
    with pytest.raises(ValueError, match="uint8 pictures"):
        resize(torch.zeros(1, 4, 4, 3), (2, 2), "bilinear")
    with pytest.raises(ValueError, match="uint8 pictures"):
        center_crop(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="1 × 400 cannot become 0 × 100"):
        resize_with_pad(pictures(1, 400), (100, 100))
    with pytest.raises(ValueError, match="area"):
        center_crop(pictures(4, 4), 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_gives_the_same_bytes():
    images = pictures(240, 320)
    for function in (lambda x: resize(x, (224, 224), "bicubic"), lambda x: resize_with_pad(x, (224, 224)), center_crop):
        assert torch.equal(function(images.cuda()).cpu(), function(images))


def test_recorded_pictures_of_openpi():
    recorded = np.load(GOLDEN / "pi05_tiny" / "preprocess.npz")
    for name in ("base_image", "wrist_image"):
        image, expected = (torch.from_numpy(recorded[f"{x}.{name}"])[None] for x in ("raw", "resized_uint8"))
        assert torch.equal(resize_with_pad(image, (56, 56)), expected)


def test_recorded_pictures_of_openvla_oft():
    recorded = load_file(GOLDEN / "openvla_oft_tiny" / "inputs.safetensors")
    for i in range(3):
        image = recorded[f"image.{i}.primary_uint8"][None]
        assert torch.equal(resize(image, (56, 56), "bicubic")[0], recorded[f"image.{i}.primary_resized_uint8"])
