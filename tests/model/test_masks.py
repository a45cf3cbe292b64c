"""Grammars in the engine: every answer follows its grammar, and its bits do not depend on other requests."""

from __future__ import annotations

import json
import re
from functools import cache
from random import Random

import jsonschema
import pytest
import torch
from msgspec.structs import replace
from support import tiny_models
from support.run_model import Answer, load_test_runner, serve_requests

from parley.core.engine_loop import EngineLoop
from parley.core.sequence import Sequence
from parley.core.speculative.speculation import Speculation
from parley.core.step_budget import FixedBudget
from parley.model.sampling import grammar_mask
from parley.model.sampling.grammar_mask import GrammarCache
from parley.text.grammar.limits import GRAMMAR_NOT_FOLLOWED
from parley.text.text_pipeline import TextPipeline
from parley.types import (
    EngineRequest,
    Grammar,
    ParleySettings,
    ReasoningLimit,
    SamplingOptions,
    StructuralTag,
    TriggeredTags,
)

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
def runner_and_language():
    folder = tiny_models.model_folder("qwen3")
    return load_test_runner(folder, kv_memory=16 << 20, threads=1)[0], TextPipeline.from_folder(folder)


def make_request(
    request_id: str = "w", grammar: Grammar | None = None, prompt: str = "the quick brown fox", **options
) -> EngineRequest:
    language = runner_and_language()[1]
    compiled_grammar = "" if grammar is None else language.grammar_compiler.compile_grammar(grammar)
    options = {"max_tokens": 200, "stop_ids": sorted(language.tokenizer.eos_ids)} | options
    return EngineRequest(request_id, language.tokenizer.encode(prompt), grammar=compiled_grammar, **options)


def serve_all(*requests: EngineRequest, **options) -> dict[tuple[str, int], Answer]:
    return serve_requests(runner_and_language()[0], list(requests), **options)[0]


def decode_answer(answer: Answer) -> str:
    tokenizer = runner_and_language()[1].tokenizer
    return tokenizer.decode([token_id for token_id in answer.token_ids if token_id not in tokenizer.eos_ids])


@pytest.mark.parametrize("heat", [0.0, 1.0, 2.0])
def test_outputs_conform_to_their_json_schemas(heat):
    """Greedy answers of a random model may repeat digits or brackets to the limit, so there are several prompts."""
    sampling = SamplingOptions(temperature=heat)
    requests = [
        make_request(f"{number} {prompt}", Grammar("json", schema), prompt, n=3, seed=number, sampling=sampling)
        for number, schema in enumerate(SCHEMAS)
        for prompt in ("the quick brown fox", "one two three", "hello there")[: 3 if heat == 0 else 1]
    ]
    ended = set()
    for (request_id, _), answer in serve_all(*requests).items():
        number = int(request_id.split()[0])
        if answer.finish == "stop":
            jsonschema.validate(json.loads(decode_answer(answer)), SCHEMAS[number])
            ended.add(number)
    assert len(ended) == len(SCHEMAS)


def test_outputs_match_regexes_choices_and_grammars():
    sampling = SamplingOptions(temperature=2.0)
    for number, (grammar, expression) in enumerate(TEXTS):
        for answer in serve_all(make_request(grammar=grammar, n=6, seed=number, sampling=sampling)).values():
            assert answer.finish == "length" or re.fullmatch(expression, decode_answer(answer)), decode_answer(answer)


def test_grammar_with_thousands_of_choices_is_not_too_complex():
    names = [f"name {number}" for number in range(4000)]
    members = {name: {"type": "null"} for name in names[:1000]}
    grammars = [Grammar("choice", names), Grammar("json", {"type": "object", "properties": members})]
    answers = serve_all(*(make_request(str(number), form, max_tokens=30) for number, form in enumerate(grammars)))
    assert all(answer.finish != "error" for answer in answers.values())
    assert decode_answer(answers["0", 0]) in names


def test_precompiled_grammar_is_cached():
    grammars = GrammarCache(tiny_models.model_folder("qwen3"), 512)
    compiled = runner_and_language()[1].grammar_compiler.compile_grammar(Grammar("choice", ["yes"]))
    assert not grammars.is_cached(compiled)
    grammars.precompile(compiled)
    assert grammars.is_cached(compiled)
    grammars.precompile("{}")  # an invalid grammar is reported by the request that uses it
    assert not grammars.is_cached("{}")


def test_missing_tokenizer_is_not_reported_as_the_clients_error(tmp_path):
    """The engine reads it with the first grammar; the folder may have been removed since the start."""
    grammars, folder = GrammarCache(tmp_path / "model", tiny_models.VOCAB), tiny_models.model_folder("qwen3")
    request = make_request(grammar=Grammar("choice", ["yes"]))
    sequence = Sequence(request.id, 0, request, list(request.token_ids), len(request.token_ids), 0, 0)
    assert grammars.new_state(sequence).wait_ready() == GRAMMAR_NOT_FOLLOWED
    (tmp_path / "model").symlink_to(folder)
    assert grammars.new_state(sequence).wait_ready() is None


def test_grammar_text_spelled_like_special_tokens_is_plain_text():
    """Guards against a grammar that matches special tokens instead of their text."""
    marks = ["<think>", "a<|im_start|>b", "<tool_call>{}</tool_call>"]
    grammars = [Grammar("choice", [mark]) for mark in marks] + [Grammar("json", {"const": mark}) for mark in marks]
    answers = serve_all(*(make_request(str(number), form) for number, form in enumerate(grammars)))
    assert [decode_answer(answers[str(number), 0]) for number in range(6)] == [*marks, *map(json.dumps, marks)]


def test_text_between_structural_tags_follows_its_schema():
    grammar = Grammar(
        "tags",
        TriggeredTags(
            [StructuralTag("<f=a>", {"const": 1}, "</f>"), StructuralTag("<f=b>", {"const": [2]}, "</f>")], ["<f"]
        ),
    )
    # A random model would hardly ever write the trigger.
    trigger_bias = dict.fromkeys(runner_and_language()[1].tokenizer.encode("<f", add_special_tokens=False), 30.0)
    tag_count = 0
    for answer in serve_all(
        make_request(grammar=grammar, n=8, max_tokens=60, sampling=SamplingOptions(logit_bias=trigger_bias))
    ).values():
        pieces = decode_answer(answer).split("<f")[1:]
        tag_count += len(pieces)
        for number, piece in enumerate(pieces, 1):
            complete_tag = re.match(r"=(a>1|b>\[\s*2\s*\])</f>", piece)
            assert complete_tag or (number == len(pieces) and len(piece) < 80), piece
    assert tag_count


def mixed_requests() -> list[EngineRequest]:
    """Rows with and without a grammar."""
    requests = []
    for number, temperature in enumerate((0.0, 1.0, 1.7)):
        sampling = SamplingOptions(temperature=temperature, repetition_penalty=1.1, top_p=0.95)
        options = {"seed": number, "logprobs": 3, "sampling": sampling, "max_tokens": 24}
        requests.append(make_request(f"json{number}", Grammar("json", PERSON), n=2, **options))
        requests.append(make_request(f"free{number}", None, **options))
        requests.append(make_request(f"regex{number}", Grammar("regex", "([a-f ]|é)*"), prompt="the " * 40, **options))
    return requests


@cache
def answers_alone() -> dict[tuple[str, int], Answer]:
    return {key: answer for request in mixed_requests() for key, answer in serve_all(request).items()}


@pytest.mark.parametrize("options", [{}, {"step": 7}, {"cache": False}, {"batch": 2}, {"blocks": 24, "step": 20}])
def test_grammar_rows_are_batch_invariant(options):
    runner = runner_and_language()[0]
    pages, blocks = runner.pages, runner.page_count
    try:
        assert serve_all(*mixed_requests(), **options) == answers_alone()
    finally:
        runner.pages, runner.page_count = pages, blocks


def test_draws_from_listed_tokens_equal_draws_with_a_mask(monkeypatch):
    """Drawing from a short list of allowed tokens gives the same token as masking all the others."""
    requests = [
        replace(request, sampling=replace(request.sampling, repetition_penalty=1.0)) for request in mixed_requests()
    ]
    sampling_options = ({"top_k": 40}, {"top_k": 2}, {"min_p": 0.1}, {"typical_p": 0.8}, {"temperature": 0.0})
    requests += [
        make_request(
            f"way{number}",
            Grammar("json", PERSON),
            n=2,
            seed=number,
            sampling=SamplingOptions(**{"temperature": 1.5, **option}),
        )
        for number, option in enumerate(sampling_options)
    ]
    listed_answers = serve_all(*requests)
    monkeypatch.setattr("parley.model.sampling.grammar_mask.MAX_LISTED_WORDS", -1)
    assert serve_all(*requests) == listed_answers


def greedy_requests() -> list[EngineRequest]:
    return [
        replace(request, sampling=SamplingOptions(temperature=0.0), n=1)
        for request in mixed_requests()
        if request.grammar and not request.min_tokens
    ]


def count_masks(monkeypatch, max_masks: int = 1 << 30) -> list[int]:
    """Count the masks that are computed; those after the first ``max_masks`` fail."""
    mask_count, fill_bitmask = [0], grammar_mask.fill_next_token_bitmask

    def count_and_fill(matcher, bitmask):
        mask_count[0] += 1
        if mask_count[0] > max_masks:
            raise ValueError("too complex")
        fill_bitmask(matcher, bitmask)

    monkeypatch.setattr(grammar_mask, "fill_next_token_bitmask", count_and_fill)
    return mask_count


def test_lazy_masks_are_computed_only_when_no_tried_token_is_allowed(monkeypatch):
    sampler = runner_and_language()[0].sampler
    mask_count = count_masks(monkeypatch)
    monkeypatch.setattr(sampler, "lazy_masks", False)
    eager_answers, all_masks = serve_all(*greedy_requests()), mask_count[0]
    monkeypatch.setattr(sampler, "lazy_masks", True)
    mask_count[0] = 0
    assert serve_all(*greedy_requests()) == eager_answers
    assert 0 < mask_count[0] < all_masks
    # With no letter to ask about, every text counts as free, and every allowed token is tried.
    monkeypatch.setattr(sampler.grammars, "letter_ids", [])
    monkeypatch.setattr("parley.model.sampling.sampler.TRIED_TOKENS", 1 << 20)
    mask_count[0] = 0
    assert serve_all(*greedy_requests()) == eager_answers
    assert mask_count[0] < 0.1 * all_masks


@pytest.mark.parametrize("drafts", [False, True])
def test_failing_mask_ends_only_its_own_choice(monkeypatch, drafts):
    runner = runner_and_language()[0]
    monkeypatch.setattr(runner.sampler, "lazy_masks", True)
    monkeypatch.setattr(Speculation, "draft_length", lambda self, sequence: self.max_drafts)
    monkeypatch.setattr(
        "parley.core.speculative.speculation.DecodeCosts.best_draft_count", lambda self, rows, chances: len(chances)
    )
    constrained = make_request("form", Grammar("json", PERSON), sampling=SamplingOptions(temperature=0.0))
    plain = make_request("plain", max_tokens=30, stop_ids=[])
    expected = serve_all(constrained, plain)
    if drafts:
        monkeypatch.setattr(runner, "proposer", KnownAnswerProposer(expected))
    count_masks(monkeypatch, 3)
    outputs = []
    loop = EngineLoop(
        runner, ParleySettings(model="m"), lambda step_outputs, stats: outputs.extend(step_outputs), FixedBudget(500)
    )
    loop.add_request(constrained)
    loop.add_request(plain)
    while loop.step():
        pass
    received_tokens = {
        request_id: [token for output in outputs if output.id == request_id for token in output.token_ids]
        for request_id in ("form", "plain")
    }
    final_outputs = {output.id: output for output in outputs if output.finish_reason}
    assert final_outputs["form"].finish_reason == "error" and "too complex" in final_outputs["form"].error
    full_tokens = expected["form", 0].token_ids
    assert (
        0 < len(received_tokens["form"]) < len(full_tokens)
        and received_tokens["form"] == full_tokens[: len(received_tokens["form"])]
    )
    assert (
        final_outputs["plain"].finish_reason == "length" and received_tokens["plain"] == expected["plain", 0].token_ids
    )


def test_single_token_check_agrees_with_the_mask():
    """Compare on random walks through every kind of grammar."""
    grammars, random = GrammarCache(tiny_models.model_folder("qwen3"), tiny_models.VOCAB), Random(3)
    kinds = [
        Grammar("json", PERSON),
        Grammar("json", SCHEMAS[4]),
        Grammar("regex", ".*"),
        *(request for request, _ in TEXTS),
    ]
    for grammar in kinds:
        request = make_request(grammar=grammar)
        row = Sequence(request.id, 0, request, list(request.token_ids), len(request.token_ids), 0, 0)
        eager_state, lazy_state = grammars.new_state(row), grammars.new_state(row, lazy=True)
        for _ in range(20):
            assert (
                eager_state.wait_ready() is None
                and lazy_state.wait_ready() is None
                and lazy_state.mask_needed
                and not eager_state.mask_needed
            )
            row = torch.zeros(tiny_models.VOCAB)
            eager_state.mask_logits(row)
            mask_allows = row.isfinite().nonzero().flatten().tolist()
            check_allows = [token_id for token_id in range(tiny_models.VOCAB) if lazy_state.allows_token(token_id)]
            assert check_allows == mask_allows or not check_allows  # where only a special token fits, the mask decides
            token = random.choice(mask_allows)
            eager_state.accept_token(token)
            lazy_state.accept_token(token)
            assert eager_state.end_kind == lazy_state.end_kind
            if eager_state.end_kind:
                break


class KnownAnswerProposer:
    """A proposer that knows the answers and proposes 80 % of the tokens right."""

    def __init__(self, answers: dict[tuple[str, int], Answer]):
        self.random, self.answers = Random(1), answers

    def propose_drafts(self, draft_limits):
        return [self._mostly_right(sequence, length) for sequence, length in draft_limits]

    def _mostly_right(self, sequence, length: int) -> list[int]:
        right = self.answers[sequence.request_id, sequence.index].token_ids[
            sequence.output_length : sequence.output_length + length
        ]
        return [
            token_id if self.random.random() < 0.8 else self.random.randrange(tiny_models.VOCAB) for token_id in right
        ]

    def forget_sequence(self, sequence):
        pass


def test_draft_tokens_do_not_change_grammar_outputs(monkeypatch):
    """Also for rows whose thinking budget ends the reasoning."""
    monkeypatch.setattr(Speculation, "draft_length", lambda self, sequence: self.max_drafts)
    monkeypatch.setattr(
        "parley.core.speculative.speculation.DecodeCosts.best_draft_count", lambda self, rows, chances: len(chances)
    )
    requests = mixed_requests()
    closing_ids = runner_and_language()[1].tokenizer.encode("</think>", add_special_tokens=False)
    for budget in (0, 5):
        thinking = ReasoningLimit("<think>", "</think>", True, budget, closing_ids)
        requests.append(
            make_request(
                f"thought{budget}", Grammar("json", PERSON), reasoning_limit=thinking, max_tokens=40, logprobs=1
            )
        )
        requests[-1].grammar = runner_and_language()[1].grammar_compiler.allow_reasoning_before(
            requests[-1].grammar, ("<think>", "</think>"), True
        )
    runner = runner_and_language()[0]
    expected, plain_stats = serve_requests(runner, requests)
    monkeypatch.setattr(runner, "proposer", KnownAnswerProposer(expected))
    actual, drafting_stats = serve_requests(runner, requests)
    assert actual == expected
    assert drafting_stats.steps < 0.6 * plain_stats.steps and sum(drafting_stats.draft_accepted) > 100


def test_reset_at_every_step_does_not_change_grammar_outputs():
    answers: dict[tuple[str, int], Answer] = {}

    def collect_outputs(outputs, stats):
        for output in outputs:
            answer = answers.setdefault((output.id, output.index), Answer())
            assert output.error is None
            answer.token_ids += output.token_ids
            answer.scores += output.scores or []
            answer.finish = output.finish_reason

    loop = EngineLoop(
        runner_and_language()[0], ParleySettings(model="m", max_batch=16), collect_outputs, FixedBudget(500)
    )
    for request in mixed_requests():
        loop.add_request(request)
    while loop.step():
        loop.reset_prefix_cache(running=True)
    assert answers == answers_alone()


def test_grammar_does_not_change_logprobs():
    """Log-probabilities are those of the model, before the mask."""
    sampling = SamplingOptions(temperature=0.0)
    (answer,) = serve_all(
        make_request(grammar=Grammar("choice", ["quite unlikely"]), logprobs=2, sampling=sampling)
    ).values()
    ids = answer.token_ids
    prompt = [*make_request().token_ids, *ids]
    (scored,) = serve_all(EngineRequest("s", prompt, max_tokens=0, prompt_logprobs=2)).values()
    assert [score.logprob for score in answer.scores] == [score.logprob for score in scored.prompt_scores[-len(ids) :]]
    assert [score.rank for score in answer.scores] == [score.rank for score in scored.prompt_scores[-len(ids) :]]


def test_output_ends_with_its_grammar_despite_other_settings():
    for stops in ([], None):
        for min_tokens in (0, 50):
            options = {"min_tokens": min_tokens} | ({} if stops is None else {"stop_ids": stops})
            for temperature in (0.0, 1.5):
                sampling = SamplingOptions(temperature=temperature)
                (answer,) = serve_all(
                    make_request(grammar=Grammar("regex", "[ab]{5}c?"), sampling=sampling, **options)
                ).values()
                assert answer.finish == "stop" and re.fullmatch("[ab]{5}c?", decode_answer(answer))
                if stops is not None or min_tokens:
                    assert decode_answer(answer).endswith("c")  # it continues while the grammar allows more


def test_max_tokens_cuts_grammar_output_to_a_prefix():
    full_answer = serve_all(make_request(grammar=Grammar("json", PERSON), seed=5))["w", 0]
    for max_tokens in range(1, len(full_answer.token_ids)):
        (cut,) = serve_all(make_request(grammar=Grammar("json", PERSON), seed=5, max_tokens=max_tokens)).values()
        assert cut.finish == "length" and cut.token_ids == full_answer.token_ids[:max_tokens]


def test_invalid_grammar_ends_only_its_own_choice():
    """Guards against one broken grammar that fails the whole batch."""
    outputs = []
    loop = EngineLoop(
        runner_and_language()[0],
        ParleySettings(model="m"),
        lambda step_outputs, stats: outputs.extend(step_outputs),
        FixedBudget(500),
    )
    broken = make_request("broken", None, max_tokens=5)
    broken.grammar = '{"grammars": [{"lark_grammar": "start: @missing"}]}'
    loop.add_request(broken)
    loop.add_request(make_request("fine", None, max_tokens=5, stop_ids=[]))
    while loop.step():
        pass
    final_outputs = {output.id: output for output in outputs if output.finish_reason}
    assert final_outputs["broken"].finish_reason == "error" and "grammar" in final_outputs["broken"].error
    assert final_outputs["fine"].finish_reason == "length"


@pytest.mark.parametrize("budget", [0, 1, 5, 30])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("form", [None, Grammar("json", {"const": [1]})])
def test_thinking_budget_ends_reasoning(budget, inside, form):
    language = runner_and_language()[1]
    tokenizer = language.tokenizer
    closing_ids = tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    thinking = ReasoningLimit("<think>", "</think>", inside, budget, closing_ids)
    request = make_request(
        grammar=form, n=4, seed=1, max_tokens=90, reasoning_limit=thinking, sampling=SamplingOptions(temperature=1.5)
    )
    request.stop_ids = []
    if form is not None:
        request.grammar = language.grammar_compiler.allow_reasoning_before(
            request.grammar, ("<think>", "</think>"), inside
        )
    if not inside:  # a random model would hardly ever write the opening mark
        request.token_ids += tokenizer.encode("<", add_special_tokens=False)
        request.sampling = SamplingOptions(
            temperature=1.0,
            logit_bias={
                token_id: 30.0 - index
                for index, token_id in enumerate(tokenizer.encode("<think>", add_special_tokens=False))
            },
        )
    limits = set()
    answers = serve_all(request)
    for answer in answers.values():
        text = tokenizer.decode(answer.token_ids)
        if not inside and not text.startswith("<think>"):
            continue
        ends = [
            index for index in range(len(answer.token_ids))
            if "</think>" in tokenizer.decode(answer.token_ids[: index + 1])
        ]  # fmt: skip
        assert ends, text
        limits.add(ends[0] + 1)
        if form is not None:
            tail = text.split("</think>", 1)[1]
            assert json.loads(tail) == [1] or answer.finish == "length"
    opening = 0 if inside else len(tokenizer.encode("<think>", add_special_tokens=False)) + 2
    assert all(limit <= opening + budget + 3 + len(closing_ids) for limit in limits)
    assert limits or not inside
    for key, answer in serve_all(request, make_request("other"), step=9, cache=False).items():
        assert key[0] == "other" or answer == answers[key]
