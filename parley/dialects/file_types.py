"""The media types of files by the ends of their names."""

from __future__ import annotations

import mimetypes
from pathlib import PurePosixPath

# Common ones that Python knows only where the host has a table of them.
COMMON_TYPES = {
    ".md": "text/markdown", ".yaml": "text/yaml", ".yml": "text/yaml", ".log": "text/plain", ".rst": "text/x-rst",
    ".webp": "image/webp", ".flac": "audio/flac", ".ogg": "audio/ogg", ".m4a": "audio/mp4", ".mkv": "video/x-matroska",
}  # fmt: skip


def guess_media_type(filename: str) -> str:
    """Return the media type that the end of a file's name says; "" if it says none."""
    return COMMON_TYPES.get(PurePosixPath(filename).suffix.lower()) or mimetypes.guess_type(filename)[0] or ""
