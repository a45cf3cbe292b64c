"""Runs a decoder network: the rows of one step in, one result per row out.

This module must not know why a row is in the step or what happens to its token; that is the scheduler's job. Rows are
packed without padding, new pages are cleared first, and logits are computed only for positions that sample or score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from parley import native
from parley.core.sequence import BLOCK_SIZE, Proposer, Row, Sampled, Sequence, Step
from parley.model.networks import lora
from parley.model.networks.kv_staging import Staging
from parley.model.networks.network import Batch, Network
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.pooling import Recipe
from parley.model.sampling.grammar_mask import Grammars
from parley.model.sampling.logprobs import score
from parley.model.sampling.sampler import Sampler
from parley.model.sampling.verify import BROKEN, Trial, verify
from parley.native.layout import Span
from parley.types import Score, Work

SCORE_ROWS = 64  # prompt positions scored at once; bounds the memory of logits

BROKEN_VECTOR = "The model produced a vector that is not made of numbers."


class Runner:
    """``core.sequence.Runner`` over a network, its pages and a sampler with ``slots`` rows.

    ``recipe``: pooling for embeddings, of the last token only; None: no embeddings. ``grammars``: as in ``Sampler``.
    ``proposer``: the draft model. ``max_rank``: of LoRA adapters. ``staging``: where other processes see
    pages, if not in the cache itself.
    """

    generates = True

    def __init__(
        self,
        network: Network,
        pages: PagedKV,
        *,
        max_model_len: int,
        slots: int,
        recipe: Recipe | None = None,
        grammars: Grammars | None = None,
        proposer: Proposer | None = None,
        highest: int = lora.HIGHEST,
        staging: Staging | None = None,
    ):
        assert recipe is None or recipe.last, "pages keep no hidden states"
        self.network = network
        self.recipe = recipe
        self.proposer = proposer
        self.dimensions = 0
        self.pages = pages
        self.blocks = pages.blocks
        self.max_model_len = max_model_len
        self.vocab_size = network.vocab_size
        self.device = pages.device
        self.highest = highest
        self.staging = staging
        self.sampler = Sampler(network.vocab_size, slots, self.device, grammars)

    @torch.inference_mode()
    def warm(self) -> None:
        """Run one forward pass over page 0, before any page is in use, to trigger one-time setup in libraries."""
        place = torch.arange(min(BLOCK_SIZE, self.max_model_len), device=self.device)
        self.pages.clear([0])
        batch = Batch(torch.zeros_like(place), place, place, [Span(0, len(place), len(place), [0])])
        hidden = self.network.hidden(batch, self.pages)
        self.network.logits(hidden[-1:])
        self.dimensions = hidden.shape[-1] if self.recipe else 0

    @torch.inference_mode()
    def fetch(self, folder: str) -> lora.Adapter:
        """Read a LoRA adapter, in any thread. Raises LoadError."""
        return lora.read(Path(folder), self.network.linears, self.highest, self.pages.dtype, self.device)

    def prepare(self, work: Work) -> Callable[[], None] | None:
        """Return a function that compiles the request's grammar, None if it has none or it is cached."""
        grammars = self.sampler.grammars
        if grammars is None or not work.grammar or grammars.kept(work.grammar):
            return None
        return partial(grammars.prepare, work.grammar)

    def admit(self, sequence: Sequence) -> None:
        """Write the sequence's sampling parameters and token counts into its slot."""
        self.sampler.admit(sequence.slot, sequence)

    def release(self, sequence: Sequence) -> None:
        """Clear the slot of a sequence that finished or was preempted."""
        self.sampler.release(sequence.slot)

    @torch.inference_mode()
    def follow(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Fork beam search sequences: each first sequence's slot becomes a copy of the second's."""
        self.sampler.follow(forks)

    @torch.inference_mode()
    def run(self, step: Step) -> list[Sampled]:
        """Compute the step: one result per row, in order. A row whose logits are not finite gets ``error``."""
        self.pages.copy(step.copies)
        self.pages.clear(step.fresh)
        results = [Sampled() for _ in step.rows]
        if not step.rows:
            return results
        batch = self._pack(step.rows)
        hidden = self.network.hidden(batch, self.pages)
        for row, span, result in zip(step.rows, batch.spans, results, strict=True):
            if row.score_from is not None:
                self._score(row, hidden[span.first : span.first + span.count], result)
        self._sample(step.rows, batch, hidden, results)
        self._search(step.rows, batch.spans, hidden, results)
        self._pool(step.rows, batch.spans, hidden, results)
        return results

    def _pack(self, rows: list[Row]) -> Batch:
        """Pack the rows, with their drafts and LoRA adapters, into one batch."""
        batch = Batch.pack(
            (
                ([*row.sequence.tokens[row.start : row.start + row.count], *row.drafts], row.start, row.sequence.blocks)
                for row in rows
            ),
            self.device,
        )
        adapted: dict[lora.Adapter, list[int]] = {}
        for row, span in zip(rows, batch.spans, strict=True):
            if (adapter := row.sequence.adapter) is not None:
                assert isinstance(adapter, lora.Adapter)
                adapted.setdefault(adapter, []).extend(range(span.first, span.first + span.count))
        if adapted:
            groups = [(adapter.weights, tokens) for adapter, tokens in adapted.items()]
            batch.adapted = native.adapted(groups, self.device)
        return batch

    def _sample(self, rows: list[Row], batch: Batch, hidden: torch.Tensor, results: list[Sampled]) -> None:
        """Draw tokens for all rows that sample, except those of beam searches."""
        drawn = [
            i for i, row in enumerate(rows) if row.sample and results[i].error is None and not row.sequence.work.beam
        ]
        for i, problem in zip(drawn, self.sampler.ready([rows[i].sequence.slot for i in drawn]), strict=True):
            results[i].error = problem
        drawn = [i for i in drawn if results[i].error is None]
        if not drawn:
            return
        ends = [batch.spans[i].first + batch.spans[i].count for i in drawn]
        places = [at for i, end in zip(drawn, ends, strict=True) for at in range(end - 1 - len(rows[i].drafts), end)]
        if len(places) < len(hidden):  # not only decode rows
            hidden = hidden.index_select(0, torch.tensor(places, device=self.device))
        logits = self.network.logits(hidden)
        peaks, likely = native.argmax(logits)
        # argmax returns a NaN if there is one; -inf merely means an impossible token.
        sound = [math.isfinite(peak) for peak in peaks.tolist()]
        if len(places) > len(drawn):
            trials, first = [], 0
            for i in drawn:
                trials.append(Trial(rows[i], results[i], first))
                first += 1 + len(rows[i].drafts)
            verify(self.sampler, logits, likely, sound, trials)
            wrong = [at for at, good in zip(places, sound, strict=True) if not good]
            if wrong:  # or later rows would multiply these NaNs, even by zero
                self.pages.wipe(batch.slots[torch.tensor(wrong, device=self.device)])
            return
        if not all(sound):
            for i, good in zip(drawn, sound, strict=True):
                if not good:
                    results[i].error = BROKEN
            drawn = [i for i, good in zip(drawn, sound, strict=True) if good]
            mask = torch.tensor(sound, device=self.device)
            logits, likely = logits[mask], likely[mask]
        if drawn:
            sequences = [rows[i].sequence for i in drawn]
            slots = [sequence.slot for sequence in sequences]
            positions = [sequence.generated for sequence in sequences]
            draws = self.sampler.sample(logits, slots, positions, likely, spent=True)
            for i, slot, (token, drawn_score) in zip(drawn, slots, draws, strict=True):
                if token is None:
                    results[i].error = self.sampler.ready([slot])[0]
                    continue
                results[i].tokens.append(token)
                if drawn_score is not None:
                    results[i].scores.append(drawn_score)
                results[i].end = self.sampler.end(slot)

    def _search(self, rows: list[Row], spans: list[Span], hidden: torch.Tensor, results: list[Sampled]) -> None:
        """Compute the candidates of rows that belong to beam searches."""
        beams = [i for i, row in enumerate(rows) if row.sample and row.sequence.work.beam and results[i].error is None]
        if not beams:
            return
        last = torch.tensor([spans[i].first + spans[i].count - 1 for i in beams], device=self.device)
        logits = self.network.logits(hidden.index_select(0, last))
        peaks = native.argmax(logits)[0].tolist()
        problems = self.sampler.ready([rows[i].sequence.slot for i in beams])
        for i, peak, problem in zip(beams, peaks, problems, strict=True):
            results[i].error = problem if math.isfinite(peak) else BROKEN
        good = [place for place, i in enumerate(beams) if results[i].error is None]
        if good:
            sequences = [rows[beams[place]].sequence for place in good]
            slots, positions = [each.slot for each in sequences], [each.generated for each in sequences]
            found = self.sampler.search(logits[torch.tensor(good, device=self.device)], slots, positions)
            for place, candidates in zip(good, found, strict=True):
                results[beams[place]].candidates = candidates

    def _pool(self, rows: list[Row], spans: list[Span], hidden: torch.Tensor, results: list[Sampled]) -> None:
        """Compute the vectors of rows that embed."""
        pooled = [i for i, row in enumerate(rows) if row.pool]
        if not pooled:
            return
        assert self.recipe is not None
        last = torch.tensor([spans[i].first + spans[i].count - 1 for i in pooled], device=self.device)
        states = hidden.index_select(0, last).float().cpu().numpy()
        for i, state in zip(pooled, states, strict=True):
            wish = rows[i].sequence.work.pooling
            assert wish is not None
            results[i].vector = self.recipe.pool(state[None], wish)
            if results[i].vector is None:
                results[i].error = BROKEN_VECTOR

    def _score(self, row: Row, hidden: torch.Tensor, result: Sampled) -> None:
        """Compute logprobs of the prompt tokens that this row predicts, from number ``score_from``."""
        assert row.score_from is not None
        sequence = row.sequence
        first = row.score_from - 1  # position p predicts token p + 1
        end = min(row.start + row.count, sequence.prompt_len - 1)  # the last prompt token predicts an output token
        tops = max(0, sequence.work.prompt_logprobs)
        scores: list[Score] = []
        for at in range(first, end, SCORE_ROWS):
            upto = min(at + SCORE_ROWS, end)
            logits = self.network.logits(hidden[at - row.start : upto - row.start])
            if not torch.isfinite(logits.amax(-1)).all():
                result.error = BROKEN
                return
            scores += score(logits, sequence.tokens[at + 1 : upto + 1], tops)
        result.prompt_scores = scores
