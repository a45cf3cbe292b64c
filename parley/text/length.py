"""Encoding no more of a text than may be used: a megabyte for a context of some thousand tokens is not read whole.

Knows texts and tokens, and not what they are a prompt of.
"""

from __future__ import annotations

from parley.errors import ContextLength
from parley.types import Keep

from .tokenizer import Tokenizer

PROBE = 32  # characters per token: what is longer than so many for each token allowed is probed before it is read


def encode(
    tokenizer: Tokenizer, text: str, special: bool, *, limit: int | None, cut: int | None, keep: Keep, marked: bool
) -> list[int]:
    """The tokens of a text; of one that is hopelessly longer than ``limit`` so much is said (ContextLength).

    ``cut``: at most so many, of the end that ``keep`` says, with the marks around the text if it is ``marked``.
    """
    if cut is not None and (limit is None or cut <= limit):  # more would not fit, cut or not
        return _marked(tokenizer, text, special, cut, keep) if marked else _end(tokenizer, text, special, limit, cut)
    size = PROBE * limit if limit is not None else len(text)
    while limit is not None and size < len(text):
        # The rest cannot halve what its beginning has: where a token ends depends on little of what follows.
        if len(tokenizer.encode(text[:size], special=False)) > 2 * limit:
            raise ContextLength(
                f"This model's maximum context length is {limit} tokens, and the prompt has over twice as many.",
                field="prompt",
            )
        size *= PROBE
    return tokenizer.encode(text, special)


def _marked(tokenizer: Tokenizer, text: str, special: bool, count: int, keep: Keep) -> list[int]:
    size = PROBE * count
    while size < len(text):
        part = text[:size] if keep == "head" else text[-size:]
        if len(tokenizer.encode(part, special=False)) > 2 * count:  # twice: as in ``_end``
            return tokenizer.encode_cut(part, special, count, keep)
        size *= PROBE
    return tokenizer.encode_cut(text, special, count, keep)


def _end(tokenizer: Tokenizer, text: str, special: bool, limit: int | None, count: int) -> list[int]:
    size = PROBE * limit if limit is not None else len(text)
    while size < len(text):
        ids = tokenizer.encode(text[-size:], special)
        if len(ids) > 2 * count:  # twice: where the first tokens behind the cut begin is not certain
            return ids[-count:]
        size *= PROBE
    return tokenizer.encode(text, special)[-count:]
