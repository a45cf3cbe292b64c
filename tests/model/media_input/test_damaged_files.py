"""Files that were cut off or changed at random are decoded or refused: no other error, and no end of the process.

``PARLEY_NIGHTLY=1`` tries many more.
"""

from __future__ import annotations

import contextlib
import os
import random

import pytest
from support.media_files import (
    IMAGE_FILES,
    SOUND_FORMATS,
    VIDEO_FORMATS,
    damage_bytes,
    sine_wave,
    sound_file,
    video_file,
)

from parley.engine.media_messages import DecodingLimits
from parley.model.media_input.audio import decode_audio
from parley.model.media_input.images import decode_image
from parley.model.media_input.unusable import UnusableMedia
from parley.model.media_input.video import decode_video

TRIES = 1250 if os.environ.get("PARLEY_NIGHTLY") else 20  # for each of sixteen formats
LIMITS = DecodingLimits(pixels=1_000_000, seconds=10)


@pytest.mark.parametrize("name", IMAGE_FILES)
def test_survives_damaged_images(name: str):
    rng = random.Random(name)
    for _ in range(TRIES):
        with contextlib.suppress(UnusableMedia, MemoryError):
            decode_image(damage_bytes(IMAGE_FILES[name], rng), LIMITS.pixels)


@pytest.mark.parametrize("name", SOUND_FORMATS)
def test_survives_damaged_sound(name: str):
    rng, data = random.Random(name), sound_file(*SOUND_FORMATS[name], sine_wave(0.3, 48_000)[None], 48_000)
    for _ in range(TRIES):
        with contextlib.suppress(UnusableMedia, MemoryError):
            decode_audio(damage_bytes(data, rng), 16_000, LIMITS.seconds)


@pytest.mark.parametrize("name", VIDEO_FORMATS)
def test_survives_damaged_videos(name: str):
    rng, data = random.Random(name), video_file(**VIDEO_FORMATS[name], frames=6)
    for _ in range(TRIES):
        with contextlib.suppress(UnusableMedia, MemoryError):
            decode_video(damage_bytes(data, rng), lambda clock, width, height: [0, len(clock.times) // 2], LIMITS)
