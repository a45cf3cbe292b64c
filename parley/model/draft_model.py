"""The draft model: proposes draft tokens with a small network and KV pages of its own.

It continues each sequence greedily with its own most probable tokens, all sequences of a call in one batch. A call
computes a bounded number of tokens that are new to the model. A sequence with more of them gets no drafts until all are
computed. The model manages its pages itself: the least recently requested sequence loses its pages and is recomputed
later. It has no LoRA adapters: it drafts for sequences with an adapter as if they had none, so fewer drafts of these
are accepted.

It is not told which drafts were accepted. It finds rejected ones by comparing its tokens with those of the sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from parley import native
from parley.core.pages.page_pool import PagePool, count_pages
from parley.core.sequence import PAGE_SIZE, Sequence
from parley.model.networks.network import DecoderNetwork, PackedBatch
from parley.model.networks.paged_kv import PagedKV

CATCH_UP_TOKENS = 512  # tokens computed per call, in addition to the newest token of each sequence


@dataclass(eq=False, slots=True)
class DraftState:
    """The draft model's progress in a sequence.

    ``block_table``: the pages with the keys and values of ``tokens``, which end with drafts. The first ``confirmed`` of
    these are tokens of the sequence. ``uses_long_rope``: as in ``Sequence``.
    """

    tokens: list[int] = field(default_factory=list)
    confirmed: int = 0
    uses_long_rope: bool = False
    block_table: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Chunk:
    """Tokens of a sequence that the network computes next, from position ``start`` on.

    ``number``: index of the sequence in the call, which gets the token predicted after them as a draft; None: more
    tokens of the sequence must be computed before it gets drafts.
    """

    number: int | None
    token_ids: list[int]
    start: int
    state: DraftState


class DraftModel:
    """``core.sequence.DraftProposer`` with a network and pages of its own, for up to ``max_model_len`` tokens."""

    def __init__(self, network: DecoderNetwork, kv: PagedKV, *, max_model_len: int):
        self.network = network
        self.kv = kv
        self.max_model_len = max_model_len
        self.pool = PagePool(kv.page_count)
        self._states: OrderedDict[Sequence, DraftState] = OrderedDict()  # the most recently requested sequence is last

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one forward pass over page 0, before any page is in use, to trigger one-time setup in libraries."""
        self.kv.clear_pages([0])
        tokens = [0] * min(PAGE_SIZE, self.max_model_len)
        self._predict_next([_Chunk(None, tokens, 0, DraftState(block_table=[0]))])

    @torch.inference_mode()
    def propose_drafts(self, draft_limits: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return at most ``limit`` draft tokens for each (sequence, limit)."""
        for sequence, _ in draft_limits:
            self._states.setdefault(sequence, DraftState())
            self._states.move_to_end(sequence)
        busy = {self._states[sequence] for sequence, _ in draft_limits}
        drafts: list[list[int]] = [[] for _ in draft_limits]
        lengths: list[int] = []
        budget = CATCH_UP_TOKENS
        new_pages: list[int] = []
        chunks: list[_Chunk] = []
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
            has_caught_up = end == len(sequence.tokens)
            chunks.append(_Chunk(number if has_caught_up else None, token_ids, start, state))
        self.kv.clear_pages(new_pages)
        while chunks:
            continued: list[_Chunk] = []
            for chunk, token in zip(chunks, self._predict_next(chunks), strict=True):
                if chunk.number is None:
                    continue
                drafts[chunk.number].append(token)
                if len(drafts[chunk.number]) < lengths[chunk.number]:
                    continued.append(_Chunk(chunk.number, [token], len(chunk.state.tokens), chunk.state))
                    chunk.state.tokens.append(token)
            chunks = continued
        return drafts

    def forget_sequence(self, sequence: Sequence) -> None:
        """Free the pages of a finished sequence."""
        state = self._states.pop(sequence, None)
        if state is not None:
            self.pool.release_pages(state.block_table)

    def _trim_to_confirmed(self, sequence: Sequence, state: DraftState) -> int:
        """Drop the computed tokens that differ from the sequence's, and its last one, which must be computed again for
        its logits. Return the number of tokens that are left."""
        tokens, drafted = sequence.tokens, state.tokens
        if (is_long := len(tokens) > self.network.long_rope_after) != state.uses_long_rope:
            drafted.clear()  # their keys have other rotary factors
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
        missing_pages = count_pages(token_count) - len(state.block_table)
        while self.pool.free_count < missing_pages:
            oldest_state = next(
                (state for state in self._states.values() if state.block_table and state not in busy), None
            )
            if oldest_state is None:
                return False
            self.pool.release_pages(oldest_state.block_table)
            oldest_state.block_table.clear()
            oldest_state.tokens.clear()
            oldest_state.confirmed = 0
        for _ in range(missing_pages):
            state.block_table.append(self.pool.allocate())
            new_pages.append(state.block_table[-1])
        return True

    def _predict_next(self, chunks: list[_Chunk]) -> list[int]:
        """Compute the chunks, and return the most probable next token after each."""
        tables = ((chunk.token_ids, chunk.start, chunk.state.block_table) for chunk in chunks)
        batch = PackedBatch.pack_parts(tables, self.kv.device)
        batch.mark_long_rope([chunk.state.uses_long_rope for chunk in chunks])
        hidden = self.network.compute_hidden(batch, self.kv)
        last_rows = torch.tensor([span.first + span.count - 1 for span in batch.spans], device=self.kv.device)
        return native.argmax(self.network.compute_logits(hidden.index_select(0, last_rows)))[1].tolist()
