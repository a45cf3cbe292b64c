"""The memory of one answer is bounded: log-probabilities of many tokens, with many alternatives, of many choices."""

import pytest
from support.http_client import HELLO_CHAT

from parley.serving import logprob_limits

SCORED_CHAT = {**HELLO_CHAT, "logprobs": True, "top_logprobs": 9, "ignore_eos": True}


@pytest.fixture
def max_logprobs(monkeypatch):
    monkeypatch.setattr(logprob_limits, "MAX_ANSWER_LOGPROBS", 1000)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {**SCORED_CHAT, "max_tokens": 101}, "top_logprobs"),
        ("/v1/chat/completions", {**SCORED_CHAT, "max_tokens": 51, "n": 2}, "top_logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": 9, "max_tokens": 101}, "logprobs"),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 9, "max_tokens": 51}, "logprobs"),
        ("/v1/completions", {"prompt": "ab" * 200, "prompt_logprobs": 9, "max_tokens": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "ab" * 200, "prompt_logprobs": 9, "max_tokens": 1, "stream": True}, ""),
        ("/vllm/v1/completions", {"prompt": "a", "logprobs": 9, "max_tokens": 101}, ""),
    ],
)
async def test_refuses_an_answer_with_too_many_logprobs(serve, max_logprobs, path, body, field):
    server = await serve()
    answer = await server.post(path, {"model": "tiny", **body})
    assert answer.status == 400
    assert "at most 100 tokens in one answer" in answer.error["message"]
    if field == "prompt_logprobs":
        assert answer.error["param"] == field
    assert await server.control()


async def test_answer_without_a_length_ends_where_its_logprobs_do(serve, max_logprobs):
    server = await serve(reply=lambda work, index: [70] * work.max_tokens)
    for choices in (1, 2):
        answer = await server.post("/v1/chat/completions", {**SCORED_CHAT, "max_tokens": None, "n": choices})
        (first, *_) = answer.json["choices"]
        assert (len(first["logprobs"]["content"]), first["finish_reason"]) == (100 // choices, "length")


async def test_stream_has_as_many_logprobs_as_tokens(serve, max_logprobs):
    server = await serve(reply=lambda work, index: [70] * work.max_tokens)
    answer = await server.post("/v1/chat/completions", {**SCORED_CHAT, "max_tokens": 150, "stream": True})
    scored = [
        choice["logprobs"]["content"]
        for event in answer.events
        for choice in event["choices"]
        if choice.get("logprobs")
    ]
    assert sum(map(len, scored)) == 150
