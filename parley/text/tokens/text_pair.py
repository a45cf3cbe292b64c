"""Encodes two texts for a model that reads both at once, as a post-processor of the tokenizer joins them."""

from __future__ import annotations

from typing import NamedTuple

import tokenizers

from parley.types import KeptSide


class PairFrame(NamedTuple):
    """The special tokens of a pair: before, between and after its texts.

    ``type_shift``: where the tokens of the second type begin, relative to the second text; None if there is one type.
    """

    opening: list[int]
    middle: list[int]
    closing: list[int]
    type_shift: int | None

    @property
    def size(self) -> int:
        """Number of special tokens."""
        return len(self.opening) + len(self.middle) + len(self.closing)

    def join_texts(self, first: list[int], second: list[int]) -> tuple[list[int], int]:
        """Return the tokens of a pair, and where those of the second type begin; 0 if there are none."""
        ids = [*self.opening, *first, *self.middle, *second, *self.closing]
        if self.type_shift is None:
            return ids, 0
        return ids, len(self.opening) + len(first) + len(self.middle) + self.type_shift


def read_pair_frame(backend: tokenizers.Tokenizer, add_special_tokens: bool) -> PairFrame:
    """Return how a tokenizer joins two texts. ``add_special_tokens``: with its special tokens."""
    (encoding,) = backend.encode_batch([("a", "a")], add_special_tokens=add_special_tokens)
    sides = encoding.sequence_ids
    first = [index for index, side in enumerate(sides) if side == 0]
    second = [index for index, side in enumerate(sides) if side == 1]
    types = encoding.type_ids
    ids = encoding.ids
    return PairFrame(
        ids[: first[0]],
        ids[first[-1] + 1 : second[0]],
        ids[second[-1] + 1 :],
        types.index(1) - second[0] if 1 in types else None,
    )


def cut_pair(first: list[int], second: list[int], room: int, kept_side: KeptSide) -> tuple[list[int], list[int]]:
    """Cut two texts to ``room`` tokens together: the longer one first, then both to a half (``longest_first`` of the
    tokenizers library). ``kept_side``: the end of each text that stays."""
    shorter, longer = sorted((len(first), len(second)))
    if shorter + longer <= room:
        return first, second
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    sizes = (shorter, longer) if len(first) <= len(second) else (longer, shorter)
    return _cut_text(first, sizes[0], kept_side), _cut_text(second, sizes[1], kept_side)


def _cut_text(ids: list[int], size: int, kept_side: KeptSide) -> list[int]:
    return ids[:size] if kept_side == "head" else ids[len(ids) - size :] if size < len(ids) else ids
