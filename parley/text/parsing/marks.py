"""Finds marks in text that arrives in pieces: where the first one is, and how much of the end may still become one."""

from __future__ import annotations

import re
from functools import cache


class Marks:
    """A set of texts to search for together; none is a prefix of another. Make one with ``compile_marks``."""

    def __init__(self, texts: tuple[str, ...]):
        self.texts = texts
        self._whole = re.compile("|".join(map(re.escape, texts)))
        self._first = re.compile("[" + "".join(sorted({re.escape(text[0]) for text in texts})) + "]")
        self._longest = max(map(len, texts))

    def find(self, text: str, start: int) -> tuple[int, str]:
        """Return how far the text after ``start`` is free of marks, and the mark found there ("" for none)."""
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
    """Return the marks, compiled once per set of texts."""
    return Marks(texts)
