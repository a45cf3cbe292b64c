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
from parley.core.pages.block_pool import BlockPool, count_pages
from parley.core.sequence import BLOCK_SIZE, Sequence
from parley.model.networks.network import DecoderNetwork, PackedBatch
from parley.model.networks.paged_kv import PagedKV

CATCH_UP_TOKENS = 512  # tokens read per call, besides the new ones since the last call


@dataclass(eq=False, slots=True)
class DraftState:
    """The draft model's progress in a sequence. The keys and values of ``tokens``, drafts included, are in ``blocks``.
    The first ``confirmed`` tokens are confirmed tokens of the sequence. ``uses_long_rope``: as in ``Sequence``."""

    tokens: list[int] = field(default_factory=list)
    confirmed: int = 0
    uses_long_rope: bool = False
    blocks: list[int] = field(default_factory=list)


class DraftModel:
    """``core.sequence.DraftProposer`` with a network and pages of its own, for up to ``max_model_len`` tokens."""

    def __init__(self, network: DecoderNetwork, kv: PagedKV, *, max_model_len: int):
        self.network = network
        self.kv = kv
        self.max_model_len = max_model_len
        self.pool = BlockPool(kv.blocks)
        self._states: OrderedDict[Sequence, DraftState] = OrderedDict()  # the most recently requested sequence is last

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one forward pass over page 0, before any page is in use, to trigger one-time setup in libraries."""
        self.kv.clear_pages([0])
        self._predict_next([([0] * min(BLOCK_SIZE, self.max_model_len), 0, [0])], [False])

    @torch.inference_mode()
    def propose_drafts(self, draft_limits: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return at most the requested number of draft tokens for each (sequence, count)."""
        for sequence, _ in draft_limits:
            self._states.setdefault(sequence, DraftState())
            self._states.move_to_end(sequence)
        busy = {self._states[sequence] for sequence, _ in draft_limits}
        guesses: list[list[int]] = [[] for _ in draft_limits]
        budget = CATCH_UP_TOKENS
        new_pages: list[int] = []
        parts: list[tuple[list[int], int, list[int]]] = []
        active: list[int] = []
        is_long: list[bool] = []
        lengths: list[int] = []
        for number, (sequence, limit) in enumerate(draft_limits):
            state = self._states[sequence]
            start = self._trim_to_confirmed(sequence, state)
            end = len(sequence.tokens)
            lengths.append(min(limit, self.max_model_len - end))
            if lengths[-1] < 1 or not self._reserve_pages(state, end + lengths[-1] - 1, new_pages, busy):
                continue
            if end - start > budget + 1:
                end = start + budget
            budget -= max(0, end - start - 1)
            if end == start:
                continue
            vocab_size = self.network.vocab_size
            token_ids = [token_id if token_id < vocab_size else 0 for token_id in sequence.tokens[start:end]]
            state.tokens += sequence.tokens[start:end]
            parts.append((token_ids, start, state.blocks))
            is_long.append(state.uses_long_rope)
            active.append(number if end == len(sequence.tokens) else -1)
        self.kv.clear_pages(new_pages)
        while parts:
            next_tokens = self._predict_next(parts, is_long)
            parts, is_long, numbers, active = [], [], active, []
            for number, token in zip(numbers, next_tokens, strict=True):
                if number < 0:
                    continue
                guesses[number].append(token)
                if len(guesses[number]) < lengths[number]:
                    state = self._states[draft_limits[number][0]]
                    parts.append(([token], len(state.tokens), state.blocks))
                    is_long.append(state.uses_long_rope)
                    state.tokens.append(token)
                    active.append(number)
        return guesses

    def forget_sequence(self, sequence: Sequence) -> None:
        """Free the pages of a finished sequence."""
        state = self._states.pop(sequence, None)
        if state is not None:
            self.pool.free_blocks(state.blocks)

    def _trim_to_confirmed(self, sequence: Sequence, state: DraftState) -> int:
        """Drop tokens that differ from the sequence's, and its last one, which must be read again. Return the rest."""
        tokens, drafted = sequence.tokens, state.tokens
        if (is_long := len(tokens) > self.network.long_rope_after) != state.uses_long_rope:
            drafted.clear()  # their keys have the other rotary factors
            state.confirmed, state.uses_long_rope = 0, is_long
        count = min(len(drafted), len(tokens) - 1)
        agreed = min(count, state.confirmed)
        while agreed < count and drafted[agreed] == tokens[agreed]:
            agreed += 1
        del drafted[agreed:]
        state.confirmed = agreed
        return agreed

    def _reserve_pages(self, state: DraftState, token_count: int, new_pages: list[int], busy: set[DraftState]) -> bool:
        """Reserve pages for ``token_count`` tokens, evicting the least recently used states that are not ``busy``."""
        missing_blocks = count_pages(token_count) - len(state.blocks)
        while self.pool.free_count < missing_blocks:
            oldest_state = next((state for state in self._states.values() if state.blocks and state not in busy), None)
            if oldest_state is None:
                return False
            self.pool.free_blocks(oldest_state.blocks)
            oldest_state.blocks.clear()
            oldest_state.tokens.clear()
            oldest_state.confirmed = 0
        for _ in range(missing_blocks):
            state.blocks.append(self.pool.allocate())
            new_pages.append(state.blocks[-1])
        return True

    def _predict_next(self, parts: list[tuple[list[int], int, list[int]]], is_long: list[bool]) -> list[int]:
        """Return the most probable next token of each part (tokens, start position, pages of the sequence).

        ``is_long``: whether each part uses the long rotary factors."""
        batch = PackedBatch.pack_parts(parts, self.kv.device)
        batch.mark_long_rope(is_long)
        hidden = self.network.compute_hidden(batch, self.kv)
        last = torch.tensor([span.first + span.count - 1 for span in batch.spans], device=self.kv.device)
        return native.argmax(self.network.compute_logits(hidden.index_select(0, last)))[1].tolist()
