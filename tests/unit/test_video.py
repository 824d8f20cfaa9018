"""Videos: true to the frames, the same bytes each time, playable after a kill."""

import os
import signal
import subprocess
import sys

import av
import numpy as np
import pytest

from dvla.telemetry.video import VideoWriter


def frames(count, height=48, width=64):
    y, x = np.mgrid[:height, :width]
    return [
        np.stack([(3 * x + 2 * n) % 200, (2 * y + n) % 200, np.full_like(x, 5 * n % 256)], axis=2).astype(np.uint8)
        for n in range(count)
    ]


def write(path, pictures, fps=20, **options):
    with VideoWriter(path, *pictures[0].shape[:2], fps, **options) as video:
        for picture in pictures:
            video.add(picture)
    return path


def read(path):
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        assert (stream.codec.canonical_name, stream.pix_fmt) == ("h264", "yuv420p")
        return [(frame.time, frame.to_ndarray(format="rgb24")) for frame in file.decode(stream)]


def test_all_frames_come_back_at_their_times(tmp_path):
    written = frames(25)
    got = read(write(tmp_path / "a.mp4", written))
    assert [time for time, _ in got] == pytest.approx([n / 20 for n in range(25)])
    for picture, (_, decoded) in zip(written, got, strict=True):
        assert np.abs(decoded.astype(int) - picture).mean() < 6


def test_the_bytes_depend_on_the_frames_alone(tmp_path):
    one, two = (write(tmp_path / name, frames(15)).read_bytes() for name in ("a.mp4", "b.mp4"))
    assert one == two
    assert write(tmp_path / "c.mp4", frames(16)[1:]).read_bytes() != one


def test_odd_sizes_repeat_the_last_line(tmp_path):
    picture = np.zeros((33, 47, 3), np.uint8)
    picture[-1], picture[:, -1] = 255, 255
    ((_, decoded),) = read(write(tmp_path / "a.mp4", [picture]))
    assert decoded.shape == (34, 48, 3)
    assert decoded[33].mean() > 240 and decoded[:, 47].mean() > 240
    assert decoded[:30, :40].mean() < 10


@pytest.mark.parametrize("frame", [np.zeros((4, 6, 3)), np.zeros((6, 4, 3), np.uint8)], ids=["dtype", "shape"])
def test_another_kind_of_frame_is_refused(tmp_path, frame):
    with VideoWriter(tmp_path / "a.mp4", 4, 6, 20) as video, pytest.raises(ValueError, match=r"\(4, 6, 3\) uint8"):
        video.add(frame)


def test_closing_twice_and_without_frames(tmp_path):
    video = VideoWriter(tmp_path / "a.mp4", 4, 6, 20)
    video.close()
    video.close()


def test_a_kill_costs_the_last_fragment_only(tmp_path):
    code = """
import sys, time
from pathlib import Path
from unit.test_video import frames
from dvla.telemetry.video import VideoWriter
video = VideoWriter(Path(sys.argv[1]), 48, 64, 20, keyframe_every=10)
for frame in frames(34):
    video.add(frame)
print("written", flush=True)
time.sleep(60)
"""
    path = tmp_path / "a.mp4"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    got = read(path)
    assert len(got) == 30
    assert np.abs(got[29][1].astype(int) - frames(30)[29]).mean() < 6
