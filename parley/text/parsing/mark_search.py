"""Finds marks in text that arrives in pieces: where the first one is, and how much of the end may still become one."""

from __future__ import annotations

import re
from functools import cache


class MarkFinder:
    """A set of texts to search for together; none is a prefix of another. Make one with ``compile_marks``."""

    def __init__(self, texts: tuple[str, ...]):
        self.texts = texts
        self._any_mark = re.compile("|".join(map(re.escape, texts)))
        self._first_characters = re.compile("[" + "".join(sorted({re.escape(text[0]) for text in texts})) + "]")
        self._longest = max(map(len, texts))

    def may_begin_in(self, text: str) -> bool:
        """Whether a text has the first character of a mark."""
        return self._first_characters.search(text) is not None

    def find_first(self, text: str, start: int) -> tuple[int, str]:
        """Return how far the text after ``start`` is free of marks, and the mark found there ("" for none)."""
        match = self._any_mark.search(text, start)
        if match is not None:
            return match.start(), match[0]
        position = max(start, len(text) - self._longest + 1)
        while (first_character := self._first_characters.search(text, position)) is not None:
            position = first_character.start()
            tail = text[position:]
            if any(mark.startswith(tail) for mark in self.texts):
                return position, ""
            position += 1
        return len(text), ""


@cache
def compile_marks(*texts: str) -> MarkFinder:
    """Return the marks, compiled once per set of texts."""
    return MarkFinder(texts)
