"""Mistral's members and routes at OpenAI's root: what they mean, and what the strict form has not."""

import json
from dataclasses import replace
from typing import Any

import pytest

from parley.dialects import openai
from parley.dialects.facts import ModelCard
from parley.dialects.openai import mistral
from parley.dialects.openai.chat import read_chat_request, read_strict_chat_request
from parley.dialects.request_context import RequestContext
from parley.errors import BadRequest
from parley.types import ChoiceDelta, ChoiceDone, PromptVector, TextPrompt, ToolCallDelta, Usage

CONTEXT = RequestContext("0f", 1, "fp")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
FIM = {"model": "m", "prompt": "def f(", "suffix": "return"}


def read_chat(**members: Any) -> Any:
    return read_chat_request(json.dumps(CHAT | members).encode(), CONTEXT).request


def test_chat_members_mean_what_openais_do():
    assert read_chat(tools=[TOOL], tool_choice="any").prompts[0].tool_choice == "required"
    assert read_chat(random_seed=7).sampling.seed == 7
    assert read_chat(random_seed=7, seed=8).sampling.seed == 8
    turns = [*CHAT["messages"], {"role": "assistant", "content": "b", "prefix": True}]
    assert read_chat(messages=turns).prompts[0].continue_final
    turns[-1]["prefix"] = False
    assert not read_chat(messages=turns).prompts[0].continue_final
    for members, field in (
        ({"tool_choice": "any"}, "tool_choice"),
        ({"random_seed": "a"}, "random_seed"),
        ({"random_seed": -1}, "random_seed"),
        ({"messages": [{"role": "assistant", "content": "b", "prefix": 1}]}, "messages[0].prefix"),
        ({"messages": [{"role": "user", "content": "b", "prefix": True}]}, "continue_final_message"),
    ):
        with pytest.raises(BadRequest) as caught:
            read_chat(**members)
        assert caught.value.field == field
    with pytest.raises(BadRequest):
        read_strict_chat_request(json.dumps(CHAT | {"tools": [TOOL], "tool_choice": "any"}).encode(), CONTEXT)


@pytest.mark.parametrize("agent", [b"mistral-client-python/3.7.0", b"openai"])
def test_streamed_calls_are_whole_for_the_sdk(agent: bytes):
    def call(index: int, *pieces: str) -> list[Any]:
        first = ToolCallDelta(index, f"call_{index}", "f", pieces[0])
        deltas = (first, *(ToolCallDelta(index, arguments=piece) for piece in pieces[1:]))
        return [ChoiceDelta(0, "", "tool", tool_call=delta) for delta in deltas]

    context = replace(CONTEXT, headers={b"user-agent": agent})
    body = json.dumps(CHAT | {"stream": True, "tools": [TOOL]}).encode()
    for read, is_strict in ((read_chat_request, False), (read_strict_chat_request, True)):
        reply = read(body, context)
        reply.request.model = "m"
        events = [
            ChoiceDelta(0, "Hm."),
            *call(0, "", "{", "}"),
            *call(1, '{"a":', "1}"),
            ChoiceDone(0, "tool", Usage(5, 9)),
        ]
        data = b"".join(reply.render_chunk([event]) for event in events)
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in data.split(b"\n\n") if line]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        if is_strict or agent == b"openai":
            assert len(calls) == 5 and "name" not in calls[1]["function"]
        else:
            assert [(piece["id"], piece["function"]) for piece in calls] == [
                ("call_0", {"name": "f", "arguments": "{}"}), ("call_1", {"name": "f", "arguments": '{"a":1}'}),
            ]  # fmt: skip
        assert deltas[1] == {"content": "Hm."} and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def read_fim(**members: Any) -> mistral.FimReply:
    return mistral.read_fim_request(json.dumps(FIM | members).encode(), CONTEXT)


def test_infilling_has_the_form_of_a_chat():
    reply = read_fim(random_seed=3, max_tokens=4)
    assert reply.request.prompts == [TextPrompt("def f(", suffix="return")]
    assert (reply.request.sampling.seed, reply.request.stop_conditions.max_tokens) == (3, 4)
    assert read_fim().request.stop_conditions.max_tokens is None
    reply.add_events([ChoiceDelta(0, "x"), ChoiceDone(0, "length", Usage(5, 1))])
    answer = json.loads(reply.render_body(Usage(5, 1)))
    message = {"role": "assistant", "content": "x", "tool_calls": None}
    assert answer["choices"] == [{"index": 0, "message": message, "finish_reason": "length"}]
    assert (answer["object"], answer["usage"]["total_tokens"]) == ("chat.completion", 6)
    stream = read_fim(stream=True)
    chunks = [
        json.loads(line.removeprefix(b"data: "))
        for line in stream.render_chunk([ChoiceDelta(0, "x"), ChoiceDone(0, "stop", Usage(5, 1))]).split(b"\n\n")[:-1]
    ]
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["x", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    with pytest.raises(BadRequest) as caught:
        mistral.read_fim_request(b'{"suffix":"a"}', CONTEXT)
    assert caught.value.field == "prompt"
    with pytest.raises(BadRequest) as caught:
        mistral.read_fim_request(json.dumps(FIM).encode(), replace(CONTEXT, abilities=frozenset()))
    assert caught.value.field == "suffix"


def test_vectors_have_an_id_and_models_a_type():
    reply = mistral.read_mistral_embedding(b'{"model":"m","input":"a"}', CONTEXT)
    reply.add_events([PromptVector(0, b"\0\0\0\0")])
    assert json.loads(reply.render_body(Usage(1, 0)))["id"] == "embd-0f"
    card = json.loads(mistral.write_mistral_model(ModelCard("m", 1, 64, abilities=frozenset({"insert"}))))
    assert (card["type"], card["capabilities"]["completion_fim"]) == ("base", True)
    assert json.loads(mistral.write_mistral_models([ModelCard("m", 1, 64)]))["data"][0]["id"] == "m"
    strict_paths = {route.path for route in openai.STRICT.routes}
    assert "/v1/fim/completions" not in strict_paths and "/v1/embeddings" in strict_paths
