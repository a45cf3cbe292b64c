"""Media in bodies: where an item is, its place among the texts, and how many items a request may have.

This is shared by all APIs. The forms of parts and the sentences of refusals are each API's own. Nothing is fetched or
decoded here: ``BadMedia`` with the faults of fetching and decoding comes later, and is worded by the same functions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple
from urllib.parse import unquote

from parley.errors import BadMedia
from parley.types import EncodedMedia, Media, MediaAddress, MediaKind, MediaPath, PlacedMedia

MAX_URL_LENGTH = 4096  # characters of an http or https URL
MAX_HEADER = 128  # characters of a data: URL before its data
MAX_UUID = 256  # characters of a client's name for an item
SCHEME_LENGTH = 8  # characters; the scheme of a URL ends within them
KIND_NOUNS: dict[MediaKind, str] = {"image": "images", "video": "videos", "audio": "audio"}


class InterleavedText(NamedTuple):
    """A text, and the items within it."""

    text: str
    media: list[PlacedMedia]


def interleave_parts(parts: Iterable[str | Media], joint: str = "") -> InterleavedText:
    """Join texts and items in their order. ``joint`` separates two texts without an item between them."""
    pieces: list[str] = []
    media: list[PlacedMedia] = []
    length, follows_text = 0, False
    for part in parts:
        if isinstance(part, Media):
            media.append(PlacedMedia(length, part))
        else:
            pieces.append(joint + part if follows_text else part)
            length += len(pieces[-1])
        follows_text = isinstance(part, str)
    return InterleavedText("".join(pieces), media)


def read_media_url(
    url: str, kind: MediaKind, field: str, *, files: bool = True
) -> EncodedMedia | MediaAddress | MediaPath:
    """Return the source that a URL names: http, https, data, and with ``files`` also file. Raises BadMedia."""
    match url[: max(0, url.find(":", 0, SCHEME_LENGTH))].lower():
        case "data":
            return read_data_url(url, kind, field)
        case "http" | "https":
            return read_address(url, kind, field)
        case "file" if files:
            return MediaPath(unquote(url[len("file:") :].removeprefix("//")))
    allowed = "http:, https:, data: or file:" if files else "http:, https: or data:"
    message = f"Invalid '{field}': the URL must begin with {allowed}."
    raise BadMedia(message, reason="bad_address", kind=kind, field=field, schemes=allowed)


def read_address(url: str, kind: MediaKind, field: str) -> MediaAddress:
    """Return an http or https URL. Raises BadMedia if it is too long."""
    if len(url) > MAX_URL_LENGTH:
        raise BadMedia(
            f"Invalid '{field}': the URL has {len(url)} characters; at most {MAX_URL_LENGTH} are allowed.",
            reason="bad_address",
            kind=kind,
            field=field,
            size=len(url),
            limit=MAX_URL_LENGTH,
        )
    return MediaAddress(url)


def read_data_url(url: str, kind: MediaKind, field: str) -> EncodedMedia:
    """Return the file in a data: URL, of the form data:image/png;base64,iVBO…, still in base64. Raises BadMedia.

    The format is RFC 2397's, with base64 only.
    """
    scheme, _, header = url[: max(0, url.find(",", 0, MAX_HEADER))].lower().partition(":")
    if scheme != "data" or not header.endswith(";base64"):
        message = f"Invalid '{field}': a data: URL must have the form data:TYPE;base64,DATA."
        raise BadMedia(message, reason="bad_data_url", kind=kind, field=field)
    return EncodedMedia(url.partition(",")[2], header.partition(";")[0])


def check_media_counts(media: Iterable[Media], limits: Mapping[MediaKind, int]) -> None:
    """Raise BadMedia for the first item beyond the number of its kind that a request may have."""
    counts: dict[MediaKind, int] = {}
    for item in media:
        counts[item.kind] = count = counts.get(item.kind, 0) + 1
        limit = limits.get(item.kind, 0)
        if count > limit:
            message = f"Invalid '{item.field}': a request may have at most {limit} {item.kind} items."
            raise BadMedia(message, reason="too_many", kind=item.kind, field=item.field, limit=limit)


def name_readable_kinds(kinds: Container[MediaKind]) -> str:
    """Name the inputs of a model, such as "text, images and audio". ``kinds``: those of media that it reads."""
    *names, last = ["text", *(noun for kind, noun in KIND_NOUNS.items() if kind in kinds)]
    return f"{', '.join(names)} and {last}" if names else last
