"""Turns token ids into text as they arrive, without ever splitting or repeating a character.

The returned pieces, concatenated, are the text that the ids add after the prompt. The cost per token is constant.

There are two methods, and the tokenizer decides which is used. ``Detokenizer`` passes the tokens' bytes through an
incremental UTF-8 decoder, which cannot drift. For the few tokenizers whose tokens change with their neighbours,
``_DecodingWindow`` decodes the last few tokens again and returns the new text.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

from parley.text.tokens.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
MAX_CHARACTER_BYTES = 4  # bytes of the longest UTF-8 character


class Detokenizer:
    """Text of one growing sequence of ids.

    ``prompt_ids`` are the context: it may end inside a word or inside a character. ``keep``: special tokens to show
    although ``skip_special`` hides the others (the marks that the output parser needs).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special: bool = True,
        keep: Collection[int] = (),
    ):
        self._tokenizer = tokenizer
        hidden = tokenizer.special_ids if skip_special else frozenset()
        self._hidden = hidden.difference(keep) if keep else hidden
        self._decoder = _Utf8Decoder("replace")
        self._window = (
            None
            if tokenizer.decodes_by_token
            else _DecodingWindow(tokenizer, self._visible_tail(prompt_ids, CONTEXT_TOKENS))
        )
        self._started = self._window is not None or self._take_over_prompt(prompt_ids)
        self._incomplete = bool(self._decoder.getstate()[0])  # the last character is incomplete

    def decode_token(self, token_id: int) -> str:
        """Return the text that one id adds: ``decode_tokens`` for a single id, faster."""
        if self._window is None and self._started and not self._incomplete:
            if token_id in self._hidden:
                return ""
            text = self._tokenizer.token_text(token_id)
            if text is not None:
                return text
        return self.decode_tokens((token_id,))

    def decode_tokens(self, ids: Iterable[int]) -> str:
        """Return the text that is certain after these ids. It may be empty, or include text of earlier ids."""
        if self._window is not None:
            return "".join([self._window.push_token(token_id) for token_id in ids if token_id not in self._hidden])
        data = b"".join([self._next_bytes(token_id) for token_id in ids if token_id not in self._hidden])
        text = self._decoder.decode(data) if data else ""
        self._incomplete = bool(self._decoder.getstate()[0])
        return text

    def flush_text(self) -> str:
        """Return the text held back when no more ids come: U+FFFD for an incomplete character."""
        return self._window.flush_window() if self._window is not None else self._decoder.decode(b"", final=True)

    def _next_bytes(self, token_id: int) -> bytes:
        if self._started:
            return self._tokenizer.token_bytes(token_id)
        self._started = self._tokenizer.token_str(token_id) is not None
        return self._tokenizer.first_token_bytes(token_id)

    def _take_over_prompt(self, prompt_ids: Sequence[int]) -> bool:
        """Take over an incomplete character from the prompt. Return False if no token of the prompt is visible."""
        if prompt_ids and prompt_ids[-1] not in self._hidden and self._tokenizer.token_text(prompt_ids[-1]):
            return True  # the usual case: the last token ends with a whole character
        tail = self._visible_tail(prompt_ids, MAX_CHARACTER_BYTES)
        self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, tail)))
        return bool(tail)

    def _visible_tail(self, ids: Sequence[int], count: int) -> list[int]:
        tail: list[int] = []
        for token_id in reversed(ids):
            if token_id not in self._hidden:
                tail.append(token_id)
                if len(tail) == count:
                    break
        return tail[::-1]


CONTEXT_TOKENS = 6  # tokens of context that can change how a token is written
MAX_WINDOW_TOKENS = 96  # of a window that grows because its tokens have no text
MAX_INCOMPLETE_TOKENS = 8  # tokens to wait before a U+FFFD at the end is taken for a real one


class _DecodingWindow:
    """Decodes a window of the last tokens again for each token and returns the text that is new."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]):
        self._tokenizer = tokenizer
        self._ids = context
        self._text = self._tokenizer.decode(context, False)  # text of the ids that was returned already
        self._unreturned = 0  # number of ids at the end whose text was not returned

    def push_token(self, token_id: int) -> str:
        self._ids.append(token_id)
        self._unreturned += 1
        text = self._tokenizer.decode(self._ids, False)
        if text.endswith("\ufffd") and self._unreturned < MAX_INCOMPLETE_TOKENS:
            return ""
        return self._advance_window(text)

    def flush_window(self) -> str:
        return self._advance_window(self._tokenizer.decode(self._ids, False)) if self._unreturned else ""

    def _advance_window(self, text: str) -> str:
        new_text = text[_common_prefix(text, self._text) :]  # the decoder may have rewritten text that was returned
        kept_ids = self._ids[-max(CONTEXT_TOKENS, self._unreturned) :]
        kept_text = self._tokenizer.decode(kept_ids, False)
        if kept_text or len(self._ids) > MAX_WINDOW_TOKENS:
            self._ids, self._text = kept_ids, kept_text
        else:  # the token before these decides how the next one is written
            self._text = text
        self._unreturned = 0
        return new_text


def _common_prefix(first: str, second: str) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
