"""The sampler: draws one token per row of logits, with the sampling parameters of the row's slot.

Parameters are written into tables when a sequence gets its slot and gathered in each step, so that plain rows cost no
Python time of their own. The order of operations is vLLM's, which clients rely on: raw logprobs first; then grammar,
bias, watermark, banned tokens, penalties, temperature, min_p, top_k, top_p, typical_p, draw.

Randomness is a function, not a state: one uniform number per token, from seed and position. A row's draw depends on
that row alone. The arithmetic is in ``draw``, ``logit_edits`` and ``logprobs``; this file must not know how a model
runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch.nn.utils.rnn import pad_sequence

from parley import native
from parley.core.sequence import Candidate, Sequence
from parley.model.sampling.draw import draw, draw_cut, draw_typical, uniform
from parley.model.sampling.grammar_mask import End, Form, Grammars
from parley.model.sampling.logit_edits import Edit
from parley.model.sampling.logprobs import alternatives, likeliest, logprobs, normaliser, score
from parley.types import Score

Way = Literal["greedy", "whole", "cut", "typical"]
WAYS: tuple[Way, ...] = get_args(Way)
FEW = 64  # logprobs per row; longer lists take more time, so their rows are scored separately
TRIED = 16  # most probable tokens of a row that are tried before its grammar's mask is computed
CORES = 8  # with more cores, background work hardly slows the network down

GREEDY = 1e-6  # temperatures below this count as 0. vLLM's bound is 1e-5; the tokens are the same except for ties


@dataclass(frozen=True, slots=True)
class Plan:
    """How to sample a slot. ``method``: "greedy", or draw from the "whole" vocabulary, "cut" by top_k or top_p, or
    "typical" with typical_p and any of the others."""

    seed: int
    way: Way
    logprobs: int
    edit: Edit | None
    form: Form | None = None
    beams: int = 0  # beam width; 0: not a beam search
    stops: list[int] = field(default_factory=list)  # beam search only: tokens that end an output
    named: list[int] = field(default_factory=list)  # tokens to list logprobs for, in place of the most probable

    def edits(self, position: int) -> bool:
        """Whether logits processors change the logits of output token ``position`` (from 0), grammars aside."""
        return self.edit is not None and self.edit.changes(position)


class Sampler:
    """Holds the sampling parameters of ``slots`` sequences and draws tokens from their logits.

    ``grammars``: creates grammar states; None if no sequence may have a grammar.
    """

    def __init__(
        self, vocab_size: int, slots: int, device: torch.device | str = "cpu", grammars: Grammars | None = None
    ):
        self.vocab_size = vocab_size
        self.grammars = grammars
        self.device = torch.device(device)
        self._lazy = self.device.type == "cpu" and torch.get_num_threads() <= CORES
        self._plans: list[Plan | None] = [None] * slots
        self._temperature = torch.ones(slots, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(slots, dtype=torch.float64, device=device)
        self._top_p = torch.ones(slots, dtype=torch.float64, device=device)
        self._top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self._typical_p = torch.ones(slots, dtype=torch.float64, device=device)

    def admit(self, slot: int, sequence: Sequence) -> None:
        """Write the sequence's parameters into row ``slot``, and count the tokens it already has."""
        sampling = sequence.work.sampling
        top_k = sampling.top_k if 0 < sampling.top_k < self.vocab_size else 0
        way: Way = "whole"
        if sampling.temperature < GREEDY:
            way = "greedy"
        elif sampling.typical_p < 1.0:
            way = "typical"
        elif top_k > 0 or sampling.top_p < 1.0:
            way = "cut"
        edit = Edit(sequence, self.vocab_size) if Edit.wanted(sequence.work) else None
        form = None
        if Form.wanted(sequence.work):
            if self.grammars is None:
                raise ValueError("the sampler has no grammars, so it cannot follow one")
            greedy = way == "greedy" and edit is None and sequence.work.beam is None
            form = self.grammars.begin(sequence, greedy=greedy, lazy=greedy and self._lazy)
        beams = sequence.work.beam.width if sequence.work.beam is not None else 0
        stops = [id for id in sequence.work.stop_ids if 0 <= id < self.vocab_size] if beams else []
        work = sequence.work
        self._plans[slot] = Plan(sequence.seed, way, work.logprobs, edit, form, beams, stops, work.named)
        if way != "greedy":
            self._temperature[slot] = sampling.temperature
            self._min_p[slot] = sampling.min_p
            self._top_p[slot] = sampling.top_p
            self._top_k[slot] = top_k
            self._typical_p[slot] = sampling.typical_p

    def release(self, slot: int) -> None:
        """Forget the parameters in row ``slot``."""
        self._plans[slot] = None

    def ready(self, slots: list[int]) -> list[str | None]:
        """Wait until every slot's grammar has its next mask. Return an error message per slot, or None.

        Call it before ``draw_tokens``, as late as possible: until then masks are computed concurrently with other work.
        """
        forms = [self._plan(slot).form for slot in slots]
        return [None if form is None else form.ready() for form in forms]

    def end(self, slot: int) -> End | None:
        """Return how the slot's grammar ended with the last token ("form" or "mark"), None if it did not end."""
        form = self._plan(slot).form
        return None if form is None else form.end

    def sample(
        self,
        logits: torch.Tensor,
        slots: list[int],
        positions: list[int],
        likely: torch.Tensor | None = None,
        *,
        spent: bool = False,
    ) -> list[tuple[int | None, Score | None]]:
        """Draw a token for each row, with its score if the slot asks for logprobs; None as the token if the slot's
        grammar failed (see ``wait_ready``).

        logits float32 [R, vocab], modified only if ``overwrite`` (the caller no longer needs them). Row i is for output
        token ``positions[i]``, counted from 0. The largest logit of every row must be finite; the caller removes
        other rows. ``argmax_ids`` int64 [R]: the ids of the largest logits, if known; the tensor is overwritten.
        """
        plans = [self._plan(slot) for slot in slots]
        followed = self._follow(logits, plans, likely)
        few = [
            row
            for row, plan in enumerate(plans)
            if plan.form is not None and plan.form.few is not None and not plan.edits(positions[row])
        ]
        done = {*few, *followed}
        edited, changed = self._edit(logits, plans, positions, spent, done)
        rest = [row for row in range(len(plans)) if row not in done] if done else range(len(plans))
        tokens = self._choose(edited, rest, plans, slots, positions, None if changed else likely)
        if few:
            tokens[torch.tensor(few, device=self.device)] = self._choose_few(logits, few, plans, slots, positions)
        chosen = tokens.tolist()
        for row, plan in enumerate(plans):
            if plan.form is not None:
                chosen[row] = followed[row] if row in followed else plan.form.mend(chosen[row])
        scores = self._scores(logits, plans, chosen)
        for row, plan in enumerate(plans):
            if plan.form is not None and plan.form.ready() is not None:
                chosen[row] = scores[row] = None
                continue
            if plan.edit is not None:
                plan.edit.append(chosen[row])
            if plan.form is not None:
                plan.form.append(chosen[row])
        for plan in plans:
            if plan.form is not None:
                plan.form.prepare()
        return list(zip(chosen, scores, strict=True))

    def search(self, logits: torch.Tensor, slots: list[int], positions: list[int]) -> list[list[Candidate]]:
        """Return the candidates of each beam search row, most probable first. Arguments as in ``draw_tokens``.

        Logits processors change logprobs here instead of logits: probability taken from some tokens does not go to
        others, so that the beams remain comparable (as in Transformers' beam search).
        """
        plans = [self._plan(slot) for slot in slots]
        norms = normaliser(logits)
        shift = torch.tensor(norms, dtype=torch.float32, device=self.device)[:, None]
        edited, _ = self._edit(logits - shift, plans, positions, True, set())
        found: list[list[Candidate]] = []
        likely = likeliest(edited, [2 * plan.beams for plan in plans], [plan.stops for plan in plans])
        for row, plan in enumerate(plans):
            chosen = [Candidate(id, value) for id, value in likely[row]]
            if plan.logprobs >= 0:
                scores = alternatives(logits[row], norms[row], [each.token for each in chosen], plan.logprobs)
                for each, told in zip(chosen, scores, strict=True):
                    each.score = told
            if plan.form is not None:
                for each in chosen:
                    each.end = plan.form.after(each.token)
            found.append(chosen)
        return found

    def follow(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Fork slots as in ``core.sequence.Runner``: copy the parent's logits processor and grammar state."""
        plans = [self._plan(parent.slot) for _, parent in forks]
        for (sequence, parent), plan in zip(forks, plans, strict=True):
            if sequence is not parent:
                edit = None if plan.edit is None else plan.edit.copy(sequence)
                form = None if plan.form is None else plan.form.copy()
                self._plans[sequence.slot] = replace(plan, edit=edit, form=form)
        for sequence, _ in forks:
            plan = self._plan(sequence.slot)
            if plan.edit is not None:
                plan.edit.append(sequence.tokens[-1])
            if plan.form is not None:
                plan.form.append(sequence.tokens[-1])
                plan.form.prepare()

    def stateful(self, slot: int) -> bool:
        """Whether the slot's draw depends on tokens drawn before, besides seed, position and logits."""
        plan = self._plan(slot)
        return plan.edit is not None or plan.form is not None

    def _plan(self, slot: int) -> Plan:
        plan = self._plans[slot]
        assert plan is not None, f"slot {slot} samples without a sequence"
        return plan

    def _follow(self, logits: torch.Tensor, plans: list[Plan], likely: torch.Tensor | None) -> dict[int, int]:
        """Pick the tokens of greedy rows that have no constraint except a grammar: {row: token}.

        If a mask is needed and one of the row's most probable tokens is allowed, that token is the answer and no mask
        is computed. A mask takes longest to compute if many tokens are allowed, and then one is soon found.
        """
        forms = {
            row: plan.form
            for row, plan in enumerate(plans)
            if plan.form is not None and plan.way == "greedy" and plan.edit is None
        }
        if not forms:
            return {}
        first = (native.argmax(logits)[1] if likely is None else likely).tolist()
        tokens = {row: first[row] for row, form in forms.items() if form.due and form.allows(first[row])}
        rows = [row for row, form in forms.items() if form.due and row not in tokens]
        if rows:
            listed = native.top_k(logits if 2 * len(rows) > len(logits) else logits[rows], TRIED + 1)
        for place, row in enumerate(rows):
            values, ids = (each[row if len(listed[0]) == len(logits) else place].tolist() for each in listed)
            ranked = sorted((-value, id) for value, id in zip(values, ids, strict=True) if value > values[-1])
            tried = (id for _, id in ranked if id != first[row])
            token = next(filter(forms[row].allows, tried), None)
            if token is not None:
                tokens[row] = token
        rows = [row for row in rows if row not in tokens]
        for row in rows:
            forms[row].want(beside=row != rows[-1])
        for row, form in reversed(forms.items()):  # threads start with the first
            if row not in tokens and form.ready() is None:
                best = form.best(logits[row])
                tokens[row] = first[row] if best is None else best
        return tokens

    def _edit(
        self, logits: torch.Tensor, plans: list[Plan], positions: list[int], spent: bool, done: set[int]
    ) -> tuple[torch.Tensor, bool]:
        """Return the logits after grammars and processors, and whether any row changed; ``finished_rows`` are skipped.

        Copying a large vocabulary would cost more than the edits, so with ``overwrite`` logits are edited in place,
        unless scores are requested, which need the raw logits.
        """
        forms = [
            (row, plan.form)
            for row, plan in enumerate(plans)
            if plan.form is not None and plan.form.changes and row not in done
        ]
        edits = [
            (row, plan.edit) for row, plan in enumerate(plans) if plan.edit is not None and plan.edits(positions[row])
        ]
        changed = bool(forms or edits)
        if changed and not (spent and all(plan.logprobs < 0 for plan in plans)):
            logits = logits.clone()
        for row, form in forms:
            form.apply(logits[row])
        for row, edit in edits:
            edit.apply(logits[row], positions[row])
        return logits, changed

    def _choose(
        self,
        logits: torch.Tensor,
        rows: Iterable[int],
        plans: list[Plan],
        slots: list[int],
        positions: list[int],
        likely: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return a token for each of ``rows``, by its drawing method: int64 [R]. Other entries are meaningless."""
        ways: dict[Way, list[int]] = {way: [] for way in WAYS}
        for row in rows:
            ways[plans[row].way].append(row)
        greedy = ways.pop("greedy")
        if likely is not None:
            tokens = likely
        elif greedy:
            tokens = native.argmax(logits)[1]
        else:
            tokens = torch.zeros(len(logits), dtype=torch.int64, device=self.device)
        for way, drawn in ways.items():
            if drawn:
                each = self._draw(logits, drawn, plans, slots, positions, way)
                tokens[torch.tensor(drawn, device=self.device)] = each
        return tokens

    def _choose_few(
        self, logits: torch.Tensor, rows: list[int], plans: list[Plan], slots: list[int], positions: list[int]
    ) -> torch.Tensor:
        """Return tokens for rows whose grammars allow few tokens: int64 [rows]. Only those logits are read.

        The result is the same as with -inf for all other tokens, which weigh nothing.
        """
        plans = [plans[row] for row in rows]
        few = [plan.form.few.to(self.device) for plan in plans if plan.form is not None and plan.form.few is not None]
        values = pad_sequence(
            [logits[row].index_select(0, ids) for row, ids in zip(rows, few, strict=True)], True, -math.inf
        )
        # If the model excludes all allowed tokens, take the first of them.
        values[:, :1].masked_fill_(values.amax(-1, keepdim=True) == -math.inf, 0.0)
        slots, positions = [slots[row] for row in rows], [positions[row] for row in rows]
        index = self._choose(values, range(len(rows)), plans, slots, positions, None)
        return pad_sequence(few, True).gather(1, index[:, None])[:, 0]

    def _draw(
        self,
        logits: torch.Tensor,
        rows: list[int],
        plans: list[Plan],
        slots: list[int],
        positions: list[int],
        way: Way,
    ) -> torch.Tensor:
        u = [uniform(plans[row].seed, positions[row]) for row in rows]
        uniforms = torch.tensor(u, dtype=torch.float64, device=self.device)
        table = torch.tensor([slots[row] for row in rows], device=self.device)
        if len(rows) < len(logits):
            logits = logits[torch.tensor(rows, device=self.device)]
        temperature, min_p = self._temperature[table], self._min_p[table]
        if way == "whole":
            return draw(logits, temperature, min_p, uniforms)
        top_k, top_p = self._top_k[table], self._top_p[table]
        if way == "cut":
            return draw_cut(logits, temperature, min_p, top_k, top_p, uniforms)
        return draw_typical(logits, temperature, min_p, top_k, top_p, self._typical_p[table], uniforms)

    def _scores(self, logits: torch.Tensor, plans: list[Plan], tokens: list[int]) -> list[Score | None]:
        scores: list[Score | None] = [None] * len(plans)
        few = [row for row, plan in enumerate(plans) if 0 <= plan.logprobs <= FEW]
        many = [row for row, plan in enumerate(plans) if plan.logprobs > FEW]
        for rows in filter(None, (few, many)):  # rows that ask for long lists must not slow the others down
            chosen = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=self.device)]
            found = score(chosen, [tokens[row] for row in rows], max(plans[row].logprobs for row in rows))
            for row, each in zip(rows, found, strict=True):
                count = plans[row].logprobs
                scores[row] = Score(each.logprob, each.rank, each.top_ids[:count], each.top[:count])
        for row, plan in enumerate(plans):
            if (own := scores[row]) is not None and plan.named:
                own.top_ids, own.top = plan.named, logprobs(logits[row], plan.named)
        return scores
