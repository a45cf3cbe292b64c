"""A turn's content as the list of parts that the chat templates of multimodal models read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parley.types import MediaKind, PlacedMedia

PromptMarks = Mapping[MediaKind, str]  # the text that stands for an item in a prompt, by its kind


def content_parts(text: str, media: Sequence[PlacedMedia]) -> list[dict[str, Any]]:
    """Return a turn's content as the list of parts that templates of multimodal models read."""
    parts: list[dict[str, Any]] = []
    start = 0
    for placed in media:
        position = max(start, min(placed.position, len(text)))
        if position > start:
            parts.append({"type": "text", "text": text[start:position]})
        parts.append({"type": placed.media.kind})
        start = position
    return [*parts, {"type": "text", "text": text[start:]}] if start < len(text) else parts


def text_of_parts(parts: Sequence[Mapping[str, Any]], marks: PromptMarks) -> str:
    """Return the content for a template that reads texts only: marks and texts, in lines."""
    return "\n".join(part["text"] if part["type"] == "text" else marks[part["type"]] for part in parts)
