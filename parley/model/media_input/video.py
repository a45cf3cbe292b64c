"""Decodes videos: only the frames that the model's processor chooses by their times.

The number of frames is counted by reading all packets, because the header of many files lacks it or is
wrong. Then only what the chosen frames need is decoded: from the keyframe before each.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import av
import numpy as np
from numpy.typing import NDArray

from parley.engine.media_messages import DecodingLimits
from parley.model.media_input.base64_text import decode_base64
from parley.model.media_input.containers import check_codec, open_container
from parley.model.media_input.images import decode_image
from parley.model.media_input.unusable import UnusableMedia, damaged_media

MAX_PACKETS = 1 << 20  # of a video; ten hours at 29 frames per second
STILL_RATE = 1.0  # frames per second of a video that is sent as single images, unless the request says otherwise


@dataclass
class VideoClock:
    """The times of a video's frames, in seconds and in order, and how many frames it has per second.

    ``keyframes``: the numbers of frames that can be decoded without those before them.
    """

    times: list[float]
    rate: float
    keyframes: list[int] = field(default_factory=list)

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
    """Return the frames of a video that ``choose_frames`` selects. Raises UnusableMedia, MemoryError."""
    with open_container(data, "video") as container:
        clock = _read_clock(container, _first_video(container))
    with open_container(data, "video") as container:
        decoder = _FrameDecoder(container, clock, limits)
        frame_numbers = sorted(
            choose_frames(clock, decoder.width, decoder.height)
        )  # of a short video, some more than once
        _check_frame_count(len(frame_numbers), limits)
        decoder.fit_memory(len(frame_numbers))
        images = dict(decoder.decode_frames(sorted(set(frame_numbers))))
    indices = [index for index in frame_numbers if index in images]
    if not indices:
        raise damaged_media()
    return DecodedVideo(np.stack([images[index] for index in indices]), indices, clock)


def decode_frames(text: str, frame_rate: float | None, limits: DecodingLimits) -> DecodedVideo:
    """Return a video from JPEG images of one size, in base64 with commas between them. Raises UnusableMedia."""
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


def _first_video(container: av.container.InputContainer) -> av.VideoStream:
    if not container.streams.video:
        raise UnusableMedia("has no images", "undecodable")
    stream = container.streams.video[0]
    check_codec(stream)
    stream.codec_context.thread_count = 1
    return stream


def _read_clock(container: av.container.InputContainer, stream: av.VideoStream) -> VideoClock:
    """Read all packets for the times of the frames."""
    packets: list[tuple[int, bool]] = []
    for packet in container.demux(stream):
        if packet.size and (tick := packet.pts if packet.pts is not None else packet.dts) is not None:
            packets.append((tick, packet.is_keyframe))
        if len(packets) > MAX_PACKETS:
            raise UnusableMedia(f"has more than {MAX_PACKETS} frames", "too_long", limit=MAX_PACKETS)
    if not packets or not stream.time_base:
        raise damaged_media()
    packets.sort()
    times = [float(tick * stream.time_base) for tick, _ in packets]
    keyframes = [index for index, (_, is_keyframe) in enumerate(packets) if is_keyframe]
    return VideoClock(times, _frame_rate(times, float(stream.average_rate or 0)), keyframes)


def _frame_rate(times: list[float], stated_rate: float) -> float:
    """Return the frames per second: as the file states, unless its times disagree by more than their rounding."""
    span = times[-1] - times[0]
    if span <= 0:
        return stated_rate if 0 < stated_rate < 1000 else STILL_RATE
    rate = (len(times) - 1) / span
    return stated_rate if abs(stated_rate - rate) < 0.01 * rate else rate


def _check_frame_size(width: int, height: int, limits: DecodingLimits) -> None:
    if width <= 0 or height <= 0:
        raise damaged_media()
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


class _FrameDecoder:
    """Decodes single frames of a video. ``width`` and ``height``: from its header."""

    def __init__(self, container: av.container.InputContainer, clock: VideoClock, limits: DecodingLimits):
        self._container, self._clock, self._limits = container, clock, limits
        self._stream = _first_video(container)
        self.width, self.height = self._stream.codec_context.width, self._stream.codec_context.height
        _check_frame_size(self.width, self.height, limits)
        self._size = self.width, self.height
        self._frames = container.decode(self._stream)
        self._position = -1  # number of the frame decoded last
        self._may_seek = True

    def fit_memory(self, count: int) -> None:
        """Make all frames smaller if ``count`` of them would take too much memory."""
        scale = min(1.0, math.sqrt(self._limits.frame_bytes / (3 * self.width * self.height * max(count, 1))))
        self._size = max(1, int(self.width * scale)), max(1, int(self.height * scale))

    def decode_frames(self, indices: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Return frames by their numbers, which are in order. Those that hold no image are left out."""
        for index in indices:
            keyframe = self._keyframe_before(index)
            if self._may_seek and keyframe > self._position + 1:
                self._seek_frame(keyframe)
            frame = self._find_frame(index)
            if frame is None and self._position > index and self._may_seek:  # the file's index may be wrong
                self._may_seek = False
                self._seek_frame(0)
                frame = self._find_frame(index)
            if frame is not None:
                yield index, self._convert_frame(frame)

    def _keyframe_before(self, index: int) -> int:
        next_keyframe = bisect_right(self._clock.keyframes, index)
        return self._clock.keyframes[next_keyframe - 1] if next_keyframe else 0

    def _seek_frame(self, index: int) -> None:
        assert self._stream.time_base is not None
        self._container.seek(round(self._clock.times[index] / self._stream.time_base), stream=self._stream)
        self._frames = self._container.decode(self._stream)
        self._position = index - 1

    def _find_frame(self, index: int) -> av.VideoFrame | None:
        """Decode up to a frame; None if there is no image with that number."""
        for frame in self._frames:
            is_timed = frame.time is not None
            self._position = bisect_left(self._clock.times, frame.time - 1e-6) if is_timed else self._position + 1
            if self._position >= index:
                return frame if self._position == index else None
        return None

    def _convert_frame(self, frame: av.VideoFrame) -> NDArray[np.uint8]:
        _check_frame_size(frame.width, frame.height, self._limits)
        width, height = self._size
        image = np.asarray(frame.to_ndarray(format="rgb24", width=width, height=height), np.uint8)
        return _turn_upright(image, frame.rotation)


def _turn_upright(image: NDArray[np.uint8], degrees: int) -> NDArray[np.uint8]:
    """Turn a frame by the rotation that the file gives. ``degrees``: counter-clockwise."""
    return np.ascontiguousarray(np.rot90(image, round(degrees / 90) % 4))
