"""Images and audio in the lines of ``parley chat``: files that a question names, and those of ``/image``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from parley.serving.media.data_urls import media_part
from parley.settings.options import ConfigError

MAX_FILE_BYTES = 25 << 20
SUFFIXES = r"jpe?g|png|webp|gif|bmp|wav|mp3|flac|ogg"
# A path in quotes, as terminals paste it, or a word whose blanks have backslashes before them.
PASTED_PATH = re.compile(
    rf"(['\"])(?P<quoted>[^'\"]+\.(?:{SUFFIXES}))\1|(?P<word>(?:\\.|[^\s\\])+\.(?:{SUFFIXES}))\b", re.I
)


def read_media_file(name: str) -> dict[str, Any]:
    """Return a file as a part of a message. Raises ConfigError if it cannot be read or is no image or audio."""
    path = Path(name).expanduser()
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{name} is larger than {MAX_FILE_BYTES >> 20} MB.")
        return media_part(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{name} cannot be sent: {error}.") from None


def split_pasted_files(line: str) -> tuple[str, list[str]]:
    """Return a line without the paths of existing images and clips in it, and these paths."""
    paths: list[str] = []

    def take_path(match: re.Match[str]) -> str:
        path = match["quoted"] or re.sub(r"\\(.)", r"\1", match["word"])
        if not Path(path).expanduser().is_file():
            return match[0]
        paths.append(path)
        return ""

    text = PASTED_PATH.sub(take_path, line)
    return (" ".join(text.split()) if paths else line), paths
