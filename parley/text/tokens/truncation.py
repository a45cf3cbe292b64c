"""Encodes only as much of a text as can be used: a megabyte for a context of some thousand tokens is not read whole.

Knows texts and tokens, but not prompts.
"""

from __future__ import annotations

from parley.errors import ContextLength
from parley.text.tokens import long_text
from parley.text.tokens.text_encoder import TextEncoder
from parley.types import KeptSide

END_CHARACTERS = 16  # characters per token that is kept: a part of this size of a longer text is encoded first
SMALLEST_END = 1 << 16  # characters of the smallest such part


def encode_within_limit(
    encoder: TextEncoder,
    text: str,
    add_special_tokens: bool,
    *,
    context_length: int | None,
    counted_tokens: int,
    max_tokens: int | None,
    kept_side: KeptSide,
    counts_special: bool,
) -> list[int]:
    """Return the tokens of a text. Raises ContextLength for a long text that has over twice ``context_length`` tokens,
    and also over ``counted_tokens``.

    ``max_tokens``: return at most this many tokens, those at ``kept_side``; with ``counts_special``, the special tokens
    around the text are among them.
    """
    if max_tokens is not None and (context_length is None or max_tokens <= context_length):
        return _encode_cut(encoder, text, add_special_tokens, max_tokens, kept_side, counts_special)
    # No cut is needed, or one that would not fit into the context anyway.
    if context_length is None:
        return encoder.encode(text, add_special_tokens)
    measured_tokens = max(2 * context_length, counted_tokens)
    ids = encoder.encode(text, add_special_tokens, measured_tokens)
    if len(ids) > measured_tokens and len(text) > long_text.PIECE_SIZE:
        raise ContextLength(
            f"This model's maximum context length is {context_length} tokens, and the prompt has over "
            f"{measured_tokens}.",
            field="prompt",
            limit=context_length,
            prompt_over=measured_tokens,
        )
    return ids


def _encode_cut(
    encoder: TextEncoder, text: str, add_special_tokens: bool, count: int, kept_side: KeptSide, counts_special: bool
) -> list[int]:
    opening, closing = encoder.special_around if add_special_tokens else ([], [])
    room = max(0, count - len(opening) - len(closing))
    if not counts_special:
        return [*opening, *_encode_end(encoder, text, count), *closing][-count:]
    if kept_side == "head":
        kept_ids = encoder.encode(text, add_special_tokens=False, stop_after=room)[:room]
    else:
        kept_ids = _encode_end(encoder, text, room)[-room:] if room else []
    return [*opening, *kept_ids, *closing][:count]


def _encode_end(encoder: TextEncoder, text: str, count: int) -> list[int]:
    """Return at least the last ``count`` tokens of a text, or all if it has fewer."""
    size = max(END_CHARACTERS * count, SMALLEST_END)
    while size < len(text):
        ids = encoder.encode(text[-size:], add_special_tokens=False)
        if len(ids) > 2 * count:  # twice: the first tokens after the cut may be divided differently
            return ids
        size *= END_CHARACTERS
    return encoder.encode(text, add_special_tokens=False)
