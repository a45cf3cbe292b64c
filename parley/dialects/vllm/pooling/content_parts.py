"""The parts of an input's content, which the routes of scores and Cohere's embeddings read: texts and media."""

from __future__ import annotations

from collections.abc import Iterable

from parley.dialects.fields import Fields
from parley.dialects.media import InterleavedText, check_media_counts, interleave_parts
from parley.dialects.openai.media_parts import MediaReader
from parley.types import Media


def read_pooling_parts(parts: Iterable[Fields], reader: MediaReader) -> InterleavedText:
    """Return the texts of the parts, each on a line of its own, and the media within them. Raises BadRequest."""
    content = interleave_parts((_read_part(part, reader) for part in parts), "\n")
    check_media_counts((placed.media for placed in content.media), reader.limits)
    return content


def _read_part(part: Fields, reader: MediaReader) -> str | Media:
    """Return the text or the item of a part. Raises BadRequest."""
    item = reader.read_part(part, "user", ("text",))
    if item is not None:
        return item
    text = part.string("text", None)
    if text is None:
        raise part.missing_member("text")
    return text
