"""Guesses at what follows by a small model: a proposer with a network and pages of its own beside the main one's.

It writes each sequence on by its own likeliest tokens, all sequences of a call together. What it has not read of a
sequence yet it reads at the next call, a bounded number of tokens each time; until then it guesses nothing. Its pages
are its own affair: who was not asked for longest loses them, and is read again. It has no adapters: sequences that
have one are written on as without it, and fewer guesses are right.

It must not know what becomes of a guess. A wrong one is noticed by the sequence going on otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from parley import native
from parley.core.blocks import BlockPool, pages
from parley.core.sequence import BLOCK_SIZE, Sequence
from parley.model.kv import PagedKV
from parley.model.network import Batch, Network

READ = 512  # tokens read in a call beside those that are new since the last one


@dataclass(eq=False, slots=True)
class Place:
    """Where the model is in a sequence: keys and values of ``tokens``, guesses among them, lie in ``blocks``. The first
    ``sure`` of them are the sequence's own."""

    tokens: list[int] = field(default_factory=list)
    sure: int = 0
    blocks: list[int] = field(default_factory=list)


class Draft:
    """``core.sequence.Proposer`` over a network and its pages, for sequences of up to ``max_model_len`` tokens."""

    def __init__(self, network: Network, kv: PagedKV, *, max_model_len: int):
        self.network = network
        self.kv = kv
        self.max_model_len = max_model_len
        self.pool = BlockPool(kv.blocks)
        self._places: OrderedDict[Sequence, Place] = OrderedDict()  # who was asked for last comes last

    @torch.inference_mode()
    def warm(self) -> None:
        """One forward pass over page 0, before any page is in use: libraries set up here what they set up once."""
        self.kv.clear([0])
        self._next([([0] * min(BLOCK_SIZE, self.max_model_len), 0, [0])])

    @torch.inference_mode()
    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        for sequence, _ in asked:
            self._places.setdefault(sequence, Place())
            self._places.move_to_end(sequence)
        busy = {self._places[sequence] for sequence, _ in asked}
        guesses: list[list[int]] = [[] for _ in asked]
        left = READ
        fresh: list[int] = []
        parts: list[tuple[list[int], int, list[int]]] = []
        going: list[int] = []
        for number, (sequence, length) in enumerate(asked):
            place = self._places[sequence]
            start = self._agreed(sequence, place)
            end = len(sequence.tokens)
            if end + length > self.max_model_len or not self._reserve(place, end + length - 1, fresh, busy):
                continue
            if end - start > left + 1:
                end = start + left
            left -= max(0, end - start - 1)
            if end == start:
                continue
            known = self.network.vocab_size
            read = [id if id < known else 0 for id in sequence.tokens[start:end]]
            place.tokens += sequence.tokens[start:end]
            parts.append((read, start, place.blocks))
            going.append(number if end == len(sequence.tokens) else -1)
        self.kv.clear(fresh)
        while parts:
            found = self._next(parts)
            parts, numbers, going = [], going, []
            for number, token in zip(numbers, found, strict=True):
                if number < 0:
                    continue
                sequence, length = asked[number]
                guesses[number].append(token)
                if len(guesses[number]) < length:
                    place = self._places[sequence]
                    parts.append(([token], len(place.tokens), place.blocks))
                    place.tokens.append(token)
                    going.append(number)
        return guesses

    def forget(self, sequence: Sequence) -> None:
        place = self._places.pop(sequence, None)
        if place is not None:
            self.pool.drop(place.blocks)

    def _agreed(self, sequence: Sequence, place: Place) -> int:
        """Forget what it read that the sequence does not hold, and its last token: that is read for what follows it."""
        tokens, read = sequence.tokens, place.tokens
        count = min(len(read), len(tokens) - 1)
        at = min(count, place.sure)
        while at < count and read[at] == tokens[at]:
            at += 1
        del read[at:]
        place.sure = at
        return at

    def _reserve(self, place: Place, tokens: int, fresh: list[int], busy: set[Place]) -> bool:
        """Pages for so many tokens, if need be those of who was not asked for longest and is not ``busy``."""
        need = pages(tokens) - len(place.blocks)
        while self.pool.free < need:
            oldest = next((each for each in self._places.values() if each.blocks and each not in busy), None)
            if oldest is None:
                return False
            self.pool.drop(oldest.blocks)
            oldest.blocks.clear()
            oldest.tokens.clear()
            oldest.sure = 0
        for _ in range(need):
            place.blocks.append(self.pool.take())
            fresh.append(place.blocks[-1])
        return True

    def _next(self, parts: list[tuple[list[int], int, list[int]]]) -> list[int]:
        """The likeliest token behind each part: tokens, where they begin, and the sequence's pages."""
        batch = Batch.pack(parts, self.kv.device)
        hidden = self.network.hidden(batch, self.kv)
        last = torch.tensor([span.first + span.count - 1 for span in batch.spans], device=self.kv.device)
        return native.argmax(self.network.logits(hidden.index_select(0, last)))[1].tolist()
