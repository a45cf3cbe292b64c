"""The strings in the arguments of a call, found while the arguments arrive."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from parley.dialects.openai.custom_tools import CHARACTERS, decode_characters

MEMBER = r'\s*[{,]\s*"([^"\\]{0,64})"\s*:\s*'
STRING_BEGINS = re.compile(rf'{MEMBER}(\[\s*)?"')
SKIPPED_VALUE = re.compile(rf"{MEMBER}(?:\[\s*\]|[-+.0-9a-zA-Z]{{1,64}}(?=\s*[,}}]))")
NEXT_IN_ARRAY = re.compile(r'\s*,\s*"')
ARRAY_ENDS = re.compile(r"\s*\]")
MAX_ESCAPE_LENGTH = 12  # characters of a pair of escapes that has not arrived whole
MAX_STEP_LENGTH = 256  # characters between two strings; more are no arguments that this class reads


class StringPiece(NamedTuple):
    """A piece of a string. ``place``: of the string in an array. ``is_first``, ``is_last``: piece of its string."""

    member: str
    place: int
    text: str
    is_first: bool
    is_last: bool


class ArgumentStrings:
    """Reads an object whose members are strings, arrays of strings, numbers and words.

    It stops, without an error, at anything else: the caller reads the arguments again when they are complete.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._member, self._index = "", 0
        self._in_string = self._in_array = self._is_first = self._has_stopped = False

    def add_arguments(self, arguments: str) -> Iterator[StringPiece]:
        """Add a piece of the arguments; yield the strings in it."""
        if self._has_stopped:
            return
        self._unread += arguments
        while self._in_string or self._find_string():
            characters = CHARACTERS.match(self._unread)
            assert characters is not None
            text, self._unread = decode_characters(characters[0]), self._unread[characters.end() :]
            is_last = self._unread.startswith('"')
            if text or is_last:
                yield StringPiece(self._member, self._index, text, self._is_first, is_last)
                self._is_first = False
            if not is_last:
                self._has_stopped = len(self._unread) > MAX_ESCAPE_LENGTH
                return
            self._unread, self._in_string = self._unread[1:], False
        self._has_stopped = len(self._unread) > MAX_STEP_LENGTH

    def _find_string(self) -> bool:
        """Go to the next string; return whether one begins."""
        while True:
            if self._in_array and (step := NEXT_IN_ARRAY.match(self._unread)):
                return self._begin_string(step.end(), self._member, self._index + 1)
            if self._in_array and (step := ARRAY_ENDS.match(self._unread)):
                self._unread, self._in_array = self._unread[step.end() :], False
            if self._in_array:
                return False
            if step := STRING_BEGINS.match(self._unread):
                self._in_array = step[2] is not None
                return self._begin_string(step.end(), step[1], 0)
            if not (step := SKIPPED_VALUE.match(self._unread)):
                return False
            self._unread = self._unread[step.end() :]

    def _begin_string(self, place: int, member: str, index: int) -> bool:
        self._unread = self._unread[place:]
        self._member, self._index = member, index
        self._in_string = self._is_first = True
        return True
