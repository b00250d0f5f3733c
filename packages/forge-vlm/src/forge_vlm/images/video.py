"""From video files to frames at even distances. Imports no torch."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from forge_config import Config, Meta

Count = Annotated[int, Meta(ge=1)]

STARTS = ((4, b"ftyp"), (0, b"\x1a\x45\xdf\xa3"), (8, b"AVI "), (0, b"\x00\x00\x01\xba"))
"""Offset and first bytes of files of MP4 and MOV, WebM and Matroska, AVI and MPEG."""


class VideoConfig(Config):
    """How a video becomes frames, each of which is an image for the tower.

    Frames are at even distances and include the first and the last of the video.

    Attributes:
        frames_per_s: number of frames per second of the video; the total is rounded.
        min_frames: least number of frames of a video; if the file has fewer, some are used twice.
        max_frames: largest number of frames of a video.
        merge: number of consecutive frames whose visual tokens are averaged into those of one.
    """

    frames_per_s: Annotated[float, Meta(gt=0)] = 1.0
    min_frames: Count = 1
    max_frames: Count = 8
    merge: Count = 1

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if self.min_frames > self.max_frames:
            yield (f"video.min_frames = {self.min_frames} is above video.max_frames = {self.max_frames}")

    def count(self, duration_s: float) -> int:
        """Return the number of frames taken from a video."""
        return min(max(round(duration_s * self.frames_per_s), self.min_frames), self.max_frames)


def is_video(raw: bytes) -> bool:
    """Whether a file is a video, by its first bytes."""
    return any(raw[at : at + len(start)] == start for at, start in STARTS)


def measured(raw: bytes, config: VideoConfig) -> tuple[int, int, int]:
    """Return number of taken frames, height and width in pixels, from the header of a file.

    Raises:
        ValueError: it is damaged, or has no pictures.
    """
    with _opened(raw) as container:
        stream = _stream(container)
        return config.count(_duration_s(container, stream)), stream.height, stream.width


def frames_of(raw: bytes, count: int) -> list[np.ndarray]:
    """Return `count` frames [H, W, 3] uint8 at even distances: those on display at these times.

    Raises:
        ValueError: the file is damaged.
    """
    found: list[np.ndarray] = []
    with _opened(raw) as container:
        stream = _stream(container)
        end = _duration_s(container, stream)
        # the last frame is shown from one frame before the end on
        last = max(0.0, end - float(1 / stream.average_rate)) if stream.average_rate else end
        times = [last * number / max(1, count - 1) for number in range(count)]
        shown = None
        try:
            for frame in container.decode(stream):
                at = float((frame.pts or 0) * stream.time_base) - _start_s(stream)
                while shown is not None and len(found) < count and times[len(found)] < at - 1e-6:
                    found.append(shown)
                if len(found) == count:
                    break
                shown = frame.to_ndarray(format="rgb24")
        except _damage() as error:
            raise ValueError(f"a damaged video: {error}") from None
    if shown is None:
        raise ValueError("a video without frames")
    return found + [shown] * (count - len(found))


def _opened(raw: bytes) -> Any:
    try:
        import av
    except ImportError:
        raise ImportError("videos need PyAV: pip install 'forge-vlm[video]'") from None
    try:
        return av.open(io.BytesIO(raw))
    except _damage() as error:
        raise ValueError(f"a damaged video: {error}") from None


def _damage() -> tuple[type[Exception], ...]:
    """Return the exceptions that PyAV raises for a damaged video; not all of them are an `OSError`."""
    from av.error import FFmpegError

    return OSError, ValueError, FFmpegError


def _stream(container: Any) -> Any:
    if not container.streams.video:
        raise ValueError("a video without pictures")
    if container.streams.video[0].codec_context is None:
        raise ValueError("a damaged video: its pictures are of no known codec")
    return container.streams.video[0]


def _start_s(stream: Any) -> float:
    return float((stream.start_time or 0) * stream.time_base)


def _duration_s(container: Any, stream: Any) -> float:
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    if container.duration is not None:
        return container.duration / 1e6
    raise ValueError("a video that does not say how long it is")
