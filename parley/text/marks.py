"""Marks in text that arrives in pieces: where the first of them is, and how much of the end may still become one."""

from __future__ import annotations

import re
from functools import cache


class Marks:
    """Texts that are looked for together, of which none begins with another. Made by ``marks``."""

    def __init__(self, texts: tuple[str, ...]):
        self.texts = texts
        self._whole = re.compile("|".join(map(re.escape, texts)))
        self._first = re.compile("[" + "".join(sorted({re.escape(text[0]) for text in texts})) + "]")
        self._longest = max(map(len, texts))

    def find(self, text: str, start: int) -> tuple[int, str]:
        """How far text from ``start`` on is no part of a mark, and the mark that stands there: empty if none does."""
        found = self._whole.search(text, start)
        if found is not None:
            return found.start(), found[0]
        at = max(start, len(text) - self._longest + 1)
        while (begin := self._first.search(text, at)) is not None:
            at = begin.start()
            rest = text[at:]
            if any(each.startswith(rest) for each in self.texts):
                return at, ""
            at += 1
        return len(text), ""


@cache
def marks(*texts: str) -> Marks:
    return Marks(texts)
