"""Images and audio in the calls of a script: paths, bytes and Pillow's images become parts of messages."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from parley.errors import InvalidValue, WrongType, excerpt
from parley.serving.media.data_urls import media_part
from parley.types import MEDIA_KINDS, MediaKind

MEDIA_OPTIONS: Mapping[str, MediaKind] = {"images": "image", "videos": "video", "audio": "audio"}


class SavableImage(Protocol):
    """An image of Pillow."""

    def save(self, file: io.BytesIO, image_format: str, /) -> None:
        """Write it in a format."""


def read_media_input(value: Any, kind: MediaKind, field: str) -> dict[str, Any]:
    """Return a path, the bytes of a file, or an image of Pillow as a part of a message. Raises InvalidValue,
    WrongType."""
    if isinstance(value, str | Path):
        data = _read_file(Path(value).expanduser(), field)
    elif isinstance(value, bytes):
        data = value
    elif hasattr(value, "save"):
        data = _png_bytes(value)
    else:
        raise WrongType(f"{field} must be a path, bytes or an image of Pillow, not {excerpt(value)}.", field=field)
    try:
        return media_part(data, kind)
    except ValueError as error:
        raise InvalidValue(f"{field} cannot be used: {error}.", field=field) from None


def _read_file(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidValue(f"{field} cannot be read from {str(path)!r}: {error.strerror}.", field=field) from None


def _png_bytes(image: SavableImage) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def with_media_parts(messages: Sequence[Mapping[str, Any]], added_media: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. ``added_media``: lists of media by option, to stand before the text of the last
    message of a user. Raises InvalidValue, WrongType."""
    converted = [_convert_message(message, number) for number, message in enumerate(messages)]
    parts = [part for name, values in added_media.items() for part in _read_values(values, name)]
    if not parts:
        return converted
    for message in reversed(converted):
        if message.get("role") == "user":
            content = message.get("content") or []
            text_parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            message["content"] = [*parts, *text_parts]
            return converted
    name = next(iter(added_media))
    raise InvalidValue(f"{name} needs a message of a user to belong to.", field=name)


def _read_values(values: Any, name: str) -> Iterator[dict[str, Any]]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        values = [values]
    for number, value in enumerate(values):
        yield read_media_input(value, MEDIA_OPTIONS[name], f"{name}[{number}]")


def _convert_message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    field = f"messages[{number}].content"
    return {**message, "content": [_convert_part(part, f"{field}[{index}]") for index, part in enumerate(content)]}


def _convert_part(part: Any, field: str) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA_KINDS and kind in part:  # its value is a path, bytes or an image
        return read_media_input(part[kind], kind, f"{field}.{kind}")
    return part
