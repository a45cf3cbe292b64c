"""Beam search through the API: stop strings, grammars, streams and logprobs; refused where it has no meaning."""

import asyncio
import json

import pytest
from support import tiny_models
from support.loaded_models import completion_request, loaded_model

from parley import LLM, ParleyError
from parley.serving.generation import open_generation
from parley.types import ChoiceDelta, ChoiceDone

BEAM_OPTIONS = {"use_beam_search": True, "best_of": 3, "n": 2, "max_tokens": 12}
PROMPT = "the quick brown"


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny_models.model_folder("qwen3")), threads=1, kv_memory=8 << 20, max_batch=8) as llm:
        yield llm


def test_beam_search_ignores_temperature_and_seed(llm):
    first = llm.generate(PROMPT, **BEAM_OPTIONS)
    assert first == llm.generate(PROMPT, temperature=1.7, seed=5, **BEAM_OPTIONS)
    assert len({c.text for c in first.completions}) == 2
    assert first.usage.completion_tokens == 24 and first.usage.prompt_tokens == 3


def test_best_beam_is_at_least_as_likely_as_greedy(llm):
    def total_logprob(completion):
        return sum(token.logprob for token in completion.tokens)

    greedy = llm.generate(PROMPT, temperature=0, max_tokens=12, logprobs=0).completions[0]
    beams = llm.generate(PROMPT, logprobs=0, **BEAM_OPTIONS | {"best_of": 8, "ignore_eos": True}).completions
    assert total_logprob(beams[0]) >= max(total_logprob(beams[1]), total_logprob(greedy))
    single_beam = llm.generate(PROMPT, use_beam_search=True, max_tokens=12, logprobs=0, repetition_penalty=1.2)
    assert single_beam == llm.generate(PROMPT, temperature=0, max_tokens=12, logprobs=0, repetition_penalty=1.2)


def test_stop_string_cuts_beam_search_result(llm):
    whole = llm.generate(PROMPT, logprobs=0, **BEAM_OPTIONS).completions[0]
    stop = whole.text[5]
    cut = llm.generate(PROMPT, stop=stop, logprobs=0, **BEAM_OPTIONS).completions[0]
    assert cut.text == whole.text[: whole.text.index(stop)] and (cut.finish, cut.stop) == ("stop", stop)
    assert cut.tokens == whole.tokens[: len(cut.tokens)]


async def test_beam_search_streams_results_at_its_end(llm):
    body = {"prompt": [PROMPT, "fox"], "stream": True, "logprobs": 1, "echo": True, **BEAM_OPTIONS}
    async with loaded_model(max_batch=8) as model:
        events = []
        async with open_generation(model, completion_request(model, body)) as generation:
            assert model.used_slots == 6
            while batch := await generation.next_events():
                events += batch
        assert model.used_slots == 0
    assert sum(isinstance(event, ChoiceDone) for event in events) == 4
    answers = await llm.agenerate(body["prompt"], **BEAM_OPTIONS)
    for index, single in enumerate(completion for answer in answers for completion in answer.completions):
        (delta,) = (event for event in events if isinstance(event, ChoiceDelta) and event.index == index)
        assert delta.text == single.text and all(token.top_tokens for token in delta.tokens)


def test_beam_search_results_follow_response_format(llm):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22, 333]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    json_format = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    completions = llm.generate(
        PROMPT, **BEAM_OPTIONS | json_format | {"max_tokens": 60, "n": 3, "best_of": 5}
    ).completions
    for completion in completions:
        assert completion.finish == "stop" and json.loads(completion.text)["a"] in (1, 22, 333)
    assert len({completion.text for completion in completions}) == 3
    choice_format = {"guided_choice": ["fox"], "max_tokens": 20}
    assert [completion.text for completion in llm.generate(PROMPT, **BEAM_OPTIONS | choice_format).completions] == [
        "fox",
        "fox",
    ]


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"top_p": 0.5}, ["top_p", "use_beam_search"]),
        ({"top_k": 5}, ["top_k", "use_beam_search"]),
        ({"min_p": 0.5}, ["min_p", "use_beam_search"]),
        ({"best_of": 9}, ["use_beam_search", "9 beams"]),
        ({"max_tokens": 1500, "best_of": 8}, ["use_beam_search", "KV cache"]),
    ],
    ids=str,
)
def test_beam_search_refuses_invalid_options_by_name(llm, members, named):
    with pytest.raises(ParleyError) as caught:
        llm.generate("a " * 400, **BEAM_OPTIONS | members)
    assert caught.value.status == 400 and all(name in caught.value.message for name in named)
    assert llm.model.used_slots == 0


async def test_stopped_beam_search_returns_best_so_far(llm):
    long = {"use_beam_search": True, "best_of": 4, "n": 2, "max_tokens": 900, "ignore_eos": True}
    async with loaded_model(max_batch=8) as model:
        events = []
        async with open_generation(model, completion_request(model, {"prompt": PROMPT} | long)) as generation:
            while model.engine.stats.steps < 9:
                await asyncio.sleep(0.001)
            generation.finish_early("length")
            while batch := await generation.next_events():
                events += batch
    ended = [event for event in events if isinstance(event, ChoiceDone)]
    assert [event.reason for event in ended] == ["length"] * 2
    length = ended[0].usage.completion_tokens
    whole = (await llm.agenerate(PROMPT, **long | {"max_tokens": length})).completions
    assert length > 5 and [event.text for event in events if isinstance(event, ChoiceDelta)] == [w.text for w in whole]


def test_abandoned_beam_search_frees_its_pages(llm):
    pieces = llm.stream(PROMPT, use_beam_search=True, best_of=4, max_tokens=200, ignore_eos=True)
    assert next(pieces)
    pieces.close()
    llm.generate("x", max_tokens=1)
    assert llm.model.engine.stats.used_pages == 0
