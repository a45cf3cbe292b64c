"""The thinking budget: tracks a sequence's reasoning and forces the closing tokens when the budget is used up.

Marks are searched in the bytes of the tokens, because a mark that is not a token of its own may share tokens with its
neighbours. This module knows tokens and their bytes, and nothing of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Literal

from parley.types import ReasoningLimit

MAX_CHAR_BYTES = 4  # bytes of the longest UTF-8 character


class ThinkingBudget:
    """The reasoning of one sequence. ``token_bytes``: returns the bytes of a token.

    ``forced``: the token that must come next, None if any may.
    """

    def __init__(self, thinking: ReasoningLimit, token_bytes: Callable[[int], bytes]):
        self.forced: int | None = None
        self._thinking = thinking
        self._token_bytes = token_bytes
        self._state: Literal["before", "inside", "closing", "over"] = "inside" if thinking.starts_inside else "before"
        self._text = b""  # before the reasoning: all text so far; inside it: the end of the text
        self._count = 0  # tokens inside, then closing tokens
        self._update_forced()

    def copy_budget(self) -> ThinkingBudget:
        """Return an independent budget at the same position."""
        return copy(self)

    def track_token(self, token: int) -> None:
        """Advance by an output token."""
        match self._state:
            case "before":
                self._text += self._token_bytes(token)
                opening = self._thinking.opening_mark.encode()
                text = self._text.lstrip(b"\n")
                if text.startswith(opening):
                    self._state, self._text = "inside", text[len(opening) :]
                elif not opening.startswith(text):
                    self._state = "over"
            case "inside":
                self._text += self._token_bytes(token)
                self._count += 1
            case "closing":
                self._count += 1
        self._update_forced()

    def _update_forced(self) -> None:
        """Begin or end the closing if it is time, and set ``forced``."""
        closing, close = self._thinking.closing_mark.encode(), self._thinking.closing_ids
        if self._state == "inside":
            if closing in self._text:
                self._state = "over"
            # A partial character may be completed first, within a limit.
            elif self._count >= self._thinking.budget + (MAX_CHAR_BYTES if _ends_within_char(self._text) else 0):
                self._state, self._count = "closing", 0
            self._text = self._text[-max(len(closing) - 1, MAX_CHAR_BYTES) :]
        if self._state == "closing" and self._count == len(close):
            self._state = "over"
        self.forced = close[self._count] if self._state == "closing" else None


def _ends_within_char(text: bytes) -> bool:
    """Whether UTF-8 text ends within a character."""
    for back in range(1, min(MAX_CHAR_BYTES, len(text) + 1)):
        byte = text[-back]
        if byte & 0xC0 != 0x80:  # a character's first byte, whose leading ones give the number of bytes
            return byte >= 0xC0 and back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
