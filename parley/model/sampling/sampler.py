"""The sampler: samples (*draws*) one token per row of logits, with the sampling parameters of the row's slot.

Parameters are written into tables when a sequence gets its slot, and each step gathers them by slot, so that a row
without special options costs no Python time of its own. The order of operations is vLLM's, which clients rely on: raw
logprobs first; then grammar, bias, watermark, banned tokens, penalties, temperature, min_p, top_k, top_p, typical_p,
draw.

There is no generator state: each token is drawn with one uniform random number, a function of seed and position. The
draw of a row depends on that row alone. The arithmetic is in ``draw``, ``logit_edits`` and ``logprobs``. This module
does not know how a model runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from parley import native
from parley.core.sequence import BeamCandidate, Sequence
from parley.model.sampling.draw import draw_full, draw_truncated, draw_typical, uniform_number
from parley.model.sampling.grammar_mask import EndKind, GrammarCache, GrammarState
from parley.model.sampling.logit_edits import LogitsProcessor
from parley.model.sampling.logprobs import (
    beam_candidates,
    row_normalizers,
    score_alternatives,
    score_tokens,
    token_logprobs,
)
from parley.native.device_copy import copy_to_device
from parley.types import TokenScore

DrawMethod = Literal["greedy", "full", "truncated", "typical"]
DRAW_METHODS: tuple[DrawMethod, ...] = get_args(DrawMethod)
SHORT_LIST = 64  # logprobs per row; longer lists take more time, so their rows are scored separately
TRIED_TOKENS = 32  # most probable tokens of a row that are tried before the mask of a free text is computed
FEW_CORES = 8  # with more cores, background work hardly slows the network down

GREEDY_BELOW = 1e-6  # temperatures below this count as 0. vLLM's bound is 1e-5; the tokens are the same except for ties


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How tokens of a slot are drawn, apart from the numbers in the sampler's tables.

    ``method``: "greedy", or by chance from the "full" vocabulary, "truncated" by top_k or top_p, or "typical": with
    typical_p and any of the others.
    """

    seed: int
    method: DrawMethod
    logprobs: int
    processor: LogitsProcessor | None
    grammar: GrammarState | None = None
    beams: int = 0  # beam width; 0: not a beam search
    stop_ids: list[int] = field(default_factory=list)  # beam search only: tokens that end an output
    named_ids: list[int] = field(default_factory=list)  # tokens to list logprobs for, in place of the most probable

    def edits_logits(self, position: int) -> bool:
        """Whether logits processors change the logits of output token ``position`` (from 0), grammars aside."""
        return self.processor is not None and self.processor.changes_logits(position)


class Sampler:
    """Holds the sampling parameters of ``slots`` sequences, and draws tokens from their logits.

    ``grammars``: creates grammar states; None if no sequence may have a grammar. The attribute ``lazy_masks``: greedy
    sequences get a mask only if their grammar allows none of the most probable tokens.
    """

    def __init__(
        self, vocab_size: int, slots: int, device: torch.device | str = "cpu", grammars: GrammarCache | None = None
    ):
        self.vocab_size = vocab_size
        self.slots = slots
        self.grammars = grammars
        self.device = torch.device(device)
        self.lazy_masks = self.device.type == "cpu" and torch.get_num_threads() <= FEW_CORES
        self._plans: list[SamplingPlan | None] = [None] * slots
        self._temperature = torch.ones(slots, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(slots, dtype=torch.float64, device=device)
        self._top_p = torch.ones(slots, dtype=torch.float64, device=device)
        self._top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self._typical_p = torch.ones(slots, dtype=torch.float64, device=device)

    def set_slot(self, slot: int, sequence: Sequence) -> None:
        """Write the sequence's parameters into row ``slot``, and count the tokens it already has."""
        request, sampling = sequence.request, sequence.request.sampling
        top_k = sampling.top_k if 0 < sampling.top_k < self.vocab_size else 0
        method: DrawMethod = "full"
        if sampling.temperature < GREEDY_BELOW:
            method = "greedy"
        elif sampling.typical_p < 1.0:
            method = "typical"
        elif top_k > 0 or sampling.top_p < 1.0:
            method = "truncated"
        processor = LogitsProcessor(sequence, self.vocab_size) if LogitsProcessor.needs_processor(request) else None
        grammar = None
        if GrammarState.needs_state(request):
            if self.grammars is None:
                raise ValueError("the sampler has no grammars, so it cannot follow one")
            greedy = method == "greedy" and processor is None and request.beam is None
            grammar = self.grammars.new_state(sequence, greedy=greedy, lazy=greedy and self.lazy_masks)
        beams = request.beam.width if request.beam is not None else 0
        stop_ids = [token_id for token_id in request.stop_ids if 0 <= token_id < self.vocab_size] if beams else []
        self._plans[slot] = SamplingPlan(
            sequence.seed, method, request.logprobs, processor, grammar, beams, stop_ids, request.logprob_ids
        )
        if method != "greedy":
            self._temperature[slot] = sampling.temperature
            self._min_p[slot] = sampling.min_p
            self._top_p[slot] = sampling.top_p
            self._top_k[slot] = top_k
            self._typical_p[slot] = sampling.typical_p

    def clear_slot(self, slot: int) -> None:
        """Forget the parameters in row ``slot``."""
        self._plans[slot] = None

    def wait_grammars(self, slots: list[int]) -> list[str | None]:
        """Wait until every slot's grammar has its next mask. Return an error message per slot, or None.

        Call it before ``draw_tokens``, as late as possible: until then masks are computed concurrently with other work.
        """
        states = [self._slot_plan(slot).grammar for slot in slots]
        return [None if state is None else state.wait_ready() for state in states]

    def grammar_end(self, slot: int) -> EndKind | None:
        """Return how the slot's grammar ended with the last token ("text" or "mark"), None if it did not end."""
        grammar = self._slot_plan(slot).grammar
        return None if grammar is None else grammar.end_kind

    def draw_tokens(
        self,
        logits: torch.Tensor,
        slots: list[int],
        positions: list[int],
        argmax_ids: torch.Tensor | None = None,
        *,
        overwrite: bool = False,
    ) -> list[tuple[int | None, TokenScore | None]]:
        """Draw a token for each row, with its score if the slot asks for logprobs; None as the token if the slot's
        grammar failed (see ``wait_ready``).

        logits float32 [R, vocab], modified only if ``overwrite`` (the caller no longer needs them). Row i is for output
        token ``positions[i]``, counted from 0. The largest logit of every row must be finite; the caller removes
        other rows. ``argmax_ids`` int64 [R]: the ids of the largest logits, if known; the tensor is overwritten.
        """
        plans = [self._slot_plan(slot) for slot in slots]
        grammar_tokens = self._follow_grammars(logits, plans, argmax_ids)
        allowed_rows = [
            row
            for row, plan in enumerate(plans)
            if plan.grammar is not None
            and plan.grammar.allowed_tokens is not None
            and not plan.edits_logits(positions[row])
        ]
        finished_rows = {*allowed_rows, *grammar_tokens}
        edited_logits, changed = self._edit_rows(logits, plans, positions, overwrite, finished_rows)
        other_rows = (
            [row for row in range(len(plans)) if row not in finished_rows] if finished_rows else range(len(plans))
        )
        tokens = self._choose_tokens(
            edited_logits, other_rows, plans, slots, positions, None if changed else argmax_ids
        )
        if allowed_rows:
            tokens[torch.tensor(allowed_rows, device=self.device)] = self._choose_allowed(
                logits, allowed_rows, plans, slots, positions
            )
        token_ids = tokens.tolist()
        for row, plan in enumerate(plans):
            if plan.grammar is not None:
                token_ids[row] = (
                    grammar_tokens[row] if row in grammar_tokens else plan.grammar.correct_token(token_ids[row])
                )
        scores = self._score_tokens(logits, plans, token_ids)
        for row in _advance_grammars(plans, token_ids):
            token_ids[row] = scores[row] = None
        return list(zip(token_ids, scores, strict=True))

    def draws_on_device(self, slot: int) -> bool:
        """Whether ``start_draw`` can draw for the slot."""
        plan = self._slot_plan(slot)
        needs_host = plan.processor is not None or plan.grammar is not None or plan.logprobs >= 0 or plan.beams
        return plan.method in ("greedy", "full") and not needs_host

    def start_draw(
        self, logits: torch.Tensor, argmax_ids: torch.Tensor, slots: list[int], positions: list[int]
    ) -> torch.Tensor:
        """Draw a token for each row, int64 [R], on the device and without waiting for it.

        ``draws_on_device`` must be true of all slots; the arguments are those of ``draw_tokens``, and so are the
        tokens. In rows whose logits are not finite, the token is arbitrary.
        """
        plans = [self._slot_plan(slot) for slot in slots]
        tokens = self._choose_tokens(logits, range(len(plans)), plans, slots, positions, argmax_ids)
        return tokens.clamp_(0, self.vocab_size - 1)

    def find_candidates(
        self, logits: torch.Tensor, slots: list[int], positions: list[int]
    ) -> list[list[BeamCandidate]]:
        """Return the candidates of each beam search row, most probable first. Arguments as in ``draw_tokens``.

        Logits processors change logprobs here instead of logits: probability taken from some tokens does not go to
        others, so that the beams remain comparable (as in Transformers' beam search).
        """
        plans = [self._slot_plan(slot) for slot in slots]
        norms = row_normalizers(logits)
        shift = torch.tensor(norms, dtype=torch.float32, device=self.device)[:, None]
        edited, _ = self._edit_rows(logits - shift, plans, positions, True, set())
        candidates: list[list[BeamCandidate]] = []
        top_tokens = beam_candidates(edited, [2 * plan.beams for plan in plans], [plan.stop_ids for plan in plans])
        for row, plan in enumerate(plans):
            row_candidates = [BeamCandidate(token_id, value) for token_id, value in top_tokens[row]]
            if plan.logprobs >= 0:
                scores = score_alternatives(
                    logits[row], norms[row], [candidate.token for candidate in row_candidates], plan.logprobs
                )
                for candidate, candidate_score in zip(row_candidates, scores, strict=True):
                    candidate.score = candidate_score
            if plan.grammar is not None:
                for candidate in row_candidates:
                    candidate.end = plan.grammar.end_after(candidate.token)
            candidates.append(row_candidates)
        return candidates

    def fork_slots(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Fork slots as in ``core.sequence.ModelRunner``: copy the parent's logits processor and grammar state."""
        plans = [self._slot_plan(parent.slot) for _, parent in forks]
        for (sequence, parent), plan in zip(forks, plans, strict=True):
            if sequence is not parent:
                processor = None if plan.processor is None else plan.processor.copy_for(sequence)
                grammar = None if plan.grammar is None else plan.grammar.copy_state()
                self._plans[sequence.slot] = replace(plan, processor=processor, grammar=grammar)
        for sequence, _ in forks:
            plan = self._slot_plan(sequence.slot)
            if plan.grammar is not None:
                plan.grammar.accept_token(sequence.tokens[-1])
                plan.grammar.start_mask()

    def is_stateful(self, slot: int) -> bool:
        """Whether the slot's draw depends on tokens drawn before, besides seed, position and logits."""
        plan = self._slot_plan(slot)
        return plan.processor is not None or plan.grammar is not None

    def _slot_plan(self, slot: int) -> SamplingPlan:
        plan = self._plans[slot]
        assert plan is not None, f"slot {slot} samples without a sequence"
        return plan

    def _follow_grammars(
        self, logits: torch.Tensor, plans: list[SamplingPlan], argmax_ids: torch.Tensor | None
    ) -> dict[int, int]:
        """Pick the tokens of greedy rows that have no constraint except a grammar: {row: token}.

        If a row needs a mask, but its most probable token is allowed, that token is the answer and no mask is computed.
        If letters may come next, many tokens are allowed: the mask takes long, and one of the most probable tokens is
        likely to be allowed, so these are tried first. Otherwise the mask takes less time than the trials.
        """
        grammars = {
            row: plan.grammar
            for row, plan in enumerate(plans)
            if plan.grammar is not None and plan.method == "greedy" and plan.processor is None
        }
        if not grammars:
            return {}
        best_ids = (native.argmax(logits)[1] if argmax_ids is None else argmax_ids).tolist()
        tokens = {
            row: best_ids[row]
            for row, grammar in grammars.items()
            if grammar.mask_needed and grammar.allows_token(best_ids[row])
        }
        undecided = {row: state for row, state in grammars.items() if state.mask_needed and row not in tokens}
        free_text = {row: state for row, state in undecided.items() if state.allows_letters()}
        for row, state in undecided.items():
            if row not in free_text:
                state.request_mask(in_thread=False)
        tokens |= self._try_likely_tokens(logits, free_text, best_ids)
        rows_to_mask = [row for row in free_text if row not in tokens]
        for row in rows_to_mask:
            grammars[row].request_mask(in_thread=row != rows_to_mask[-1])
        for row, grammar in reversed(grammars.items()):  # threads start with the first
            if row not in tokens and grammar.wait_ready() is None:
                best_allowed = grammar.best_allowed(logits[row])
                tokens[row] = best_ids[row] if best_allowed is None else best_allowed
        return tokens

    def _try_likely_tokens(
        self, logits: torch.Tensor, grammars: dict[int, GrammarState], best_ids: list[int]
    ) -> dict[int, int]:
        """Return the most probable token that the grammar of a row allows, for rows where one of the TRIED_TOKENS most
        probable ones is allowed. ``grammars``: by row; they do not allow ``best_ids``, the most probable token."""
        if not grammars:
            return {}
        has_most_rows = 2 * len(grammars) > len(logits)  # then selecting rows takes longer than it saves
        values, ids = native.top_k(logits if has_most_rows else logits[list(grammars)], TRIED_TOKENS + 1)
        tokens: dict[int, int] = {}
        for position, (row, grammar) in enumerate(grammars.items()):
            index = row if has_most_rows else position
            row_values, row_ids = values[index].tolist(), ids[index].tolist()
            # Ties with the last value are dropped, because an unlisted token of that value may have a lower id.
            ranked = sorted(
                (-value, token_id)
                for value, token_id in zip(row_values, row_ids, strict=True)
                if value > row_values[-1]
            )
            candidates = (token_id for _, token_id in ranked if token_id != best_ids[row])
            token = next(filter(grammar.allows_token, candidates), None)
            if token is not None:
                tokens[row] = token
        return tokens

    def _edit_rows(
        self,
        logits: torch.Tensor,
        plans: list[SamplingPlan],
        positions: list[int],
        overwrite: bool,
        finished_rows: set[int],
    ) -> tuple[torch.Tensor, bool]:
        """Return the logits after grammars and processors, and whether any row changed; ``finished_rows`` are skipped.

        Copying a large vocabulary would cost more than the edits, so with ``overwrite`` logits are edited in place,
        unless scores are requested, which need the raw logits.
        """
        grammars = [
            (row, plan.grammar)
            for row, plan in enumerate(plans)
            if plan.grammar is not None and plan.grammar.restricts_next and row not in finished_rows
        ]
        processors = [
            (row, plan.processor)
            for row, plan in enumerate(plans)
            if plan.processor is not None and plan.edits_logits(positions[row])
        ]
        changed = bool(grammars or processors)
        if changed and not (overwrite and all(plan.logprobs < 0 for plan in plans)):
            logits = logits.clone()
        for row, grammar in grammars:
            grammar.mask_logits(logits[row])
        for row, processor in processors:
            processor.edit_logits(logits[row], positions[row])
        return logits, changed

    def _choose_tokens(
        self,
        logits: torch.Tensor,
        rows: Iterable[int],
        plans: list[SamplingPlan],
        slots: list[int],
        positions: list[int],
        argmax_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return a token for each of ``rows``, by its drawing method: int64 [R]. Other entries are meaningless."""
        rows_by_method: dict[DrawMethod, list[int]] = {method: [] for method in DRAW_METHODS}
        for row in rows:
            rows_by_method[plans[row].method].append(row)
        greedy = rows_by_method.pop("greedy")
        if argmax_ids is not None:
            tokens = argmax_ids
        elif greedy:
            tokens = native.argmax(logits)[1]
        else:
            tokens = torch.zeros(len(logits), dtype=torch.int64, device=self.device)
        for method, method_rows in rows_by_method.items():
            if method_rows:
                drawn_tokens = self._draw_rows(logits, method_rows, plans, slots, positions, method)
                tokens[copy_to_device(np.array(method_rows, np.int64), self.device)] = drawn_tokens
        return tokens

    def _choose_allowed(
        self, logits: torch.Tensor, rows: list[int], plans: list[SamplingPlan], slots: list[int], positions: list[int]
    ) -> torch.Tensor:
        """Return tokens for rows whose grammars allow few tokens: int64 [rows]. Only those logits are read.

        The result is the same as with -inf for all other tokens, which weigh nothing.
        """
        plans = [plans[row] for row in rows]
        allowed_ids = [
            plan.grammar.allowed_tokens.to(self.device)
            for plan in plans
            if plan.grammar is not None and plan.grammar.allowed_tokens is not None
        ]
        values = pad_sequence(
            [logits[row].index_select(0, ids) for row, ids in zip(rows, allowed_ids, strict=True)], True, -math.inf
        )
        # If the model excludes all allowed tokens, take the first of them.
        values[:, :1].masked_fill_(values.amax(-1, keepdim=True) == -math.inf, 0.0)
        slots, positions = [slots[row] for row in rows], [positions[row] for row in rows]
        index = self._choose_tokens(values, range(len(rows)), plans, slots, positions, None)
        return pad_sequence(allowed_ids, True).gather(1, index[:, None])[:, 0]

    def _draw_rows(
        self,
        logits: torch.Tensor,
        rows: list[int],
        plans: list[SamplingPlan],
        slots: list[int],
        positions: list[int],
        method: DrawMethod,
    ) -> torch.Tensor:
        """Draw a token for each of ``rows`` by a method other than "greedy": int64 [rows]."""
        numbers = [uniform_number(plans[row].seed, positions[row]) for row in rows]
        uniforms = copy_to_device(np.array(numbers, np.float64), self.device)
        row_slots = copy_to_device(np.array([slots[row] for row in rows], np.int64), self.device)
        if len(rows) < len(logits):
            logits = logits[copy_to_device(np.array(rows, np.int64), self.device)]
        temperature, min_p = self._temperature[row_slots], self._min_p[row_slots]
        if method == "full":
            return draw_full(logits, temperature, min_p, uniforms)
        top_k, top_p = self._top_k[row_slots], self._top_p[row_slots]
        if method == "truncated":
            return draw_truncated(logits, temperature, min_p, top_k, top_p, uniforms)
        return draw_typical(logits, temperature, min_p, top_k, top_p, self._typical_p[row_slots], uniforms)

    def _score_tokens(
        self, logits: torch.Tensor, plans: list[SamplingPlan], tokens: list[int]
    ) -> list[TokenScore | None]:
        """Return the scores of the drawn tokens under the raw logits; None for rows that want no log-probabilities."""
        scores: list[TokenScore | None] = [None] * len(plans)
        short_rows = [row for row, plan in enumerate(plans) if 0 <= plan.logprobs <= SHORT_LIST]
        long_rows = [row for row, plan in enumerate(plans) if plan.logprobs > SHORT_LIST]
        for rows in filter(None, (short_rows, long_rows)):  # rows that ask for long lists must not slow the others down
            row_logits = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=self.device)]
            row_scores = score_tokens(
                row_logits, [tokens[row] for row in rows], max(plans[row].logprobs for row in rows)
            )
            for row, row_score in zip(rows, row_scores, strict=True):
                count = plans[row].logprobs
                scores[row] = TokenScore(
                    row_score.logprob, row_score.rank, row_score.top_ids[:count], row_score.top_logprobs[:count]
                )
        for row, plan in enumerate(plans):
            if (named_score := scores[row]) is not None and plan.named_ids:
                named_score.top_ids = plan.named_ids
                named_score.top_logprobs = token_logprobs(logits[row], plan.named_ids)
        return scores


def _advance_grammars(plans: list[SamplingPlan], tokens: list[int]) -> list[int]:
    """Give each row's token to its grammar, and start the masks of the next tokens. Return the rows whose grammar has
    failed (see ``wait_ready``)."""
    failed_rows = []
    for row, plan in enumerate(plans):
        if plan.grammar is None:
            continue
        if plan.grammar.wait_ready() is not None:
            failed_rows.append(row)
        else:
            plan.grammar.accept_token(tokens[row])
    for plan in plans:
        if plan.grammar is not None:
            plan.grammar.start_mask()
    return failed_rows
