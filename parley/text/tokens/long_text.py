"""Encodes a long text in pieces, so that it takes little memory at a time and can be abandoned between pieces.

Tokenizers encode only whole texts. But a token depends on little of the text around it, so two pieces that overlap
agree from some token on, and are joined there: where many tokens in a row are the same at the same characters. The
result is that of the whole text. If the pieces of a text do not agree, as in one word of a million letters, larger
pieces are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from parley.errors import InvalidValue
from parley.interrupt import stop_if_abandoned

PIECE_SIZE = 1 << 18  # characters of a piece, which takes 40 MB; shorter texts are encoded at once
MAX_PIECE_LENGTH = 1 << 21  # characters of the largest piece that is tried; it takes 300 MB
OVERLAP = 1 << 12  # characters that a piece shares with the next one
JOINT_LENGTH = 16  # tokens in a row that have to agree

Encode = Callable[[str], Any]  # encodes a text without special tokens around it, to a ``tokenizers.Encoding``


class Piece:
    """The tokens of the text from character ``start`` to ``end``. Spans are positions in the whole text."""

    def __init__(self, start: int, end: int, encoding: Any):
        self.start, self.end = start, end
        self.ids: list[int] = encoding.ids
        self._encoding = encoding

    def span(self, index: int) -> tuple[int, int]:
        """Return the characters of one token."""
        first, last = self._encoding.token_to_chars(index)
        return first + self.start, last + self.start

    def spans(self, indices: slice) -> list[tuple[int, int]]:
        """Return the characters of some tokens."""
        return [(first + self.start, last + self.start) for first, last in self._encoding.offsets[indices]]


def encode_pieces(encode: Encode, text: str) -> Iterator[tuple[Piece, slice]]:
    """Yield pieces of a text, and which of their tokens to take. Raises InvalidValue, Abandoned."""
    piece, first = encode_piece(encode, text, 0, PIECE_SIZE), 0
    while piece.end < len(text):
        if not piece.ids or piece.span(len(piece.ids) - 1)[1] <= piece.end - OVERLAP:  # blanks without tokens follow
            yield piece, slice(first, None)
            piece, first = encode_piece(encode, text, piece.end - OVERLAP // 2, PIECE_SIZE), 0
            continue
        shared = _first_shared_token(piece)
        following = encode_piece(encode, text, piece.span(shared)[0], PIECE_SIZE)
        joint = _find_joint(piece, shared, following)
        if joint is None:
            piece = encode_piece(encode, text, piece.start, 2 * (piece.end - piece.start))
            continue
        last, next_first = joint
        yield piece, slice(first, last)
        piece, first = following, next_first
    yield piece, slice(first, None)


def encode_piece(encode: Encode, text: str, start: int, size: int) -> Piece:
    """Encode ``size`` characters of a text. Raises InvalidValue if they are too many, Abandoned."""
    stop_if_abandoned()
    if size > MAX_PIECE_LENGTH:
        raise InvalidValue(
            f"The text has {MAX_PIECE_LENGTH} characters in a row without a place where it can be divided into tokens.",
            field="prompt",
        )
    end = min(start + size, len(text))
    return Piece(start, end, encode(text[start:end]))


def _first_shared_token(piece: Piece) -> int:
    """Return the index of the first token in the part of a piece that the next one shares, or of its last token."""
    border = piece.end - OVERLAP
    index = len(piece.ids) - 1
    while index and piece.span(index - 1)[0] >= border:
        index -= 1
    return index


def _find_joint(piece: Piece, shared: int, following: Piece) -> tuple[int, int] | None:
    """Return where to leave a piece and to enter the following one, as token indices; None if they do not agree."""
    index_of: dict[tuple[int, int], int] = {}
    for index in range(len(following.ids)):
        span = following.span(index)
        if span[0] >= piece.end:
            break
        index_of.setdefault(span, index)
    for last in range(shared, len(piece.ids) - JOINT_LENGTH + 1):
        first = index_of.get(piece.span(last))
        if first is not None and _tokens_agree(piece, last, following, first):
            return last, first
    return None


def _tokens_agree(piece: Piece, last: int, following: Piece, first: int) -> bool:
    return len(following.ids) >= first + JOINT_LENGTH and all(
        piece.ids[last + step] == following.ids[first + step]
        and piece.span(last + step) == following.span(first + step)
        for step in range(JOINT_LENGTH)
    )
