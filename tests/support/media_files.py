"""Writes images, sound and videos for tests, in the formats that servers read."""

from __future__ import annotations

import random
import wave
import zlib
from io import BytesIO
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image


def image_array(width: int = 40, height: int = 30, seed: int = 0) -> NDArray[np.uint8]:
    """Return random pixels, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image_file(image: Image.Image | NDArray[Any], name: str = "PNG", **options: Any) -> bytes:
    """Return an image as a file of one of Pillow's formats."""
    file = BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, name, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG file that claims a size, and has pixels for one row at most."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    row = zlib.compress(bytes(1 + (width + 7) // 8))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", size + b"\x01\0\0\0\0"), chunk(b"IDAT", row), chunk(b"IEND", b""))
    )


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut a file off, or change bytes of it."""
    if rng.random() < 0.5:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 4, 64))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def sine_wave(seconds: float, rate: int, hertz: float = 440.0) -> NDArray[np.float32]:
    """Return a tone with an amplitude of one half."""
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def wav_file(channels: NDArray[np.float32], rate: int) -> bytes:
    """Return sound as a WAV file of 16 bits. ``channels``: samples [channels, time] between -1 and 1."""
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(len(channels))
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((channels.T * 32767).round().astype("<i2").tobytes())
    return file.getvalue()


def sound_file(format_name: str, codec: str, channels: NDArray[np.float32], rate: int) -> bytes:
    """Return sound as a file of one of FFmpeg's formats and codecs."""
    file = BytesIO()
    layout = "stereo" if len(channels) == 2 else "mono"
    with av.open(file, "w", format=format_name) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channels), format="fltp", layout=layout)
        frame.sample_rate = rate
        codec_context = stream.codec_context
        codec_context.open()
        resampler = av.AudioResampler(stream.format, layout, rate, frame_size=codec_context.frame_size or 1024)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return file.getvalue()


def video_file(
    format_name: str = "mp4",
    codec: str = "libx264",
    *,
    frames: int = 20,
    rate: int = 10,
    width: int = 64,
    height: int = 48,
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
) -> bytes:
    """Return a video whose frames get brighter, by 10 of 255 each, as a file of one of FFmpeg's formats and codecs."""
    file = BytesIO()
    with av.open(file, "w", format=format_name) as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        for number in range(frames):
            grey = np.full((height, width, 3), number * 10 % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


IMAGE_FILES: dict[str, bytes] = {
    name: image_file(image_array(), name, **({"lossless": True} if name == "WEBP" else {}))
    for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP")
}
SOUND_FORMATS: dict[str, tuple[str, str]] = {
    "wav": ("wav", "pcm_s16le"),
    "mp3": ("mp3", "libmp3lame"),
    "flac": ("flac", "flac"),
    "opus": ("ogg", "libopus"),
    "m4a": ("mp4", "aac"),
    "webm": ("webm", "libopus"),
}
VIDEO_FORMATS: dict[str, dict[str, Any]] = {
    "mp4": {"format_name": "mp4", "codec": "libx264"},
    "avi": {"format_name": "avi", "codec": "mpeg4"},
    "wmv": {"format_name": "asf", "codec": "wmv2"},
    "webm": {"format_name": "webm", "codec": "libvpx-vp9"},
    "mkv": {"format_name": "matroska", "codec": "mjpeg", "pixels": "yuvj420p"},
}
