"""The draft model: proposes draft tokens with a small network and KV pages of its own.

It extends each sequence greedily by its own most probable tokens, all sequences of a call in one batch. Tokens that it
has not read yet are read at the next call, a bounded number each time; until it has caught up with a sequence, it
proposes nothing for it. It manages its pages itself: the least recently requested sequence loses its pages and is read
again later. It has no LoRA adapters: sequences with one are extended without it, so fewer drafts are accepted.

It must not know which drafts were accepted. It notices a rejected one because the sequence continues differently.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from parley import native
from parley.core.pages.block_pool import BlockPool, pages
from parley.core.sequence import BLOCK_SIZE, Sequence
from parley.model.networks.network import Batch, Network
from parley.model.networks.paged_kv import PagedKV

READ = 512  # tokens read per call, besides the new ones since the last call


@dataclass(eq=False, slots=True)
class Place:
    """The draft model's progress in a sequence. The keys and values of ``tokens``, drafts included, are in ``blocks``.
    The first ``confirmed`` tokens are confirmed tokens of the sequence."""

    tokens: list[int] = field(default_factory=list)
    sure: int = 0
    blocks: list[int] = field(default_factory=list)


class Draft:
    """``core.sequence.Proposer`` with its own network and pages, for sequences of up to ``max_model_len`` tokens."""

    def __init__(self, network: Network, kv: PagedKV, *, max_model_len: int):
        self.network = network
        self.kv = kv
        self.max_model_len = max_model_len
        self.pool = BlockPool(kv.blocks)
        self._places: OrderedDict[Sequence, Place] = OrderedDict()  # the most recently requested sequence is last

    @torch.inference_mode()
    def warm(self) -> None:
        """Run one forward pass over page 0, before any page is in use, to trigger one-time setup in libraries."""
        self.kv.clear([0])
        self._next([([0] * min(BLOCK_SIZE, self.max_model_len), 0, [0])])

    @torch.inference_mode()
    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return at most the requested number of draft tokens for each (sequence, count)."""
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
        """Free the pages of a finished sequence."""
        place = self._places.pop(sequence, None)
        if place is not None:
            self.pool.drop(place.blocks)

    def _agreed(self, sequence: Sequence, place: Place) -> int:
        """Drop tokens that differ from the sequence's, and its last one, which must be read again. Return the rest."""
        tokens, read = sequence.tokens, place.tokens
        count = min(len(read), len(tokens) - 1)
        at = min(count, place.sure)
        while at < count and read[at] == tokens[at]:
            at += 1
        del read[at:]
        place.sure = at
        return at

    def _reserve(self, place: Place, tokens: int, fresh: list[int], busy: set[Place]) -> bool:
        """Reserve pages for ``token_count`` tokens, evicting the least recently used states that are not ``busy``."""
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
        """Return the most probable next token of each part (tokens, start position, pages of the sequence)."""
        batch = Batch.pack(parts, self.kv.device)
        hidden = self.network.hidden(batch, self.kv)
        last = torch.tensor([span.first + span.count - 1 for span in batch.spans], device=self.kv.device)
        return native.argmax(self.network.logits(hidden.index_select(0, last)))[1].tolist()
