"""vLLM's old ``/generate``: meaning of members, and the exact bytes of answers and stream records."""

import json
from typing import Any

import pytest

from parley.dialects.dialect import Answer, Head
from parley.dialects.vllm import legacy
from parley.dialects.vllm.shared import error
from parley.errors import BadRequest, ContextLength, EngineError
from parley.types import Accepted, Delta, Done, Grammar, Scored, Text, Token, Tokens, Usage

HEAD = Head("0f", 1700000000, "fp_1", context=256)
USAGE = Usage(4, 3)


def read(manner: legacy.Manner = legacy.LENIENT, **members: Any) -> legacy.GenerateReply:
    reply = legacy.read(manner, json.dumps({"prompt": "Hé"} | members).encode(), HEAD)
    assert isinstance(reply, legacy.GenerateReply)
    return reply


def refused(**members: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(**members)
    return caught.value


def test_vllm_generate_minimal_body_means_defaults():
    request = read().request
    assert request.prompts == [Text("Hé")]
    assert (request.n, request.stream, request.stop.max_tokens, request.sampling.temperature) == (1, False, 16, 1.0)
    assert request.want.logprobs is None and not request.want.echo


def test_vllm_generate_members_reach_the_request():
    request = read(
        legacy.STRICT, stream="false", n=2, best_of=2, temperature=7, top_p=0.9, top_k=-1, min_p=0.1, seed=3,
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.1, stop=["a"], stop_token_ids=[7], min_tokens=2,
        include_stop_str_in_output=True, ignore_eos=True, max_tokens=9, logprobs=3, prompt_logprobs=2, detokenize=True,
        skip_special_tokens=False, spaces_between_special_tokens=True, truncate_prompt_tokens=5, use_beam_search=False,
        length_penalty=1.0, early_stopping=False, logit_bias={"5": 1},
    ).request  # fmt: skip
    assert read(cache_salt="s").request.salt == "s"
    sampling, stop = request.sampling, request.stop
    assert (request.n, request.stream, request.truncate) == (2, True, 5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (7, 0.9, 0, 0.1, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2, 2, 1.1)
    assert sampling.logit_bias == {5: 1.0}
    assert (stop.strings, stop.ids, stop.max_tokens, stop.min_tokens) == (["a"], [7], 9, 2)
    assert stop.include and stop.ignore_eos
    assert not request.want.skip_special and request.want.logprobs is None


def test_vllm_generate_reads_prompts_as_objects():
    assert read(prompt={"prompt": "a"}).request.prompts == [Text("a")]
    reply = read(prompt={"prompt_token_ids": [5, 6]}, n=2)
    assert reply.request.prompts == [Tokens([5, 6])] and reply.request.want.echo
    reply.add([Accepted(0, [5, 6]), Scored(0, [], "xy"), Delta(1, "b"), Delta(0, "a")])
    assert json.loads(reply.body(USAGE)) == {"text": ["xya", "xyb"]}
    assert refused(prompt=None).status == refused(prompt=5).status == refused(prompt={}).status == 400


def test_vllm_generate_constraints_reach_the_request():
    for name in ("guided_decoding", "structured_outputs"):
        grammar = Grammar("json", {"type": "null"}, "", field=f"{name}.json")
        wish = {name: {"json": '{"type":"null"}', "disable_any_whitespace": True}}
        assert read(**wish).request.grammar == read(legacy.STRICT, **wish).request.grammar == grammar
    assert read(guided_decoding={}).request.grammar is None
    error = refused(guided_decoding={"regex": "a"}, structured_outputs={"regex": "a"})
    assert "guided_decoding" in error.message and "structured_outputs" in error.message


@pytest.mark.parametrize(
    "members",
    [{"logits_processors": ["x"]}, {"detokenize": False}],
    ids=str,
)  # fmt: skip
def test_vllm_generate_refuses_unavailable_members(members):
    assert refused(**members).field in members
    assert legacy.read(legacy.STRICT, json.dumps({"prompt": "a"} | members).encode(), HEAD) == legacy.MISTAKE


@pytest.mark.parametrize(
    "members",
    [{"temperature": -1}, {"top_p": 1.5}, {"n": 0}, {"best_of": 1, "n": 2}, {"max_tokens": 0}, {"max_tokens": "x"},
     {"use_beam_search": True, "temperature": 0}, {"use_beam_search": True, "best_of": 2}, {"stop": [""]}],
    ids=str,
)  # fmt: skip
def test_vllm_generate_refuses_wrong_members(members):
    answer = error(refused(**members))
    assert answer.status == 400
    assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}
    assert legacy.read(legacy.STRICT, json.dumps({"prompt": "a"} | members).encode(), HEAD) == legacy.MISTAKE


def test_vllm_generate_strict_answers_500_to_every_mistake():
    mistake = Answer(500, b"Internal Server Error", b"text/plain; charset=utf-8")
    for body in (b"", b"[]", b"{", b"{}", b'{"prompt":"a","frobnicate":1}'):
        assert legacy.read(legacy.STRICT, body, HEAD) == mistake
    assert read(frobnicate=1).request == read().request
    overflow = ContextLength("Too long.")
    assert read(legacy.STRICT).refusal(overflow) == mistake
    assert read(legacy.LENIENT).refusal(overflow) is None
    assert read(legacy.STRICT).refusal(EngineError("x")) is None


def test_vllm_generate_writes_body():
    reply = read(n=2)
    reply.add([Accepted(0, [1]), Delta(0, " ü", tokens=[Token(5, " ü", b"")]), Delta(1, ' "')])
    reply.add([Delta(0, "!"), Done(0, "stop", USAGE), Done(1, "length", USAGE)])
    assert reply.body(USAGE) == '{"text":["Hé ü!","Hé \\""]}'.encode()


@pytest.mark.parametrize(
    ("manner", "end"), [(legacy.LENIENT, b"\n"), (legacy.STRICT, b"\n"), (legacy.OLD, b"\0")], ids=["", "strict", "old"]
)
def test_vllm_generate_writes_stream(manner, end):
    reply = read(manner, n=2, stream=True)
    assert reply.media_type == ""
    assert reply.chunk([Accepted(0, [1])]) == b""
    assert reply.chunk([Delta(0, " a")]) == b'{"text": ["H\\u00e9 a", "H\\u00e9"]}' + end
    assert reply.chunk([Delta(1, " b"), Delta(0, "c")]) == b'{"text": ["H\\u00e9 ac", "H\\u00e9 b"]}' + end
    assert reply.chunk([Done(0, "stop", USAGE), Done(1, "stop", USAGE)]) == (
        b'{"text": ["H\\u00e9 ac", "H\\u00e9 b"]}' + end
    )
    assert reply.end(USAGE) == b""
    with pytest.raises(EngineError):
        reply.fail(EngineError("broken off"))
