"""Write texts in llguidance's dialect of Lark, which names special tokens by their ids.

Independent of the grammar around a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


class LarkWriter:
    """Writes texts for a model with these ``marks`` (text to id)."""

    def __init__(self, marks: Mapping[str, int]):
        self.marks = marks
        longest = sorted(filter(None, marks), key=len, reverse=True)
        self._mark_pattern = re.compile("|".join(map(re.escape, longest))) if longest else None

    def write_text(self, text: str) -> str:
        """Write a text as a sequence: marks by their ids, everything else as strings. Empty for an empty text."""
        parts, position = [], 0
        for mark in self._mark_pattern.finditer(text) if self._mark_pattern is not None else ():
            parts += [
                text[position : mark.start()] and quote_lark(text[position : mark.start()]),
                f"<[{self.marks[mark[0]]}]>",
            ]
            position = mark.end()
        return " ".join(filter(None, [*parts, text[position:] and quote_lark(text[position:])]))

    def find_mark(self, text: str) -> re.Match[str] | None:
        """Return the first mark in a text, or None."""
        return self._mark_pattern.search(text) if self._mark_pattern is not None else None


def quote_lark(text: str) -> str:
    """Return a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
