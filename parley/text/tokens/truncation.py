"""Encodes only as much of a text as can be used: a megabyte for a context of some thousand tokens is not read whole.

Knows texts and tokens, but not prompts.
"""

from __future__ import annotations

from parley.errors import ContextLength
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import TruncationSide

PROBE_CHARACTERS = 32  # characters per allowed token: a part of this size of a longer text is encoded first


def encode_within_limit(
    tokenizer: Tokenizer,
    text: str,
    special: bool,
    *,
    limit: int | None,
    cut: int | None,
    keep: TruncationSide,
    marked: bool,
) -> list[int]:
    """Return the tokens of a text. Raises ContextLength for a text that has over twice ``limit`` tokens.

    ``cut``: return at most ``cut`` tokens, of the end named by ``keep``; with ``marked``, the special tokens around the
    text are among them.
    """
    if cut is not None and (limit is None or cut <= limit):  # a larger cut would not fit the context anyway
        return (
            _encode_with_marks(tokenizer, text, special, cut, keep)
            if marked
            else _encode_tail(tokenizer, text, special, limit, cut)
        )
    size = PROBE_CHARACTERS * limit if limit is not None else len(text)
    while limit is not None and size < len(text):
        # The rest cannot halve the token count of the beginning: a token's end depends on little of the text after it.
        if len(tokenizer.encode(text[:size], special=False)) > 2 * limit:
            raise ContextLength(
                f"This model's maximum context length is {limit} tokens, and the prompt has over twice as many.",
                field="prompt",
            )
        size *= PROBE_CHARACTERS
    return tokenizer.encode(text, special)


def _encode_with_marks(tokenizer: Tokenizer, text: str, special: bool, count: int, keep: TruncationSide) -> list[int]:
    size = PROBE_CHARACTERS * count
    while size < len(text):
        part = text[:size] if keep == "head" else text[-size:]
        if len(tokenizer.encode(part, special=False)) > 2 * count:  # twice: as in ``_encode_tail``
            return tokenizer.encode_truncated(part, special, count, keep)
        size *= PROBE_CHARACTERS
    return tokenizer.encode_truncated(text, special, count, keep)


def _encode_tail(tokenizer: Tokenizer, text: str, special: bool, limit: int | None, count: int) -> list[int]:
    size = PROBE_CHARACTERS * limit if limit is not None else len(text)
    while size < len(text):
        ids = tokenizer.encode(text[-size:], special)
        if len(ids) > 2 * count:  # twice: the first tokens after the cut may be divided differently
            return ids[-count:]
        size *= PROBE_CHARACTERS
    return tokenizer.encode(text, special)[-count:]
