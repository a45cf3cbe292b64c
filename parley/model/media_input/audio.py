"""Decodes sound to one channel, at the sample rate of the model's processor."""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np
from numpy.typing import NDArray

from parley.model.media_input.containers import check_codec, open_container
from parley.model.media_input.unusable import UnusableMedia, damaged_media


def decode_audio(data: bytes, rate: int, max_seconds: float) -> NDArray[np.float32]:
    """Return a clip as samples between -1 and 1, ``rate`` of them a second; the mean of its channels.

    Raises UnusableMedia, MemoryError.
    """
    with open_container(data, "audio") as container:
        if not container.streams.audio:
            raise UnusableMedia("has no audio", "undecodable")
        stream = container.streams.audio[0]
        check_codec(stream)
        stream.codec_context.thread_count = 1
        frames = _limit_length(container.decode(stream), max_seconds)
        parts = list(_resample_frames(frames, rate))
    if not parts:
        raise damaged_media()
    return np.concatenate(parts)


def _limit_length(frames: Iterator[av.AudioFrame], max_seconds: float) -> Iterator[av.AudioFrame]:
    """Pass frames on until they exceed the limit, also where a few samples claim to be hours."""
    seconds = 0.0
    for frame in frames:
        if frame.sample_rate <= 0:
            raise damaged_media()
        seconds += frame.samples / frame.sample_rate
        if seconds > max_seconds:
            raise UnusableMedia(
                f"is longer than {max_seconds:g} seconds, which is the limit", "too_long", limit=max_seconds
            )
        yield frame


def _resample_frames(frames: Iterator[av.AudioFrame], rate: int) -> Iterator[NDArray[np.float32]]:
    """Return the mean of the channels at another rate. Channels keep their own audio until then: FFmpeg would weight
    them. A stream whose format changes within gets a new resampler, as a new file would."""
    resampler: av.AudioResampler | None = None
    form = None
    for frame in frames:
        frame.pts = None
        if form != (form := (frame.format.name, frame.layout.name, frame.sample_rate)) or resampler is None:
            if resampler is not None:
                yield from map(_mean_channel, resampler.resample(None))
            resampler = av.AudioResampler(format="flt", layout=frame.layout, rate=rate)
        yield from map(_mean_channel, resampler.resample(frame))
    if resampler is not None:
        yield from map(_mean_channel, resampler.resample(None))


def _mean_channel(frame: av.AudioFrame) -> NDArray[np.float32]:
    """Return the mean of interleaved channels: PyAV reads beyond its array for more than eight planar ones."""
    samples = frame.to_ndarray().reshape(-1, frame.layout.nb_channels)
    return np.asarray(samples.mean(axis=1, dtype=np.float32))
