"""Texts in llguidance's dialect of Lark, in which a token that is no text has to be named by its id.

Knows nothing of what a text is part of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


class Lark:
    """Writes texts for a model that has these ``marks``: ids by text."""

    def __init__(self, marks: Mapping[str, int]):
        self.marks = marks
        longest = sorted(filter(None, marks), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest))) if longest else None

    def text(self, text: str) -> str:
        """A text as a sequence: marks by their ids, what is between them as strings. Empty for an empty one."""
        parts, at = [], 0
        for found in self._any.finditer(text) if self._any is not None else ():
            parts += [text[at : found.start()] and quoted(text[at : found.start()]), f"<[{self.marks[found[0]]}]>"]
            at = found.end()
        return " ".join(filter(None, [*parts, text[at:] and quoted(text[at:])]))

    def mark(self, text: str) -> re.Match[str] | None:
        """The first mark in a text."""
        return self._any.search(text) if self._any is not None else None


def quoted(text: str) -> str:
    """A text as a string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
