"""The length of a text, as MindIE counts it."""

from __future__ import annotations


def utf16_length(text: str) -> int:
    """Return a text's length in UTF-16 units, as the original counts."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2
