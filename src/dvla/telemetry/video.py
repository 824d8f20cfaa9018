"""Videos that anything can play, even when the process that was writing them is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np

_OPTIONS = {
    "preset": "veryfast",
    "tune": "zerolatency",  # no frame waits inside the encoder, so a killed process loses one fragment at most
    "crf": "18",  # hardly to be told from the original
    "threads": "1",  # the same bytes on every machine
    "sc_threshold": "0",
}
_FRAGMENTS = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "flush_packets": "1"}
"""An MP4 in pieces, each complete in itself, and no index that only `close` could write."""


class VideoWriter:
    """H.264 in a fragmented MP4, colours as yuv420p; the same frames give the same bytes.

    Args:
        path: The file, written from now on; its folder must exist.
        height: Of the frames, pixels. An odd height or width is padded by repeating the last line.
        width: Of the frames, pixels.
        fps: Frames per second.
        keyframe_every: Frames from one whole picture to the next, which is also the length of a fragment: what a killed
            process loses, and how far a reader of a single frame must go back.
    """

    def __init__(self, path: Path, height: int, width: int, fps: int, keyframe_every: int = 10) -> None:
        import av

        self._shape = (height, width, 3)
        self._padding = ((0, height % 2), (0, width % 2), (0, 0))
        self._container: Any = av.open(str(path), "w", format="mp4", options=_FRAGMENTS)
        self._stream = self._container.add_stream("libx264", rate=fps, options=_OPTIONS | {"g": str(keyframe_every)})
        self._stream.height, self._stream.width = height + height % 2, width + width % 2
        self._stream.pix_fmt = "yuv420p"
        self._to_frame = av.VideoFrame.from_ndarray
        self._closed = False

    def add(self, frame: np.ndarray) -> None:
        """Append a frame, (height, width, 3) uint8 RGB.

        Raises:
            ValueError: It has another shape or dtype.
        """
        if frame.shape != self._shape or frame.dtype != np.uint8:
            raise ValueError(f"a frame must be {self._shape} uint8, this one is {frame.shape} {frame.dtype}")
        padded = np.pad(frame, self._padding, mode="edge")
        self._container.mux(self._stream.encode(self._to_frame(padded, format="rgb24")))

    def close(self) -> None:
        """Write what is left; closing twice does no harm."""
        if not self._closed:
            self._closed = True
            try:
                self._container.mux(self._stream.encode())
            finally:
                self._container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
