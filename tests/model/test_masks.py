"""Grammars in the engine: every answer follows its grammar, and its bits do not depend on other requests."""

from __future__ import annotations

import json
import re
from functools import cache
from random import Random

import jsonschema
import pytest
from msgspec.structs import replace
from support import tiny_models
from support.run_model import Answer, serve, start

from parley.core.guess.speculation import Speculation
from parley.core.loop import Loop
from parley.core.sequence import Sequence
from parley.core.step_budget import Fixed
from parley.model.sampling.grammar_mask import Form, Grammars
from parley.text import Language
from parley.types import Grammar, Sampling, Settings, Tag, Tags, Thinking, Work

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0},
                   "tags": {"type": "array", "items": {"enum": ["a", "bc", "zwölf", "日本"]}, "maxItems": 3}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
SCHEMAS = [
    PERSON,
    {"type": "boolean"},
    {"enum": [1, "zwei", None, {"a": [1.5]}]},
    {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 4},
    {"type": "string", "pattern": "^(ä|🙂){1,5}$"},
    {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}, "$ref": "#/$defs/tree"},
]  # fmt: skip
TEXTS = [
    (Grammar("regex", r"[0-9]{3}-(ab|cd){1,3}"), r"[0-9]{3}-(ab|cd){1,3}"),
    (Grammar("regex", "^日?(é|🙂)+x$"), "日?(é|🙂)+x"),
    (Grammar("choice", ["yes", "no", "nobody 'knows' \\ \n"]), r"yes|no|nobody 'knows' \\ \n"),
    (Grammar("lark", 'start: (NUMBER ",")~1..3 "."\nNUMBER: /[0-9]{1,2}/'), r"([0-9]{1,2},){1,3}\."),
    (Grammar("ebnf", 'root ::= "<" b ">"\nb ::= [a-c] | b [a-c]'), "<[a-c]+>"),
    (Grammar("choice", [""]), ""),
]  # fmt: skip


@cache
def model():
    folder = tiny_models.model("qwen3")
    return start(folder, kv_memory=16 << 20, threads=1)[0], Language.load(folder)


def work(id: str = "w", grammar: Grammar | None = None, prompt: str = "the quick brown fox", **options) -> Work:
    language = model()[1]
    text = "" if grammar is None else language.grammars.compile(grammar)
    options = {"max_tokens": 200, "stop_ids": sorted(language.tokenizer.eos_ids)} | options
    return Work(id, language.tokenizer.encode(prompt), grammar=text, **options)


def run(*works: Work, **options) -> dict[tuple[str, int], Answer]:
    return serve(model()[0], list(works), **options)[0]


def text(answer: Answer) -> str:
    tokenizer = model()[1].tokenizer
    return tokenizer.decode([id for id in answer.token_ids if id not in tokenizer.eos_ids])


@pytest.mark.parametrize("heat", [0.0, 1.0, 2.0])
def test_outputs_conform_to_their_json_schemas(heat):
    many = [
        work(str(number), Grammar("json", schema), n=3, seed=number, sampling=Sampling(temperature=heat))
        for number, schema in enumerate(SCHEMAS)
    ]
    ended = set()
    for (id, _), answer in run(*many).items():
        if answer.finish == "stop":
            jsonschema.validate(json.loads(text(answer)), SCHEMAS[int(id)])
            ended.add(id)
    assert len(ended) >= len(SCHEMAS) - (heat == 0)


def test_outputs_match_regexes_choices_and_grammars():
    heat = Sampling(temperature=2.0)
    for number, (grammar, expression) in enumerate(TEXTS):
        for answer in run(work(grammar=grammar, n=6, seed=number, sampling=heat)).values():
            assert answer.finish == "length" or re.fullmatch(expression, text(answer)), text(answer)


def test_grammar_with_thousands_of_choices_is_not_too_complex():
    names = [f"name {number}" for number in range(4000)]
    members = {name: {"type": "null"} for name in names[:1000]}
    forms = [Grammar("choice", names), Grammar("json", {"type": "object", "properties": members})]
    answers = run(*(work(str(number), form, max_tokens=30) for number, form in enumerate(forms)))
    assert all(answer.finish != "error" for answer in answers.values())
    assert text(answers["0", 0]) in names


def test_precompiled_grammar_is_cached():
    grammars = Grammars(tiny_models.model("qwen3"), 512)
    made = model()[1].grammars.compile(Grammar("choice", ["yes"]))
    assert not grammars.kept(made)
    grammars.prepare(made)
    assert grammars.kept(made)
    grammars.prepare("{}")  # an invalid grammar is reported by the request that uses it
    assert not grammars.kept("{}")


def test_grammar_text_spelled_like_special_tokens_is_plain_text():
    """Guards against a grammar that matches special tokens instead of their text."""
    marks = ["<think>", "a<|im_start|>b", "<tool_call>{}</tool_call>"]
    forms = [Grammar("choice", [mark]) for mark in marks] + [Grammar("json", {"const": mark}) for mark in marks]
    answers = run(*(work(str(number), form) for number, form in enumerate(forms)))
    assert [text(answers[str(number), 0]) for number in range(6)] == [*marks, *map(json.dumps, marks)]


def test_text_between_structural_tags_follows_its_schema():
    grammar = Grammar("tags", Tags([Tag("<f=a>", {"const": 1}, "</f>"), Tag("<f=b>", {"const": [2]}, "</f>")], ["<f"]))
    # A random model would hardly ever write the trigger.
    likely = dict.fromkeys(model()[1].tokenizer.encode("<f", special=False), 30.0)
    begun = 0
    for answer in run(work(grammar=grammar, n=8, max_tokens=60, sampling=Sampling(logit_bias=likely))).values():
        pieces = text(answer).split("<f")[1:]
        begun += len(pieces)
        for number, piece in enumerate(pieces, 1):
            whole = re.match(r"=(a>1|b>\[\s*2\s*\])</f>", piece)
            assert whole or (number == len(pieces) and len(piece) < 80), piece
    assert begun


def cases() -> list[Work]:
    """Rows with and without a grammar."""
    made = []
    for number, heat in enumerate((0.0, 1.0, 1.7)):
        sampling = Sampling(temperature=heat, repetition_penalty=1.1, top_p=0.95)
        options = {"seed": number, "logprobs": 3, "sampling": sampling, "max_tokens": 24}
        made.append(work(f"json{number}", Grammar("json", PERSON), n=2, **options))
        made.append(work(f"free{number}", None, **options))
        made.append(work(f"regex{number}", Grammar("regex", "([a-f ]|é)*"), prompt="the " * 40, **options))
    return made


@cache
def alone() -> dict[tuple[str, int], Answer]:
    return {key: answer for each in cases() for key, answer in run(each).items()}


@pytest.mark.parametrize("options", [{}, {"step": 7}, {"cache": False}, {"batch": 2}, {"blocks": 24, "step": 20}])
def test_grammar_rows_are_batch_invariant(options):
    runner = model()[0]
    pages, blocks = runner.pages, runner.blocks
    try:
        assert run(*cases(), **options) == alone()
    finally:
        runner.pages, runner.blocks = pages, blocks


def test_draws_from_listed_tokens_equal_draws_with_a_mask(monkeypatch):
    """Drawing from a short list of allowed tokens gives the same token as masking all the others."""
    made = [replace(each, sampling=replace(each.sampling, repetition_penalty=1.0)) for each in cases()]
    ways = ({"top_k": 40}, {"top_k": 2}, {"min_p": 0.1}, {"typical_p": 0.8}, {"temperature": 0.0})
    made += [
        work(
            f"way{number}", Grammar("json", PERSON), n=2, seed=number, sampling=Sampling(**{"temperature": 1.5, **way})
        )
        for number, way in enumerate(ways)
    ]
    listed = run(*made)
    monkeypatch.setattr("parley.model.sampling.grammar_mask.FEW", -1)
    assert run(*made) == listed


def greedy() -> list[Work]:
    return [
        replace(each, sampling=Sampling(temperature=0.0), n=1)
        for each in cases()
        if each.grammar and not each.min_tokens
    ]


def masks(monkeypatch, most: int = 1 << 30) -> list[int]:
    """Count the masks that are computed; those after the first ``most`` fail."""
    made, make = [0], Form._mask

    def counted(self, matcher):
        made[0] += 1
        if made[0] > most:
            raise ValueError("too complex")
        make(self, matcher)

    monkeypatch.setattr(Form, "_mask", counted)
    return made


def test_lazy_masks_are_computed_only_when_no_top_token_is_allowed(monkeypatch):
    sampler = model()[0].sampler
    made = masks(monkeypatch)
    monkeypatch.setattr(sampler, "_lazy", False)
    eager, all_masks = run(*greedy()), made[0]
    monkeypatch.setattr(sampler, "_lazy", True)
    made[0] = 0
    assert run(*greedy()) == eager
    assert 0 < made[0] < all_masks
    monkeypatch.setattr("parley.model.sampling.sampler.TRIED", 1 << 20)  # every allowed token is among the candidates
    made[0] = 0
    assert run(*greedy()) == eager
    assert made[0] < 0.1 * all_masks


@pytest.mark.parametrize("drafts", [False, True])
def test_failing_mask_ends_only_its_own_choice(monkeypatch, drafts):
    runner = model()[0]
    monkeypatch.setattr(runner.sampler, "_lazy", True)
    monkeypatch.setattr(Speculation, "length", lambda self, sequence: self.most)
    monkeypatch.setattr("parley.core.guess.speculation.Costs.best", lambda self, rows, chances: len(chances))
    form = work("form", Grammar("json", PERSON), sampling=Sampling(temperature=0.0))
    plain = work("plain", max_tokens=30, stop_ids=[])
    want = run(form, plain)
    if drafts:
        monkeypatch.setattr(runner, "proposer", Guesser(want))
    masks(monkeypatch, 3)
    outputs = []
    loop = Loop(runner, Settings(model="m"), lambda made, stats: outputs.extend(made), Fixed(500))
    loop.add(form)
    loop.add(plain)
    while loop.step():
        pass
    told = {
        id: [each for output in outputs if output.id == id for each in output.token_ids] for id in ("form", "plain")
    }
    last = {output.id: output for output in outputs if output.finish}
    assert last["form"].finish == "error" and "too complex" in last["form"].error
    before = want["form", 0].token_ids
    assert 0 < len(told["form"]) < len(before) and told["form"] == before[: len(told["form"])]
    assert last["plain"].finish == "length" and told["plain"] == want["plain", 0].token_ids


def test_single_token_check_agrees_with_the_mask():
    """Compare on random walks through every kind of grammar."""
    grammars, random = Grammars(tiny_models.model("qwen3"), tiny_models.VOCAB), Random(3)
    kinds = [Grammar("json", PERSON), Grammar("json", SCHEMAS[4]), Grammar("regex", ".*"), *(each for each, _ in TEXTS)]
    for grammar in kinds:
        each = work(grammar=grammar)
        row = Sequence(each.id, 0, each, list(each.token_ids), len(each.token_ids), 0, 0)
        form, lazy = grammars.begin(row), grammars.begin(row, lazy=True)
        for _ in range(20):
            assert form.ready() is None and lazy.ready() is None and lazy.due and not form.due
            may = [id for id in range(tiny_models.VOCAB) if int(form._bits[id // 8]) >> id % 8 & 1]
            alone = [id for id in range(tiny_models.VOCAB) if lazy.allows(id)]
            assert alone == may or not alone  # where only a special token fits, the mask decides
            token = random.choice(may)
            form.append(token)
            lazy.append(token)
            assert form.end == lazy.end
            if form.end:
                break


class Guesser:
    """A proposer that knows the answers and proposes 80 % of the tokens right."""

    def __init__(self, answers: dict[tuple[str, int], Answer]):
        self.random, self.answers = Random(1), answers

    def propose(self, asked):
        return [self._guess(sequence, length) for sequence, length in asked]

    def _guess(self, sequence, length: int) -> list[int]:
        right = self.answers[sequence.id, sequence.index].token_ids[sequence.generated : sequence.generated + length]
        return [id if self.random.random() < 0.8 else self.random.randrange(tiny_models.VOCAB) for id in right]

    def forget(self, sequence):
        pass


def test_draft_tokens_do_not_change_grammar_outputs(monkeypatch):
    """Also for rows whose thinking budget ends the reasoning."""
    monkeypatch.setattr(Speculation, "length", lambda self, sequence: self.most)
    monkeypatch.setattr("parley.core.guess.speculation.Costs.best", lambda self, rows, chances: len(chances))
    many = cases()
    close = model()[1].tokenizer.encode("</think>", special=False)
    for budget in (0, 5):
        thinking = Thinking("<think>", "</think>", True, budget, close)
        many.append(work(f"thought{budget}", Grammar("json", PERSON), thinking=thinking, max_tokens=40, logprobs=1))
        many[-1].grammar = model()[1].grammars.behind(many[-1].grammar, ("<think>", "</think>"), True)
    runner = model()[0]
    want, plain = serve(runner, many)
    monkeypatch.setattr(runner, "proposer", Guesser(want))
    got, drafted = serve(runner, many)
    assert got == want
    assert drafted.steps < 0.6 * plain.steps and sum(drafted.draft_accepted) > 100


def test_reset_at_every_step_does_not_change_grammar_outputs():
    answers: dict[tuple[str, int], Answer] = {}

    def emit(outputs, stats):
        for output in outputs:
            answer = answers.setdefault((output.id, output.index), Answer())
            assert output.error is None
            answer.token_ids += output.token_ids
            answer.scores += output.scores or []
            answer.finish = output.finish

    loop = Loop(model()[0], Settings(model="m", max_batch=16), emit, Fixed(500))
    for each in cases():
        loop.add(each)
    while loop.step():
        loop.reset(running=True)
    assert answers == alone()


def test_grammar_does_not_change_logprobs():
    """Log-probabilities are those of the model, before the mask."""
    sampling = Sampling(temperature=0.0)
    (answer,) = run(work(grammar=Grammar("choice", ["quite unlikely"]), logprobs=2, sampling=sampling)).values()
    ids = answer.token_ids
    prompt = [*work().token_ids, *ids]
    (scored,) = run(Work("s", prompt, max_tokens=0, prompt_logprobs=2)).values()
    assert [score.logprob for score in answer.scores] == [score.logprob for score in scored.prompt_scores[-len(ids) :]]
    assert [score.rank for score in answer.scores] == [score.rank for score in scored.prompt_scores[-len(ids) :]]


def test_output_ends_with_its_grammar_despite_other_settings():
    for stops in ([], None):
        for least in (0, 50):
            options = {"min_tokens": least} | ({} if stops is None else {"stop_ids": stops})
            for heat in (0.0, 1.5):
                sampling = Sampling(temperature=heat)
                (answer,) = run(work(grammar=Grammar("regex", "[ab]{5}c?"), sampling=sampling, **options)).values()
                assert answer.finish == "stop" and re.fullmatch("[ab]{5}c?", text(answer))
                if stops is not None or least:
                    assert text(answer).endswith("c")  # it continues while the grammar allows more


def test_max_tokens_cuts_grammar_output_to_a_prefix():
    whole = run(work(grammar=Grammar("json", PERSON), seed=5))["w", 0]
    for most in range(1, len(whole.token_ids)):
        (cut,) = run(work(grammar=Grammar("json", PERSON), seed=5, max_tokens=most)).values()
        assert cut.finish == "length" and cut.token_ids == whole.token_ids[:most]


def test_invalid_grammar_ends_only_its_own_choice():
    """Guards against one broken grammar that fails the whole batch."""
    outputs = []
    loop = Loop(model()[0], Settings(model="m"), lambda made, stats: outputs.extend(made), Fixed(500))
    broken = work("broken", None, max_tokens=5)
    broken.grammar = '{"grammars": [{"lark_grammar": "start: @missing"}]}'
    loop.add(broken)
    loop.add(work("fine", None, max_tokens=5, stop_ids=[]))
    while loop.step():
        pass
    last = {output.id: output for output in outputs if output.finish}
    assert last["broken"].finish == "error" and "grammar" in last["broken"].error
    assert last["fine"].finish == "length"


@pytest.mark.parametrize("budget", [0, 1, 5, 30])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("form", [None, Grammar("json", {"const": [1]})])
def test_thinking_budget_ends_reasoning(budget, inside, form):
    language = model()[1]
    tokenizer = language.tokenizer
    close = tokenizer.encode("\n</think>\n\n", special=False)
    thinking = Thinking("<think>", "</think>", inside, budget, close)
    each = work(grammar=form, n=4, seed=1, max_tokens=90, thinking=thinking, sampling=Sampling(temperature=1.5))
    each.stop_ids = []
    if form is not None:
        each.grammar = language.grammars.behind(each.grammar, ("<think>", "</think>"), inside)
    if not inside:  # a random model would hardly ever write the opening mark
        each.token_ids += tokenizer.encode("<", special=False)
        each.sampling = Sampling(temperature=1.0, logit_bias={id: 30.0 - at for at, id in enumerate(
            tokenizer.encode("<think>", special=False))})  # fmt: skip
    limits = set()
    answers = run(each)
    for answer in answers.values():
        shown = tokenizer.decode(answer.token_ids)
        if not inside and not shown.startswith("<think>"):
            continue
        ends = [
            at for at in range(len(answer.token_ids))
            if "</think>" in tokenizer.decode(answer.token_ids[: at + 1])
        ]  # fmt: skip
        assert ends, shown
        limits.add(ends[0] + 1)
        if form is not None:
            tail = shown.split("</think>", 1)[1]
            assert json.loads(tail) == [1] or answer.finish == "length"
    opening = 0 if inside else len(tokenizer.encode("<think>", special=False)) + 2
    assert all(limit <= opening + budget + 3 + len(close) for limit in limits)
    assert limits or not inside
    for key, answer in run(each, work("other"), step=9, cache=False).items():
        assert key[0] == "other" or answer == answers[key]
