"""Decodes videos: the frames that a model wants, chosen by their times.

The number of frames is counted by reading all packets, because the header of many files says nothing or something
wrong. Then only as much is decoded as the wanted frames need, one frame at a time.
"""

from __future__ import annotations

import math
from base64 import b64decode
from binascii import Error as Base64Error
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import av
import numpy as np
from numpy.typing import NDArray

from parley.engine.media_messages import DecodingLimits
from parley.model.media_input.containers import check_codec, open_container
from parley.model.media_input.images import decode_image
from parley.model.media_input.unusable import UnusableMedia, damaged

MAX_PACKETS = 1 << 20  # of a video; ten hours at 29 frames per second
STILL_RATE = 1.0  # frames per second of a video that is sent as single pictures, unless the request says otherwise


@dataclass
class VideoClock:
    """The times of a video's frames, in seconds and in order, and how many frames it has per second."""

    times: list[float]
    rate: float

    @property
    def seconds(self) -> float:
        """The length of the video."""
        return len(self.times) / self.rate


@dataclass
class DecodedVideo:
    """Frames as uint8 [frames, height, width, 3], the number of each among all frames, and the clock of all frames."""

    frames: NDArray[np.uint8]
    indices: list[int]
    clock: VideoClock


FrameChooser = Callable[[VideoClock, int, int], Sequence[int]]  # from clock, width and height to numbers of frames


def decode_video(data: bytes, choose_frames: FrameChooser, limits: DecodingLimits) -> DecodedVideo:
    """Return the frames of a video that ``choose_frames`` wants. Raises UnusableMedia, MemoryError."""
    with open_container(data, "video") as container:
        clock = _read_clock(container, _first_video(container))
    with open_container(data, "video") as container:
        stream = _first_video(container)
        width, height = stream.codec_context.width, stream.codec_context.height
        _check_frame_size(width, height, limits)
        chosen = sorted(choose_frames(clock, width, height))  # of a short video, some more than once
        _check_frame_count(len(chosen), limits)
        size = _kept_size(width, height, len(chosen), limits)
        pictures = dict(_decode_wanted(container, stream, clock, set(chosen), size, limits))
    indices = [index for index in chosen if index in pictures]
    if not indices:
        raise damaged()
    return DecodedVideo(np.stack([pictures[index] for index in indices]), indices, clock)


def decode_frames(text: str, frame_rate: float | None, limits: DecodingLimits) -> DecodedVideo:
    """Return a video from JPEG pictures of one size, in base64 with commas between them. Raises UnusableMedia."""
    count = text.count(",") + 1
    _check_frame_count(count, limits)
    rate = frame_rate or STILL_RATE
    frames: list[NDArray[np.uint8]] = []
    for part in text.split(","):
        frames.append(np.asarray(decode_image(decode_base64(part), limits.pixels)))
        if frames[-1].shape != frames[0].shape:
            raise UnusableMedia("has frames of different sizes", "undecodable")
        if count * frames[0].nbytes > limits.frame_bytes:
            raise UnusableMedia(
                f"has more than {limits.frame_bytes // 3} pixels in all of its frames, which is the limit",
                "too_many_pixels",
                limit=limits.frame_bytes // 3,
            )
    clock = VideoClock([index / rate for index in range(count)], rate)
    return DecodedVideo(np.stack(frames), list(range(count)), clock)


def decode_base64(text: str | bytes) -> bytes:
    """Return the bytes of a text in base64. Raises UnusableMedia."""
    try:
        return b64decode(text, validate=True)
    except (Base64Error, ValueError):
        raise UnusableMedia("is not in base64", "bad_base64") from None


def _first_video(container: av.container.InputContainer) -> av.VideoStream:
    if not container.streams.video:
        raise UnusableMedia("has no pictures", "undecodable")
    stream = container.streams.video[0]
    check_codec(stream)
    stream.codec_context.thread_count = 1
    return stream


def _read_clock(container: av.container.InputContainer, stream: av.VideoStream) -> VideoClock:
    """Read all packets for the times of the frames."""
    ticks: list[int] = []
    for packet in container.demux(stream):
        if packet.size and (tick := packet.pts if packet.pts is not None else packet.dts) is not None:
            ticks.append(tick)
        if len(ticks) > MAX_PACKETS:
            raise UnusableMedia(f"has more than {MAX_PACKETS} frames", "too_long", limit=MAX_PACKETS)
    if not ticks or not stream.time_base:
        raise damaged()
    times = sorted(float(tick * stream.time_base) for tick in ticks)
    return VideoClock(times, _frame_rate(times, float(stream.average_rate or 0)))


def _frame_rate(times: list[float], stated_rate: float) -> float:
    """Return the frames per second: as the file states, unless its times disagree by more than their rounding."""
    span = times[-1] - times[0]
    if span <= 0:
        return stated_rate if 0 < stated_rate < 1000 else STILL_RATE
    rate = (len(times) - 1) / span
    return stated_rate if abs(stated_rate - rate) < 0.01 * rate else rate


def _check_frame_size(width: int, height: int, limits: DecodingLimits) -> None:
    if width <= 0 or height <= 0:
        raise damaged()
    if width * height > limits.pixels:
        raise UnusableMedia(
            f"has frames of {width} x {height} pixels, and at most {limits.pixels} are allowed",
            "too_many_pixels",
            limit=limits.pixels,
            size=width * height,
            width=width,
            height=height,
        )


def _check_frame_count(count: int, limits: DecodingLimits) -> None:
    if count > limits.frames:
        raise UnusableMedia(
            f"would be read as {count} frames, and at most {limits.frames} are allowed",
            "too_long",
            limit=limits.frames,
            size=count,
        )


def _kept_size(width: int, height: int, count: int, limits: DecodingLimits) -> tuple[int, int]:
    """Return width and height of the frames that are kept: smaller ones if all together would take too much memory."""
    scale = min(1.0, math.sqrt(limits.frame_bytes / (3 * width * height * max(count, 1))))
    return max(1, int(width * scale)), max(1, int(height * scale))


def _decode_wanted(
    container: av.container.InputContainer,
    stream: av.VideoStream,
    clock: VideoClock,
    wanted: set[int],
    size: tuple[int, int],
    limits: DecodingLimits,
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Decode up to the last wanted frame. A frame is found by its time: some packets hold no picture."""
    for position, frame in enumerate(container.decode(stream)):
        index = position if frame.time is None else bisect_left(clock.times, frame.time - 1e-6)
        if index in wanted:
            wanted = wanted - {index}
            _check_frame_size(frame.width, frame.height, limits)
            picture = np.asarray(frame.to_ndarray(format="rgb24", width=size[0], height=size[1]), np.uint8)
            yield index, _turn_upright(picture, frame.rotation)
        if not wanted:
            return


def _turn_upright(picture: NDArray[np.uint8], degrees: int) -> NDArray[np.uint8]:
    """Turn a frame as the camera said that it was held. ``degrees``: counter-clockwise."""
    return np.ascontiguousarray(np.rot90(picture, round(degrees / 90) % 4))
