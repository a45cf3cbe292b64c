"""Anthropic's API through a running server: paths shared with other APIs, keys, headers, errors and overflow."""

import json
import re

import pytest
from support.http_client import Answer, RunningServer

VERSION = {"anthropic-version": "2023-06-01"}
TALK = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}


async def post(server: RunningServer, path: str, body: object, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await server.call("POST", path, data, {"content-type": "application/json"} | VERSION | headers)


@pytest.mark.parametrize(
    ("prefix", "version"), [("", "2026-10-21"), ("/anthropic", "2023-06-01"), ("/anthropic", "2026-10-21")]
)
async def test_anthropic_answers_at_the_root_and_below_its_prefix(serve, prefix, version):
    server = await serve(api_keys=("key",))
    for headers in ({"x-api-key": "key"}, {"authorization": "Bearer key"},
                    {"authorization": "Bearer other", "x-api-key": "key"}):  # fmt: skip
        headers |= {"anthropic-version": version, "anthropic-beta": "context-1m-2025-08-07,unknown-beta"}
        answer = await post(server, f"{prefix}/v1/messages?beta=true", TALK, **headers)
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["output_tokens"] == 4 and answer.json["stop_reason"] == "max_tokens"
        assert re.fullmatch("req_[0-9a-f]{32}", answer.headers["request-id"])
        counted = await post(
            server, f"{prefix}/v1/messages/count_tokens", {k: TALK[k] for k in ("model", "messages")}, **headers
        )
        assert counted.json == {"input_tokens": answer.json["usage"]["input_tokens"]}
    answer = await post(server, f"{prefix}/v1/messages", TALK, **{"x-api-key": "wrong"})
    assert (answer.status, answer.error["type"]) == (401, "authentication_error")
    assert answer.json["request_id"] == answer.headers["request-id"]


async def test_anthropic_streams_named_events_until_message_stop(serve):
    server = await serve()
    answer = await post(server, "/v1/messages", TALK | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = answer.body.decode().removesuffix("\n\n").split("\n\n")
    names = [frame.partition("\n")[0].removeprefix("event: ") for frame in frames]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]


@pytest.mark.parametrize("path", ["/v1/messages", "/anthropic/v1/messages", "/ollama/v1/messages"])
async def test_a_thread_is_refused_in_the_form_after_which_clients_go_on_without_one(serve, path):
    server = await serve()
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_01"}):
        answer = await post(server, path, TALK | {"thread": thread, "stream": True})
        assert answer.status == 400 and answer.error == {
            "type": "invalid_request_error",
            "message": "thread: not supported by this server; send the whole conversation",
            "details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        }
    assert "details" not in (await post(server, path, TALK | {"container": "a"})).error


async def test_models_have_the_form_of_the_client_that_asks(serve):
    server = await serve()
    for path in ("/v1/models", "/v1/models/tiny"):
        plain = (await server.get(path)).json
        versioned = (await server.call("GET", path, headers=VERSION)).json
        assert "object" in plain and "object" not in versioned
    assert (await server.get("/anthropic/v1/models")).json["data"][0]["type"] == "model"
    unknown = await server.call("GET", "/v1/models/x", headers=VERSION)
    assert (unknown.status, unknown.error) == (404, {"type": "not_found_error", "message": "model: x"})


async def test_anthropic_words_the_refusals_that_programs_read(serve):
    server = await serve()
    long_turns = [{"role": "user", "content": "abc " * 9000}]
    overflow = await post(server, "/v1/messages", TALK | {"messages": long_turns})
    assert overflow.status == 400
    match = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", overflow.error["message"])
    assert match is not None and int(match[1]) > int(match[2]) == 4095
    counted = await post(server, "/v1/messages/count_tokens", {"model": "tiny", "messages": long_turns})
    assert counted.json["input_tokens"] == int(match[1])
    for path, body, status, sentence in (
        ("/v1/messages", TALK | {"model": "x"}, 404, "model: x"),
        ("/v1/messages", b"{", 400, "The body could not be parsed as JSON: Input data was truncated."),
        ("/v1/v1/messages", TALK, 404, "Not found. The base URL of this API's clients ends without /v1."),
        ("/anthropic/v1/complete", {}, 404, "Unknown request URL"),
    ):
        answer = await post(server, path, body)
        assert answer.status == status and answer.error["message"].startswith(sentence), answer.body


async def test_anthropic_cuts_the_answer_to_the_room_in_the_context(serve):
    server = await serve(reply=lambda work, index: [70] * work.max_tokens)
    answer = await post(server, "/v1/messages", TALK | {"max_tokens": 32000})
    usage = answer.json["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == 4096
    assert answer.json["stop_reason"] == "model_context_window_exceeded"


async def test_a_request_for_a_summary_has_the_limits_of_its_prompt(serve):
    server = await serve()
    body = TALK | {"messages": [{"role": "user", "content": "many words " * 40_000}]}
    plain = await post(server, "/v1/messages", body)
    summary = await post(server, "/v1/messages", body | {"compaction": {"type": "summarize"}})
    assert summary.status == plain.status == 400
    # Tokens are not counted to the end of a text that is far too long.
    assert summary.error["message"] == plain.error["message"] != ""


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences_end_answers_but_no_summaries(serve, stream):
    server = await serve(reply=lambda work, index: [70, 71, 72])
    whole = (await server.post("/detokenize", {"tokens": [70, 71, 72]})).json["prompt"]
    edit = {"type": "compact_20260112", "pause_after_compaction": True, "trigger": {"type": "input_tokens", "value": 1}}
    body = TALK | {"max_tokens": 9, "stop_sequences": [whole[1]], "stream": stream}
    answer = await post(server, "/v1/messages", body)
    assert b'"stop_reason":"stop_sequence"' in answer.body and whole.encode() not in answer.body
    summary = await post(server, "/v1/messages", body | {"context_management": {"edits": [edit]}})
    assert b'"stop_reason":"compaction"' in summary.body and b'"content":"%b"' % whole.encode() in summary.body


def tool_talk(uses: int, words: int = 30) -> list[dict]:
    """Return a conversation with this many calls and their results."""
    turns: list[dict] = [{"role": "user", "content": "Go"}]
    for number in range(uses):
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "f", "input": {"a": "long " * words}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "word " * words}
        turns += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return turns


@pytest.mark.parametrize("stream", [False, True])
async def test_old_tool_results_leave_the_context(serve, stream):
    prompts: list[list[int]] = []
    server = await serve(reply=lambda work, index: prompts.append(work.token_ids) or [70])
    body = {"model": "tiny", "tools": [{"name": "f", "input_schema": {}}]}
    most = (await post(server, "/v1/messages/count_tokens", body | {"messages": tool_talk(2)})).json["input_tokens"]
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": most},
        "keep": {"type": "tool_uses", "value": 1},
        "clear_tool_inputs": True,
    }
    for uses, cleared in ((2, 0), (4, 3), (60, 59)):  # the last conversation is too long for the model
        body["messages"] = tool_talk(uses)
        managed = body | {"context_management": {"edits": [edit]}}
        plain_count = (await post(server, "/v1/messages/count_tokens", body)).json["input_tokens"]
        count = (await post(server, "/v1/messages/count_tokens", managed)).json
        assert count["context_management"] == {"original_input_tokens": plain_count}
        answer = await post(server, "/v1/messages", managed | {"max_tokens": 4, "stream": stream})
        assert answer.status == 200, answer.body
        frames = answer.body.decode().split("\n\n")
        delta = (
            next(f for f in frames if f.startswith("event: message_delta")).split("data: ")[1]
            if stream
            else answer.body
        )
        end = json.loads(delta)
        assert end["usage"]["input_tokens"] == count["input_tokens"] == len(prompts[-1])
        applied = {
            "type": "clear_tool_uses_20250919",
            "cleared_tool_uses": cleared,
            "cleared_input_tokens": plain_count - count["input_tokens"],
        }
        assert end["context_management"] == {"applied_edits": [applied] if cleared else []}
        prompt = (await server.post("/detokenize", {"tokens": prompts[-1]})).json["prompt"]
        assert prompt.count("Old tool result cleared") == cleared
        assert prompt.count("word " * 30) == uses - cleared
    refused = await post(server, "/v1/messages", body | {"max_tokens": 4})
    assert refused.error["message"].startswith("prompt is too long")
