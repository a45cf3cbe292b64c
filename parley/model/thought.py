"""How far a sequence is in its reasoning, and when that has to end: with its budget, by tokens that must come next.

Marks are looked for in the bytes of the tokens, for a mark that is no token of its own may share one with its
neighbours. Knows tokens and their bytes; nothing of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Literal

from parley.types import Thinking

LONGEST = 4  # bytes of a character


class Thought:
    """The reasoning of one sequence. ``spell``: the bytes of a token.

    ``forced``: the token that must come next, None where any may.
    """

    def __init__(self, thinking: Thinking, spell: Callable[[int], bytes]):
        self.forced: int | None = None
        self._thinking = thinking
        self._spell = spell
        self._state: Literal["before", "inside", "closing", "over"] = "inside" if thinking.inside else "before"
        self._text = b""  # before: all of it; inside: its end
        self._count = 0  # tokens inside, then of those that close it
        self._close()

    def copy(self) -> Thought:
        """The same place, to go on from separately."""
        return copy(self)

    def append(self, token: int) -> None:
        """Move on by a token of the output."""
        match self._state:
            case "before":
                self._text += self._spell(token)
                opening = self._thinking.opening.encode()
                text = self._text.lstrip(b"\n")
                if text.startswith(opening):
                    self._state, self._text = "inside", text[len(opening) :]
                elif not opening.startswith(text):
                    self._state = "over"
            case "inside":
                self._text += self._spell(token)
                self._count += 1
            case "closing":
                self._count += 1
        self._close()

    def _close(self) -> None:
        closing, close = self._thinking.closing.encode(), self._thinking.close
        if self._state == "inside":
            if closing in self._text:
                self._state = "over"
            # Half a character is let end first, but not for ever.
            elif self._count >= self._thinking.budget + (LONGEST if _cut(self._text) else 0):
                self._state, self._count = "closing", 0
            self._text = self._text[-max(len(closing) - 1, LONGEST) :]
        if self._state == "closing" and self._count == len(close):
            self._state = "over"
        self.forced = close[self._count] if self._state == "closing" else None


def _cut(text: bytes) -> bool:
    """Whether UTF-8 text ends within a character."""
    for back in range(1, min(LONGEST, len(text) + 1)):
        byte = text[-back]
        if byte & 0xC0 != 0x80:  # the first of a character: the ones that lead say how many there are
            return byte >= 0xC0 and back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
