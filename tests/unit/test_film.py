import numpy as np
from PIL import Image

from dvla.telemetry.film import film_strip, save_film


def test_frames_run_to_the_right_and_cameras_downwards():
    frames = np.arange(3 * 2, dtype=np.uint8).reshape(3, 2, 1, 1, 1) * np.ones((1, 1, 64, 32, 3), np.uint8)
    strip = film_strip(frames)
    assert strip.shape == (2 * 128, 3 * 64, 3)
    assert [[int(strip[128 * row + 5, 64 * column + 9, 0]) for column in range(3)] for row in range(2)] == [
        [0, 2, 4],
        [1, 3, 5],
    ]


def test_large_frames_keep_their_size(tmp_path):
    save_film(tmp_path / "a" / "film.png", np.zeros((2, 1, 200, 100, 3), np.uint8))
    assert Image.open(tmp_path / "a" / "film.png").size == (200, 200)
