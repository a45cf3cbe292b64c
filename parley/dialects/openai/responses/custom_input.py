"""The text of a custom tool's call: a JSON string in the arguments of the function that stands for the tool."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from parley.dialects.openai.responses.tools import CUSTOM_INPUT

HEAD = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
PAIR = r"ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}"
CHARACTERS = re.compile(rf'(?:[^"\\]|\\(?:["\\/bfnrt]|{PAIR}|u(?!d[89a-f])[0-9a-f]{{4}}))*', re.IGNORECASE)


class CustomInput:
    """Reads the text while the arguments arrive. ``text``: so far."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._unread = ""
        self._has_begun = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def add_arguments(self, arguments: str) -> str:
        """Add a piece of the arguments; return the text in it."""
        self._unread += arguments
        if not self._has_begun:
            if (head := HEAD.match(self._unread)) is None:
                return ""
            self._has_begun, self._unread = True, self._unread[head.end() :]
        characters = CHARACTERS.match(self._unread)
        assert characters is not None
        return self._take(characters.end())

    def finish(self, arguments: str) -> str:
        """Return the rest of the text, given all arguments. If they are not of the usual form, they are the text."""
        if self._has_begun:
            return ""
        try:
            value = msgspec.json.decode(arguments, type=dict[str, Any]).get(CUSTOM_INPUT)
        except (msgspec.MsgspecError, RecursionError):
            value = None
        self._pieces.append(value if isinstance(value, str) else arguments)
        return self._pieces[-1]

    def _take(self, length: int) -> str:
        piece = str(json.loads(f'"{self._unread[:length]}"', strict=False))  # models write bare line ends, too
        self._unread = self._unread[length:]
        self._pieces.append(piece)
        return piece
