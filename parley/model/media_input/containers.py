"""Opens audio and video files with FFmpeg (PyAV), which must not guess their format.

FFmpeg opens sockets for some texts (SDP) and other files for some lists. So a file's first bytes choose its demuxer
here, no protocol is allowed, and only codecs of the list below are decoded: the others are rarely tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Literal

import av
from av.container import InputContainer
from av.error import FFmpegError

from parley.model.media_input.unusable import UnusableMedia, damaged_media

# The names that demuxers list as theirs; a whitelist must have all of them.
DEMUXER_NAMES = {
    "mov": "mov,mp4,m4a,3gp,3g2,mj2",
    "avi": "avi",
    "asf": "asf",
    "matroska": "matroska,webm",
    "mp3": "mp3",
    "wav": "wav",
    "flac": "flac",
    "ogg": "ogg",
}
AUDIO_DEMUXERS = frozenset({"wav", "mp3", "flac", "ogg", "mov", "matroska"})
VIDEO_DEMUXERS = frozenset({"mov", "avi", "asf", "matroska"})
FORMATS = {"audio": "WAV, MP3, FLAC, OGG, MP4 or WebM", "video": "MP4, AVI, WMV, WebM or MKV"}
# fmt: off
CODECS = frozenset({
    "h264", "hevc", "vp8", "vp9", "av1", "mpeg1video", "mpeg2video", "mpeg4", "msmpeg4v2", "msmpeg4v3", "mjpeg", "h263",
    "wmv1", "wmv2", "wmv3", "vc1",
    "aac", "mp3", "mp2", "flac", "opus", "vorbis", "alac", "ac3", "wmav1", "wmav2", "pcm_u8", "pcm_s16le", "pcm_s24le",
    "pcm_s32le", "pcm_f32le", "pcm_f64le", "pcm_alaw", "pcm_mulaw", "pcm_s16be",
})
# fmt: on
OPEN_SECONDS = 30.0  # to read the head of a file


def demuxer_name(data: bytes) -> str | None:
    """Return FFmpeg's demuxer for a file that begins like ``data``; None if it is not accepted."""
    if data[:4] == b"RIFF":
        return {b"WAVE": "wav", b"AVI ": "avi"}.get(data[8:12])
    if data[4:8] == b"ftyp":
        return "mov"
    starts = {b"fLaC": "flac", b"OggS": "ogg", b"\x1aE\xdf\xa3": "matroska", b"0&\xb2u\x8ef\xcf\x11": "asf"}
    for start, name in starts.items():
        if data.startswith(start):
            return name
    is_mpeg_audio = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 in (0xE2, 0xE4, 0xE6)
    return "mp3" if data.startswith(b"ID3") or is_mpeg_audio else None


@contextmanager
def open_container(data: bytes, kind: Literal["audio", "video"]) -> Iterator[InputContainer]:
    """Open an audio or video file. Errors of FFmpeg within the block become UnusableMedia."""
    name = demuxer_name(data)
    if name is None or name not in (AUDIO_DEMUXERS if kind == "audio" else VIDEO_DEMUXERS):
        raise UnusableMedia(f"is in no format that is read here: {FORMATS[kind]}", "unknown_format")
    options = {"format_whitelist": DEMUXER_NAMES[name], "protocol_whitelist": "none"}
    try:
        with av.open(BytesIO(data), "r", format=name, options=options, timeout=OPEN_SECONDS) as container:
            yield container
    except (FFmpegError, ValueError, IndexError, EOFError, OSError, OverflowError):
        raise damaged_media() from None


def check_codec(stream: av.AudioStream | av.VideoStream) -> None:
    """Raise UnusableMedia unless a stream's codec is one of those that are decoded."""
    context = stream.codec_context  # None if the file does not name its codec
    if context is None:
        raise damaged_media()
    if context.codec.canonical_name not in CODECS:
        raise UnusableMedia("has a codec that is not read here", "unknown_format")
