"""Of a video, the frames that a model wants are decoded, by their times; traps and damaged files are refused."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.media_files import (
    IMAGE_FILES,
    VIDEO_FORMATS,
    image_array,
    image_file,
    sine_wave,
    sound_file,
    video_file,
)

from parley.engine.media_messages import DecodingLimits
from parley.model.media_input.unusable import UnusableMedia
from parley.model.media_input.video import DecodedVideo, VideoClock, decode_frames, decode_video

LIMITS = DecodingLimits()


def choose(indices: Sequence[int]) -> Callable[[VideoClock, int, int], Sequence[int]]:
    return lambda clock, width, height: indices


def brightness(video: DecodedVideo) -> list[int]:
    """Return the number that each frame was written with."""
    return [round(float(frame.mean()) / 10) for frame in video.frames]


def refusal(data: bytes, limits: DecodingLimits = LIMITS, indices: Sequence[int] = (0,)) -> UnusableMedia:
    with pytest.raises(UnusableMedia) as caught:
        decode_video(data, choose(indices), limits)
    return caught.value


@pytest.mark.parametrize("name", VIDEO_FORMATS)
def test_reads_the_wanted_frames_of_each_format(name: str):
    video = decode_video(video_file(**VIDEO_FORMATS[name]), choose([0, 7, 13, 19]), LIMITS)
    assert video.frames.shape == (4, 48, 64, 3)
    assert brightness(video) == [0, 7, 13, 19] == video.indices
    assert len(video.clock.times) == 20
    assert video.clock.rate == pytest.approx(10)
    assert video.clock.seconds == pytest.approx(2)


def test_frame_chooser_gets_the_times_and_the_size():
    seen = []

    def choose_first(clock: VideoClock, width: int, height: int) -> list[int]:
        seen.append((len(clock.times), clock.rate, width, height))
        return [0]

    decode_video(video_file(frames=5, rate=25), choose_first, LIMITS)
    assert seen == [(5, 25, 64, 48)]


@pytest.mark.parametrize("name", VIDEO_FORMATS)
def test_skips_to_keyframes_and_finds_the_same_pixels(name: str):
    data = video_file(**VIDEO_FORMATS[name], frames=90, options={"g": "12"})
    every_frame = decode_video(data, choose(range(90)), LIMITS)
    frame_numbers = [0, 5, 40, 41, 66, 89]
    few_frames = decode_video(data, choose(frame_numbers), LIMITS)
    assert few_frames.indices == frame_numbers
    assert len(few_frames.clock.keyframes) >= 7
    assert np.array_equal(few_frames.frames, every_frame.frames[frame_numbers])


def test_repeats_frames_that_are_wanted_twice():
    video = decode_video(video_file(frames=2), choose([0, 0, 1, 1]), LIMITS)
    assert brightness(video) == [0, 0, 1, 1]


def test_counts_the_pixels_of_a_frame():
    error = refusal(video_file(), DecodingLimits(pixels=64 * 48 - 1))
    assert error.reason == "too_many_pixels"
    assert error.detail["limit"] == 64 * 48 - 1


def test_counts_the_frames():
    error = refusal(video_file(), DecodingLimits(frames=3), range(4))
    assert error.predicate == "would be read as 4 frames, and at most 3 are allowed"


def test_keeps_smaller_frames_where_all_would_take_too_much_memory():
    video = decode_video(video_file(), choose(range(20)), DecodingLimits(frame_bytes=20 * 3 * 64 * 48 // 4))
    assert video.frames.shape == (20, 24, 32, 3)


def test_refuses_sound_without_images():
    assert refusal(sound_file("mp4", "aac", sine_wave(1, 48_000)[None], 48_000)).predicate == "has no images"


@pytest.mark.parametrize(
    "data", [b"", IMAGE_FILES["PNG"], b"ffconcat version 1.0\nfile /etc/passwd\n", b"RIFF0000CDXA"]
)
def test_refuses_other_formats(data: bytes):
    assert refusal(data).reason == "unknown_format"


def test_refuses_codecs_that_are_not_listed():
    data = video_file("avi", "ffv1", options={})
    assert refusal(data).predicate == "has a codec that is not read here"


def frame_text(count: int = 3, width: int = 8) -> str:
    return ",".join(base64.b64encode(image_file(image_array(width, 8, seed), "JPEG")).decode() for seed in range(count))


def test_reads_a_video_of_single_images():
    video = decode_frames(frame_text(), None, LIMITS)
    assert video.frames.shape == (3, 8, 8, 3)
    assert (video.indices, video.clock.rate, video.clock.seconds) == ([0, 1, 2], 1, 3)
    assert decode_frames(frame_text(), 2.0, LIMITS).clock.seconds == 1.5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("," * 100_000, "too_long"),
        (frame_text(4), "too_long"),
        (frame_text(2) + ",", "unknown_format"),
        ("§", "bad_base64"),
        (frame_text(1) + "," + frame_text(1, 9), "undecodable"),
    ],
    ids=["commas", "four", "empty", "no base64", "sizes"],
)
def test_refuses_other_lists_of_images(text: str, reason: str):
    with pytest.raises(UnusableMedia) as caught:
        decode_frames(text, None, DecodingLimits(frames=3))
    assert caught.value.reason == reason
