"""Runs a decoder network: the rows of one step in, one result per row out.

Rows are packed into one batch without padding, new pages are cleared first, and logits are computed only for positions
that sample or score. This module does not know why a row is in the step, or how its token is used: the scheduler does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from parley import native
from parley.core.sequence import (
    PAGE_SIZE,
    DraftProposer,
    MediaEncoder,
    RowResult,
    Sequence,
    Step,
    StepRow,
    StepStarter,
)
from parley.model.leading_media import see_images, text_part, unscored_positions
from parley.model.media_batch import add_media, has_media, placeholder_positions
from parley.model.networks import lora
from parley.model.networks.decode_graphs import DecodeGraphs
from parley.model.networks.kv_staging import StagingBuffer
from parley.model.networks.network import DecoderNetwork, PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.pooling import PoolingRecipe
from parley.model.networks.state_arena import StateArena, advance_slot
from parley.model.sampling.grammar_mask import GrammarCache
from parley.model.sampling.logprobs import score_tokens
from parley.model.sampling.sampler import Sampler
from parley.model.sampling.verify import BROKEN_LOGITS, DraftTrial, verify_drafts
from parley.native.layout import RowSpan
from parley.types import EngineRequest, PoolingTask, TokenScore

SCORE_ROWS = 64  # prompt positions scored at once; bounds the memory of logits

BROKEN_VECTOR = "The model produced a vector that is not made of numbers."


class DecoderRunner:
    """``core.sequence.ModelRunner`` over a network, its KV pages and a sampler for ``slots`` sequences.

    * ``recipe``: the pooling of embeddings, which must be that of the last token; None: no embeddings.
    * ``grammars``: as in ``Sampler``.
    * ``proposer``: the draft model; None: there is none.
    * ``max_rank``: the largest rank of a LoRA adapter.
    * ``staging``: where other processes see pages; None: in the cache itself.
    * ``media_encoder``: computes embeddings of media items; None: the model reads text only.
    * ``snapshot_slots``: slots for states in addition to those of running sequences, for models that keep states.
    """

    generates = True
    starter: StepStarter | None = None

    def __init__(
        self,
        network: DecoderNetwork,
        pages: PagedKV,
        *,
        max_model_len: int,
        slots: int,
        recipe: PoolingRecipe | None = None,
        grammars: GrammarCache | None = None,
        proposer: DraftProposer | None = None,
        max_rank: int = lora.MAX_RANK,
        staging: StagingBuffer | None = None,
        media_encoder: MediaEncoder | None = None,
        snapshot_slots: int = 0,
    ):
        assert recipe is None or recipe.is_last_token, "pages keep no hidden states"
        self.network = network
        self.recipe = recipe
        self.proposer = proposer
        self.graphs: DecodeGraphs | None = None
        self.dimensions = self.token_dimensions = 0
        tasks: tuple[PoolingTask, ...] = ("embed",) if recipe else ()
        self.pooling_tasks = frozenset(tasks)
        self.pages = pages
        self.page_count = pages.page_count
        self.max_model_len = max_model_len
        self.vocab_size = network.vocab_size
        self.device = pages.device
        self.max_rank = max_rank
        self.long_rope_after = network.long_rope_after
        self.staging = staging
        self.media_encoder = media_encoder
        self.sampler = Sampler(network.vocab_size, slots, self.device, grammars)
        self.states: StateArena | None = None
        self.state_slots, self.snapshot_slots = None, 0
        if network.state_sizes:
            self.state_slots, self.snapshot_slots = slots, snapshot_slots
            self.states = StateArena(network.state_sizes, slots + snapshot_slots, self.device, pages.spare)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one forward pass over page 0, before any page is in use, to trigger one-time setup in libraries."""
        self.pages.clear_pages([0])
        batch = PackedBatch.pack_parts([([0] * min(PAGE_SIZE, self.max_model_len), 0, [0])], self.device)
        hidden = self.network.compute_hidden(batch, self.pages)
        self.network.compute_logits(hidden[-1:])
        self.dimensions = hidden.shape[-1] if self.recipe else 0

    @torch.inference_mode()
    def load_adapter(self, folder: str) -> lora.LoraAdapter:
        """Read a LoRA adapter, in any thread. Raises LoadError."""
        return lora.read_adapter(Path(folder), self.network.linears, self.max_rank, self.pages.dtype, self.device)

    def prepare_request(self, request: EngineRequest) -> Callable[[], None] | None:
        """Return a function that compiles the request's grammar, None if it has none or it is cached."""
        grammars = self.sampler.grammars
        if grammars is None or not request.grammar or grammars.is_cached(request.grammar):
            return None
        return partial(grammars.precompile, request.grammar)

    def admit_sequence(self, sequence: Sequence) -> None:
        """Write the sequence's sampling parameters and token counts into its slot."""
        self.sampler.set_slot(sequence.slot, sequence)

    def release_slot(self, sequence: Sequence) -> None:
        """Clear the slot of a sequence that finished or was preempted."""
        self.sampler.clear_slot(sequence.slot)

    @torch.inference_mode()
    def fork_slots(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Fork beam search sequences: each first sequence's slot becomes a copy of the second's."""
        self.sampler.fork_slots(forks)

    @torch.inference_mode()
    def copy_state(self, source: Sequence, target: Sequence) -> None:
        """Copy the state in a sequence's own slot into that of another."""
        assert self.states is not None
        self.states.copy_state(source.slot, target.slot)

    @torch.inference_mode()
    def run_step(self, step: Step) -> list[RowResult]:
        """Compute the step: one result per row, in order. A row whose logits are not finite gets ``error``."""
        self.pages.copy_pages(step.page_copies)
        self.pages.clear_pages(step.fresh_pages)
        results = [RowResult() for _ in step.rows]
        if not step.rows:
            return results
        batch = self.pack_rows(step.rows)
        hidden = self.compute_hidden(batch)
        for row, span, result in zip(step.rows, batch.spans, results, strict=True):
            if row.score_from is not None:
                self._score_prompt(row, hidden[span.first : span.first + span.count], result)
        self._sample_rows(step.rows, batch, hidden, results)
        self._search_beams(step.rows, batch.spans, hidden, results)
        self._pool_rows(step.rows, batch.spans, hidden, results)
        return results

    def compute_hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Return the network's final hidden states [T, hidden], by a graph if there is one for this batch."""
        hidden = None if self.graphs is None else self.graphs.compute_hidden(batch)
        return self.network.compute_hidden(batch, self.pages) if hidden is None else hidden

    def pack_rows(self, rows: list[StepRow]) -> PackedBatch:
        """Pack the rows, with their drafts and LoRA adapters, into one batch.

        A token that the host does not know yet is 0 (see ``core.run_ahead``)."""
        batch = PackedBatch.pack_parts((text_part(row, _row_tokens(row) or [0]) for row in rows), self.device)
        batch.result_counts = [
            min(span.count, _count_results(row)) for row, span in zip(rows, batch.spans, strict=True)
        ]
        batch.mark_long_rope([row.sequence.uses_long_rope for row in rows])
        if self.states is not None:
            uses = [
                row.states or advance_slot(row.sequence.slot, span) for row, span in zip(rows, batch.spans, strict=True)
            ]
            batch.states = self.states.select_states(batch.spans, uses)
        if any(row.sequence.lead for row in rows):
            batch.images = see_images(batch, rows)
        elif has_media(rows):
            add_media(batch, rows)
        adapter_tokens: dict[lora.LoraAdapter, list[int]] = {}
        for row, span in zip(rows, batch.spans, strict=True):
            if (adapter := row.sequence.adapter) is not None:
                assert isinstance(adapter, lora.LoraAdapter)
                adapter_tokens.setdefault(adapter, []).extend(range(span.first, span.first + span.count))
        if adapter_tokens:
            groups = [(adapter.weights, tokens) for adapter, tokens in adapter_tokens.items()]
            batch.lora_rows = native.group_lora_rows(groups, self.device)
        return batch

    def _sample_rows(
        self, rows: list[StepRow], batch: PackedBatch, hidden: torch.Tensor, results: list[RowResult]
    ) -> None:
        """Sample a token for each row that samples, except those of beam searches, and verify drafts."""
        indices = [
            i for i, row in enumerate(rows) if row.sample and results[i].error is None and not row.sequence.request.beam
        ]
        grammar_errors = self.sampler.wait_grammars([rows[i].sequence.slot for i in indices])
        for i, error in zip(indices, grammar_errors, strict=True):
            results[i].error = error
        indices = [i for i in indices if results[i].error is None]
        if not indices:
            return
        logit_tokens = [token for i in indices for token in _logit_tokens(rows[i], batch.spans[i])]
        if len(logit_tokens) < len(hidden):  # not only decode rows
            hidden = hidden.index_select(0, torch.tensor(logit_tokens, device=self.device))
        logits = self.network.compute_logits(hidden)
        peaks, argmax_ids = native.argmax(logits)
        # argmax returns a NaN if there is one; -inf merely means an impossible token.
        finite = [math.isfinite(peak) for peak in peaks.tolist()]
        sampled_rows = [(rows[i], results[i]) for i in indices]
        if len(logit_tokens) == len(indices):  # without drafts
            self._draw_rows(sampled_rows, logits, argmax_ids, finite)
            return
        trials, first_logits = [], 0
        for row, result in sampled_rows:
            trials.append(DraftTrial(row, result, first_logits))
            first_logits += 1 + len(row.drafts)
        verify_drafts(self.sampler, logits, argmax_ids, finite, trials)
        broken_tokens = [token for token, is_finite in zip(logit_tokens, finite, strict=True) if not is_finite]
        if broken_tokens:  # NaNs in the pages would reach later tokens: attention multiplies them by 0, which gives NaN
            self.pages.clear_tokens(batch.slot_mapping[torch.tensor(broken_tokens, device=self.device)])

    def _draw_rows(
        self,
        sampled_rows: list[tuple[StepRow, RowResult]],
        logits: torch.Tensor,
        argmax_ids: torch.Tensor,
        finite: list[bool],
    ) -> None:
        """Draw a token for each row into its result; a row whose logits are not ``finite`` gets ``error`` instead.

        logits float32 [R, vocab], overwritten; argmax_ids int64 [R]: the ids of the largest ones.
        """
        if not all(finite):
            for (_, result), is_finite in zip(sampled_rows, finite, strict=True):
                if not is_finite:
                    result.error = BROKEN_LOGITS
            sampled_rows = [pair for pair, is_finite in zip(sampled_rows, finite, strict=True) if is_finite]
            mask = torch.tensor(finite, device=self.device)
            logits, argmax_ids = logits[mask], argmax_ids[mask]
        if not sampled_rows:
            return
        slots = [row.sequence.slot for row, _ in sampled_rows]
        positions = [row.sequence.output_length for row, _ in sampled_rows]
        draws = self.sampler.draw_tokens(logits, slots, positions, argmax_ids, overwrite=True)
        for (_, result), slot, (token, score) in zip(sampled_rows, slots, draws, strict=True):
            if token is None:
                result.error = self.sampler.wait_grammars([slot])[0]
                continue
            result.tokens.append(token)
            if score is not None:
                result.scores.append(score)
            result.end = self.sampler.grammar_end(slot)

    def _search_beams(
        self, rows: list[StepRow], spans: list[RowSpan], hidden: torch.Tensor, results: list[RowResult]
    ) -> None:
        """Compute the candidates of rows that belong to beam searches."""
        indices = [
            i for i, row in enumerate(rows) if row.sample and row.sequence.request.beam and results[i].error is None
        ]
        if not indices:
            return
        logits = self.network.compute_logits(self._last_hidden(spans, indices, hidden))
        peaks = native.argmax(logits)[0].tolist()
        grammar_errors = self.sampler.wait_grammars([rows[i].sequence.slot for i in indices])
        for i, peak, error in zip(indices, peaks, grammar_errors, strict=True):
            results[i].error = error if math.isfinite(peak) else BROKEN_LOGITS
        valid_rows = [row for row, i in enumerate(indices) if results[i].error is None]  # rows of the logits
        if not valid_rows:
            return
        sequences = [rows[indices[row]].sequence for row in valid_rows]
        candidate_lists = self.sampler.find_candidates(
            logits[torch.tensor(valid_rows, device=self.device)],
            [sequence.slot for sequence in sequences],
            [sequence.output_length for sequence in sequences],
        )
        for row, candidates in zip(valid_rows, candidate_lists, strict=True):
            results[indices[row]].candidates = candidates

    def _pool_rows(
        self, rows: list[StepRow], spans: list[RowSpan], hidden: torch.Tensor, results: list[RowResult]
    ) -> None:
        """Compute the vectors of rows that embed."""
        indices = [i for i, row in enumerate(rows) if row.make_vector]
        if not indices:
            return
        assert self.recipe is not None
        states = self._last_hidden(spans, indices, hidden).float().cpu().numpy()
        for i, state in zip(indices, states, strict=True):
            pooling = rows[i].sequence.request.pooling
            assert pooling is not None
            results[i].vector = self.recipe.pool_rows(state[None], pooling)
            if results[i].vector is None:
                results[i].error = BROKEN_VECTOR

    def _last_hidden(self, spans: list[RowSpan], indices: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the last token of each span in ``indices``, [len(indices), hidden]."""
        last_tokens = torch.tensor([spans[i].first + spans[i].count - 1 for i in indices], device=self.device)
        return hidden.index_select(0, last_tokens)

    def _score_prompt(self, row: StepRow, hidden: torch.Tensor, result: RowResult) -> None:
        """Compute the log-probabilities of the prompt tokens that this row predicts, from token ``score_from`` on; None
        for placeholders of media."""
        assert row.score_from is not None
        sequence = row.sequence
        start = row.score_from - 1  # position p predicts token p + 1
        end = min(row.start + row.count, sequence.prompt_len - 1)  # the last prompt token predicts an output token
        top_count = max(0, sequence.request.prompt_logprobs)
        placeholders = placeholder_positions(sequence, start + 1, end + 1) | unscored_positions(sequence)
        first = row.start + row.token_count - len(hidden)  # of the text, if images lead it
        scores: list[TokenScore | None] = [None] * max(0, min(first, end) - start)
        start = max(start, first)
        for part_start in range(start, end, SCORE_ROWS):
            part_end = min(part_start + SCORE_ROWS, end)
            logits = self.network.compute_logits(hidden[part_start - first : part_end - first])
            if not torch.isfinite(logits.amax(-1)).all():
                result.error = BROKEN_LOGITS
                return
            predicted = range(part_start + 1, part_end + 1)
            token_ids = [0 if position in placeholders else sequence.tokens[position] for position in predicted]
            part_scores = score_tokens(logits, token_ids, top_count)
            scores += [
                None if position in placeholders else score
                for position, score in zip(predicted, part_scores, strict=True)
            ]
        result.prompt_scores = scores


def _row_tokens(row: StepRow) -> list[int]:
    """Return the tokens that a row adds to the batch."""
    return [*row.sequence.tokens[row.start : row.start + row.count], *row.drafts]


def _logit_tokens(row: StepRow, span: RowSpan) -> range:
    """Return the batch indices whose logits a sampling row needs: those of its last token and of its drafts."""
    end = span.first + span.count
    return range(end - 1 - len(row.drafts), end)


def _count_results(row: StepRow) -> int:
    """Return how many of a row's last tokens have hidden states that are read."""
    if row.score_from is not None:
        return row.count + len(row.drafts)
    return 1 + len(row.drafts) if row.sample or row.make_vector else 0
