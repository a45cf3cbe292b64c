"""Cohere's chat through a running server: whole and streamed answers, tools, documents, models and errors."""

import json

import pytest
from support.http_client import HELLO_CHAT

HELLO = HELLO_CHAT["messages"]
PLAIN = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 8}


@pytest.fixture
async def server(serve):
    return await serve()


def read_events(answer):
    """Return the events of a stream, and check their names and the mark at its end."""
    assert answer.headers["content-type"] == "text/event-stream"
    *events, done = answer.body.decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    parsed = []
    for event in events:
        name, data = event.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


async def test_cohere_stream_and_whole_answer_have_the_same_content(server):
    for prefix in ("", "/cohere"):
        path = f"{prefix}/v2/chat"
        whole = (await server.post(path, PLAIN | {"logprobs": True})).json
        first, start, *deltas, block_end, last = read_events(await server.post(path, PLAIN | {"stream": True}))
        assert list(whole) == ["id", "message", "finish_reason", "usage", "logprobs"]
        assert (first["type"], start["type"], block_end["type"]) == ("message-start", "content-start", "content-end")
        text = "".join(delta["delta"]["message"]["content"]["text"] for delta in deltas)
        assert whole["message"]["content"] == [{"type": "text", "text": text}] and text
        assert whole["finish_reason"] == last["delta"]["finish_reason"] == "MAX_TOKENS"
        assert whole["usage"]["tokens"] == last["delta"]["usage"]["tokens"]
        assert whole["usage"]["billed_units"]["output_tokens"] == 8
        assert sum(len(item["logprobs"]) for item in whole["logprobs"]) == 8
        assert "".join(item["text"] for item in whole["logprobs"]) == text


async def test_cohere_stream_sends_a_logprob_for_each_token(server):
    events = read_events(await server.post("/v2/chat", PLAIN | {"stream": True, "logprobs": True}))
    items = [event["logprobs"] for event in events if event["type"] == "content-delta"]
    assert sum(len(item["token_ids"]) for item in items) == sum(len(item["logprobs"]) for item in items) == 8


async def test_first_version_streams_the_answer_that_it_gives_as_a_whole(server):
    body = {"message": "Hello", "preamble": "Be kind.", "temperature": 0, "max_tokens": 8}
    for prefix in ("", "/cohere"):
        whole = (await server.post(f"{prefix}/v1/chat", body)).json
        stream = await server.post(f"{prefix}/v1/chat", body | {"stream": True})
        assert stream.headers["content-type"] == "application/stream+json"
        start, *pieces, end = map(json.loads, stream.body.splitlines())
        assert start["generation_id"] == end["response"]["generation_id"] != end["response"]["response_id"]
        assert "".join(piece["text"] for piece in pieces) == end["response"]["text"] == whole["text"] != ""
        assert whole["meta"]["tokens"] == end["response"]["meta"]["tokens"]
        assert whole["finish_reason"] == end["finish_reason"] == "MAX_TOKENS"
        refusal = await server.post(f"{prefix}/v1/chat", body | {"preamble": 5})
        assert refusal.status == 422 and list(refusal.json) == ["id", "message"]


async def test_first_version_drops_the_oldest_turns_of_a_prompt_that_is_too_long(server):
    history = [{"role": "USER", "message": "word " * 300}, {"role": "CHATBOT", "message": "Well."}] * 20
    body = {"message": "Hello", "chat_history": history, "max_tokens": 8}
    refusal = await server.post("/v1/chat", body)
    assert refusal.status == 400 and refusal.json["message"].startswith("too many tokens: ")
    for truncation in ("AUTO", "AUTO_PRESERVE_ORDER"):
        answer = await server.post("/v1/chat", body | {"prompt_truncation": truncation})
        assert answer.status == 200 and len(answer.json["chat_history"]) == 42


async def test_cohere_errors_have_an_id_and_a_message(server):
    for prefix in ("", "/cohere"):
        for body, status, part in (
            (PLAIN | {"model": "none"}, 404, "model 'none' not found, make sure the correct model ID was used"),
            (PLAIN | {"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "too many tokens: "),
            (PLAIN | {"temperature": "hot"}, 422, "invalid type: parameter 'temperature' is of type string"),
            (PLAIN | {"documents": [{}]}, 400, "required 'documents[0].data' param"),
            (b"{", 400, "invalid json syntax: "),
        ):
            answer = await server.post(f"{prefix}/v2/chat", body)
            assert (answer.status, list(answer.json)) == (status, ["id", "message"])
            assert part in answer.json["message"]


async def test_cohere_refuses_a_schema_that_no_answer_can_follow_by_its_member(server):
    form = {"type": "object", "properties": {"a": {"$ref": "https://example.com"}}, "required": ["a"]}
    answer = await server.post("/v2/chat", PLAIN | {"response_format": {"type": "json_object", "json_schema": form}})
    assert answer.status == 400 and "response_format.json_schema" in answer.json["message"]


async def test_cohere_lists_models(server):
    models = (await server.get("/cohere/v1/models")).json["models"]
    assert [(model["name"], model["endpoints"]) for model in models] == [("tiny", ["chat", "embed", "rerank"])]
    for path, member in (("embed", {"texts": ["a"]}), ("rerank", {"query": "a", "documents": ["b"]})):
        assert (await server.post(f"/cohere/v2/{path}", {"model": "tiny"} | member)).status == 200
    assert (await server.get("/cohere/v1/models/tiny")).json == models[0]
    answer = await server.get("/cohere/v1/models/none")
    assert (answer.status, list(answer.json)) == (404, ["id", "message"])


async def test_cohere_renders_the_tokens_of_a_conversation(server):
    messages = [{"role": "user", "content": "Say hello."}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0.5}
    wanted = (await server.post("/vllm/v1/chat/completions/render", chat | {"top_p": 0.9})).json
    rendered = (await server.post("/cohere/v2/chat/render", chat | {"p": 0.9})).json
    assert rendered["request_id"].startswith("chatcmpl-") and rendered["stream_options"] is None
    assert rendered | {"request_id": wanted["request_id"]} == wanted
    streamed = (await server.post("/cohere/v2/chat/render", chat | {"stream": True})).json
    assert streamed["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
    answer = (await server.post("/vllm/inference/v1/generate", rendered)).json
    assert answer["usage"]["prompt_tokens"] == len(rendered["token_ids"])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for members, part in (
        ({"model": None}, "a model parameter is required"),
        ({"tools": tools, "tool_choice": "REQUIRED"}, "tool_choice"),
        ({"max_tokens": -1}, "max_tokens"),
    ):
        refused = await server.post("/cohere/v2/chat/render", chat | members)
        assert refused.status == 400 and part in refused.json["message"] and "error" not in refused.json
    await server.wait_until_idle()
