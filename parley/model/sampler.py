"""The sampler: draws one token for each row of logits, by the parameters of the slot that the row belongs to.

Parameters are written into tables when a sequence gets its slot and gathered in each step, so that plain rows cost no
Python of their own. The order of operations is that of vLLM, which clients have come to rely on: raw log-probabilities
are taken first; then grammar, bias, watermark, what is forbidden, penalties, temperature, min_p, top_k, top_p,
typical_p, draw.

Randomness is a function, not a state: one uniform number per token, from seed and position. What is drawn for a row
depends on that row alone. The arithmetic is in ``draw``, ``edit`` and ``score``; this file must not know how a model
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
from parley.model.draw import draw, draw_cut, draw_typical, uniform
from parley.model.edit import Edit
from parley.model.grammar import End, Form, Grammars
from parley.model.score import alternatives, likeliest, logprobs, normaliser, score
from parley.types import Score

Way = Literal["greedy", "whole", "cut", "typical"]
WAYS: tuple[Way, ...] = get_args(Way)
FEW = 64  # alternatives; to list more takes longer
TRIED = 16  # of a row's likeliest tokens, before its grammar's mask is made
CORES = 8  # with more of them the network hardly notices what is done beside it

GREEDY = 1e-6  # a temperature below this is 0. vLLM's bound is 1e-5: the same tokens, but for ties


@dataclass(frozen=True, slots=True)
class Plan:
    """What the host must know of a slot. ``way``: how its rows are drawn; "cut" is with top_k or top_p, "typical" with
    typical_p, whatever else is on."""

    seed: int
    way: Way
    logprobs: int
    edit: Edit | None
    form: Form | None = None
    beams: int = 0  # of a search; 0: the slot's tokens are drawn
    stops: list[int] = field(default_factory=list)  # of a search: tokens that end its outputs
    named: list[int] = field(default_factory=list)  # tokens that scores list in place of the likeliest

    def edits(self, position: int) -> bool:
        """Whether output token ``position`` (from 0) sees other logits than the model's, beside what a grammar says."""
        return self.edit is not None and self.edit.changes(position)


class Sampler:
    """Sampling parameters of ``slots`` sequences, and the drawing from their logits.

    ``grammars``: what their grammars are made with; None where no sequence may have one.
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
                raise ValueError("there is nothing to read grammars with")
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
        """Forget what is in row ``slot``."""
        self._plans[slot] = None

    def ready(self, slots: list[int]) -> list[str | None]:
        """Wait until every slot's grammar says what may come next: why it cannot, None where it can or there is none.

        Belongs before ``sample``, as late as can be: until then grammars are worked on beside whatever else is done.
        """
        forms = [self._plan(slot).form for slot in slots]
        return [None if form is None else form.ready() for form in forms]

    def end(self, slot: int) -> End | None:
        """Whether the slot's grammar lets nothing follow the token that was drawn last, and what that is."""
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
        """Draw a token for each row, with its score if the slot wants log-probabilities; None where the slot's grammar
        turns out not to be ``ready``.

        logits float32 [R, vocab] (left as they are, unless they are ``spent``: nobody needs them again); row i is token
        ``positions[i]`` of its output, counted from 0. Every row needs a largest logit that is a finite number; the
        caller takes out those that have none. ``likely`` int64 [R] are the ids of those, where they are known; it is
        written to.
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
        """What may follow each row of a search, the likeliest first. Arguments as of ``sample``.

        Edits change log-probabilities here rather than logits: what they take from some tokens does not go to others,
        so that the beams remain comparable (as in Transformers' beam search).
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
        """As ``core.sequence.Runner`` says: slots go on with the edits and the form of others."""
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
        """Whether what is drawn for the slot depends on the tokens drawn before, beside seed, position and logits."""
        plan = self._plan(slot)
        return plan.edit is not None or plan.form is not None

    def _plan(self, slot: int) -> Plan:
        plan = self._plans[slot]
        assert plan is not None, f"slot {slot} samples without a sequence"
        return plan

    def _follow(self, logits: torch.Tensor, plans: list[Plan], likely: torch.Tensor | None) -> dict[int, int]:
        """The tokens of greedy rows, nothing but whose grammars says what may come.

        Where a mask is due and one of a row's likeliest tokens may come, that is the one, and no mask is needed. Where
        many tokens may come a mask takes long to make, and one of these is soon found.
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
        for row, form in reversed(forms.items()):  # threads begin with the first
            if row not in tokens and form.ready() is None:
                best = form.best(logits[row])
                tokens[row] = first[row] if best is None else best
        return tokens

    def _edit(
        self, logits: torch.Tensor, plans: list[Plan], positions: list[int], spent: bool, done: set[int]
    ) -> tuple[torch.Tensor, bool]:
        """The logits after grammars and edits, and whether any row has any; the rows of ``done`` keep theirs.

        A copy of a large vocabulary would cost more than the edits, so ``spent`` ones are edited in place, unless
        scores are wanted, which are those of the logits before.
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
        """A token for each of these rows, each in its way, int64 [R]; what others get means nothing."""
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
        """The same for rows whose grammars leave few tokens, int64 [rows]: the others are not looked at.

        What is drawn is what it would be with -inf for all others, which weigh nothing.
        """
        plans = [plans[row] for row in rows]
        few = [plan.form.few.to(self.device) for plan in plans if plan.form is not None and plan.form.few is not None]
        values = pad_sequence(
            [logits[row].index_select(0, ids) for row, ids in zip(rows, few, strict=True)], True, -math.inf
        )
        # Where the model rules out all that may come, the first of these does.
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
        for rows in filter(None, (few, many)):  # whoever wants the whole vocabulary pays for it alone
            chosen = logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=self.device)]
            found = score(chosen, [tokens[row] for row in rows], max(plans[row].logprobs for row in rows))
            for row, each in zip(rows, found, strict=True):
                count = plans[row].logprobs
                scores[row] = Score(each.logprob, each.rank, each.top_ids[:count], each.top[:count])
        for row, plan in enumerate(plans):
            if (own := scores[row]) is not None and plan.named:
                own.top_ids, own.top = plan.named, logprobs(logits[row], plan.named)
        return scores
