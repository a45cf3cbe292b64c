"""vLLM's old ``/generate``: meaning of members, and the exact bytes of answers and stream records."""

import json
from typing import Any

import pytest

from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import legacy
from parley.dialects.vllm.error_answers import vllm_error_answer
from parley.errors import BadRequest, ContextLength, EngineError
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    Grammar,
    PromptAccepted,
    PromptScored,
    TextPrompt,
    TokenInfo,
    TokensPrompt,
    Usage,
)

CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=256)
USAGE = Usage(4, 3)


def read_generate(manner: legacy.DemoVersion = legacy.LENIENT_VERSION, **members: Any) -> legacy.DemoGenerateReply:
    reply = legacy.read_demo_request(manner, json.dumps({"prompt": "Hé"} | members).encode(), CONTEXT)
    assert isinstance(reply, legacy.DemoGenerateReply)
    return reply


def refusal(**members: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_generate(**members)
    return caught.value


def strict_refusal(body: bytes) -> Answer:
    with pytest.raises(BadRequest) as caught:
        legacy.read_demo_request(legacy.STRICT_VERSION, body, CONTEXT)
    return legacy.render_plain_error(caught.value)


def test_vllm_generate_minimal_body_means_defaults():
    request = read_generate().request
    assert request.prompts == [TextPrompt("Hé")]
    assert (request.n, request.stream, request.stop_conditions.max_tokens, request.sampling.temperature) == (
        1,
        False,
        16,
        1.0,
    )
    assert request.output_options.logprobs is None and not request.output_options.echo


def test_vllm_generate_members_reach_the_request():
    request = read_generate(
        legacy.STRICT_VERSION, stream="false", n=2, best_of=2, temperature=7, top_p=0.9, top_k=-1, min_p=0.1, seed=3,
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.1, stop=["a"], stop_token_ids=[7], min_tokens=2,
        include_stop_str_in_output=True, ignore_eos=True, max_tokens=9, logprobs=3, prompt_logprobs=2, detokenize=True,
        skip_special_tokens=False, spaces_between_special_tokens=True, truncate_prompt_tokens=5, use_beam_search=False,
        length_penalty=1.0, early_stopping=False, logit_bias={"5": 1},
    ).request  # fmt: skip
    assert read_generate(cache_salt="s").request.cache_salt == "s"
    sampling, stop = request.sampling, request.stop_conditions
    assert (request.n, request.stream, request.max_prompt_tokens) == (2, True, 5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (7, 0.9, 0, 0.1, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2, 2, 1.1)
    assert sampling.logit_bias == {5: 1.0}
    assert (stop.strings, stop.ids, stop.max_tokens, stop.min_tokens) == (["a"], [7], 9, 2)
    assert stop.include_in_output and stop.ignore_eos
    assert not request.output_options.skip_special and request.output_options.logprobs is None


def test_vllm_generate_reads_prompts_as_objects():
    assert read_generate(prompt={"prompt": "a"}).request.prompts == [TextPrompt("a")]
    reply = read_generate(prompt={"prompt_token_ids": [5, 6]}, n=2)
    assert reply.request.prompts == [TokensPrompt([5, 6])] and reply.request.output_options.echo
    reply.add_events([PromptAccepted(0, [5, 6]), PromptScored(0, [], "xy"), ChoiceDelta(1, "b"), ChoiceDelta(0, "a")])
    assert json.loads(reply.render_body(USAGE)) == {"text": ["xya", "xyb"]}
    assert refusal(prompt=None).status == refusal(prompt=5).status == refusal(prompt={}).status == 400


def test_vllm_generate_constraints_reach_the_request():
    for name in ("guided_decoding", "structured_outputs"):
        grammar = Grammar("json", {"type": "null"}, "", field=f"{name}.json")
        members = {name: {"json": '{"type":"null"}', "disable_any_whitespace": True}}
        assert (
            read_generate(**members).request.grammar
            == read_generate(legacy.STRICT_VERSION, **members).request.grammar
            == grammar
        )
    assert read_generate(guided_decoding={}).request.grammar is None
    error = refusal(guided_decoding={"regex": "a"}, structured_outputs={"regex": "a"})
    assert "guided_decoding" in error.message and "structured_outputs" in error.message


@pytest.mark.parametrize(
    "members",
    [{"logits_processors": ["x"]}, {"detokenize": False}],
    ids=str,
)  # fmt: skip
def test_vllm_generate_refuses_unavailable_members(members):
    assert refusal(**members).field in members
    assert strict_refusal(json.dumps({"prompt": "a"} | members).encode()) == legacy.PLAIN_500


@pytest.mark.parametrize(
    "members",
    [{"temperature": -1}, {"top_p": 1.5}, {"n": 0}, {"best_of": 1, "n": 2}, {"max_tokens": 0}, {"max_tokens": "x"},
     {"use_beam_search": True, "temperature": 0}, {"use_beam_search": True, "best_of": 2}, {"stop": [""]}],
    ids=str,
)  # fmt: skip
def test_vllm_generate_refuses_wrong_members(members):
    answer = vllm_error_answer(refusal(**members))
    assert answer.status == 400
    assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}
    assert strict_refusal(json.dumps({"prompt": "a"} | members).encode()) == legacy.PLAIN_500


def test_vllm_generate_strict_answers_500_to_every_mistake():
    mistake = Answer(500, b"Internal Server Error", b"text/plain; charset=utf-8")
    for body in (b"", b"[]", b"{", b"{}", b'{"prompt":"a","frobnicate":1}'):
        assert strict_refusal(body) == mistake
    assert read_generate(frobnicate=1).request == read_generate().request
    assert legacy.render_plain_error(ContextLength("Too long.")) == mistake
    assert legacy.render_plain_error(EngineError("x")) == vllm_error_answer(EngineError("x"))


def test_vllm_generate_writes_body():
    reply = read_generate(n=2)
    reply.add_events(
        [PromptAccepted(0, [1]), ChoiceDelta(0, " ü", tokens=[TokenInfo(5, " ü", b"")]), ChoiceDelta(1, ' "')]
    )
    reply.add_events([ChoiceDelta(0, "!"), ChoiceDone(0, "stop", USAGE), ChoiceDone(1, "length", USAGE)])
    assert reply.render_body(USAGE) == '{"text":["Hé ü!","Hé \\""]}'.encode()


@pytest.mark.parametrize(
    ("manner", "end"),
    [(legacy.LENIENT_VERSION, b"\n"), (legacy.STRICT_VERSION, b"\n"), (legacy.OLD_VERSION, b"\0")],
    ids=["", "strict", "old"],
)
def test_vllm_generate_writes_stream(manner, end):
    reply = read_generate(manner, n=2, stream=True)
    assert reply.media_type == ""
    assert reply.render_chunk([PromptAccepted(0, [1])]) == b""
    assert reply.render_chunk([ChoiceDelta(0, " a")]) == b'{"text": ["H\\u00e9 a", "H\\u00e9"]}' + end
    assert (
        reply.render_chunk([ChoiceDelta(1, " b"), ChoiceDelta(0, "c")])
        == b'{"text": ["H\\u00e9 ac", "H\\u00e9 b"]}' + end
    )
    assert reply.render_chunk([ChoiceDone(0, "stop", USAGE), ChoiceDone(1, "stop", USAGE)]) == (
        b'{"text": ["H\\u00e9 ac", "H\\u00e9 b"]}' + end
    )
    assert reply.finish_stream(USAGE) == b""
    with pytest.raises(EngineError):
        reply.fail_stream(EngineError("broken off"))
