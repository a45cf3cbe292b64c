"""Write texts in llguidance's dialect of Lark, which names special tokens by their ids.

Independent of the grammar around a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


class Lark:
    """Writes texts for a model with these ``marks`` (text to id)."""

    def __init__(self, marks: Mapping[str, int]):
        self.marks = marks
        longest = sorted(filter(None, marks), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest))) if longest else None

    def text(self, text: str) -> str:
        """Write a text as a sequence: marks by their ids, everything else as strings. Empty for an empty text."""
        parts, at = [], 0
        for found in self._any.finditer(text) if self._any is not None else ():
            parts += [text[at : found.start()] and quoted(text[at : found.start()]), f"<[{self.marks[found[0]]}]>"]
            at = found.end()
        return " ".join(filter(None, [*parts, text[at:] and quoted(text[at:])]))

    def mark(self, text: str) -> re.Match[str] | None:
        """Return the first mark in a text, or None."""
        return self._any.search(text) if self._any is not None else None


def quoted(text: str) -> str:
    """Return a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
