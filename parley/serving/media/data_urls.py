"""Files as ``data:`` URLs and parts of messages, for the programs of this package that send media.

Imports nothing heavy: ``parley chat --help`` reads this file.
"""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parley.types import MediaKind

# The first bytes of the formats that servers accept; "RIFF" files name their format at byte 8.
MAGIC_NUMBERS = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"\xff\xfb", "audio/mpeg"),
    (b"\xff\xf3", "audio/mpeg"),
    (b"\x1a\x45\xdf\xa3", "video/webm"),
)
RIFF_TYPES = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}


def sniff_media_type(data: bytes) -> str | None:
    """Return the media type of an image, video or clip by its first bytes; None if it is not known."""
    if data[:4] == b"RIFF":
        return RIFF_TYPES.get(data[8:12])
    if data[4:8] == b"ftyp":
        return "video/mp4"
    return next((media_type for magic, media_type in MAGIC_NUMBERS if data.startswith(magic)), None)


def media_part(data: bytes, kind: MediaKind | None = None) -> dict[str, Any]:
    """Return a file as a part of a message's content, in vLLM's form of OpenAI's API. Raises ValueError.

    ``kind``: the kind that the user names, because MP4 and WebM may be sound as well; None: the first bytes decide.
    """
    media_type = sniff_media_type(data)
    if media_type is None:
        raise ValueError("it is no image, video or audio of a known format")
    name = f"{kind or media_type.partition('/')[0]}_url"
    return {"type": name, name: {"url": f"data:{media_type};base64,{b64encode(data).decode()}"}}
