"""Requests that are summarized and answered in one: both parts, their limits, and every way in which they end."""

import asyncio
import json
import re
from typing import Any

import pytest
from support.http_client import Answer, RunningServer

from parley.dialects.summary_request import SUMMARY_HEADING
from parley.types import EngineRequest

SUMMARY, ANSWER = [70, 71, 72], [80, 81]
EDIT = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50}}
TALK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 9,
    "system": "Be kind.",
    "messages": [{"role": "user", "content": "apple " * 60}],
    "context_management": {"edits": [EDIT]},
}
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "instructions": "Be kind.",
    "input": "apple " * 600,
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
}


class TwoParts:
    """Answers questions for a summary with one text and all others with another. ``asked``: all engine requests.
    ``held_server``: its engine waits when it has got the first answer's request."""

    def __init__(self, summary: list[int] | None = None) -> None:
        self.summary = SUMMARY if summary is None else summary
        self.asked: list[EngineRequest] = []
        self.held_server: RunningServer | None = None

    def reply(self, work: EngineRequest, index: int) -> list[int]:
        is_summary = len(self.asked) % 2 == 0
        self.asked.append(work)
        if self.held_server is not None and len(self.asked) == 2:
            self.held_server.engine.step_gate.clear()
        return self.summary if is_summary else ANSWER


async def text_of(server: RunningServer, tokens: list[int]) -> str:
    return (await server.post("/detokenize", {"tokens": tokens})).json["prompt"]


def events_of(answer: Answer) -> list[dict[str, Any]]:
    data = [line for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in data]


def message_of(answer: Answer, *, stream: bool) -> dict[str, Any]:
    """Return the message that an answer is, or that its events make."""
    if not stream:
        return answer.json
    message: dict[str, Any] = {}
    for event in events_of(answer):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                delta, block = event["delta"], message["content"][-1]
                name = "content" if delta["type"] == "compaction_delta" else "text"
                block[name] = (block[name] or "") + delta[name] if delta[name] is not None else None
            case "message_delta":
                message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_have_a_summary_and_the_answer_to_it(serve, stream):
    parts = TwoParts()
    server = await serve(reply=parts.reply)
    summary, text = await text_of(server, SUMMARY), await text_of(server, ANSWER)
    # A stop sequence, a format and tools concern the answer alone.
    body = TALK | {"stop_sequences": [summary[-1]], "stream": stream}
    message = message_of(await server.post("/v1/messages", body), stream=stream)
    block, answer = message["content"]
    assert (block["type"], block["content"], answer) == ("compaction", summary, {"type": "text", "text": text})
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("end_turn", len(ANSWER))
    asking, answering = parts.asked
    question, prompt = await text_of(server, asking.token_ids), await text_of(server, answering.token_ids)
    assert "apple" in question and "Summarize the conversation" in question and "Be kind." in question
    assert "apple" not in prompt and f"{SUMMARY_HEADING}\n{summary}" in prompt and "Be kind." in prompt
    counts = [(part["type"], part["input_tokens"] + part["cache_read_input_tokens"], part["output_tokens"])
              for part in message["usage"]["iterations"]]  # fmt: skip
    assert counts == [
        ("compaction", len(asking.token_ids), len(SUMMARY)), ("message", len(answering.token_ids), len(ANSWER)),
    ]  # fmt: skip
    # The next turn brings the block along, and begins with the tokens of the last prompt.
    turns = [*TALK["messages"], {"role": "assistant", "content": message["content"]}, {"role": "user", "content": "b"}]
    del body["context_management"]
    assert (await server.post("/v1/messages", body | {"messages": turns})).status == 200
    assert parts.asked[2].token_ids[: len(answering.token_ids)] == answering.token_ids
    assert not server.model.used_slots


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("summary", [[], [70] * 5000], ids=["empty", "cut off"])
async def test_a_summary_that_failed_replaces_nothing(serve, stream, summary):
    parts = TwoParts(summary)
    server = await serve(reply=parts.reply)
    message = message_of(await server.post("/v1/messages", TALK | {"stream": stream}), stream=stream)
    assert message["content"][0] == {"type": "compaction", "content": None}
    assert message["content"][1] == {"type": "text", "text": await text_of(server, ANSWER)}
    assert "apple" in await text_of(server, parts.asked[1].token_ids)
    response = await server.post("/v1/responses", RESPONSE | {"stream": stream})
    shown = events_of(response)[-1]["response"] if stream else response.json
    assert [item["type"] for item in shown["output"]] == ["message"]
    assert "apple" in await text_of(server, parts.asked[3].token_ids)


async def test_a_conversation_below_the_threshold_has_no_summary(serve):
    parts = TwoParts()
    server = await serve(reply=parts.reply)
    for path, body in (
        ("/v1/messages", TALK | {"messages": [{"role": "user", "content": "Hello"}]}),
        # A summary would be no shorter than this.
        ("/v1/messages", TALK | {"messages": [{"role": "user", "content": "Hello"}], "system": "apple " * 60}),
        ("/v1/responses", RESPONSE | {"input": "Hello"}),
        ("/v1/responses", RESPONSE | {"context_management": [{"type": "compaction"}]}),  # of nearly the whole context
        ("/v1/responses", RESPONSE | {"generate": False}),
    ):
        answer = await server.post(path, body)
        assert answer.status == 200 and b"compaction" not in answer.body, answer.body
    assert len(parts.asked) == 5


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_responses_have_a_summary_and_the_answer_to_it(serve, stream, background):
    parts = TwoParts()
    server = await serve(reply=parts.reply)
    answer = await server.post("/v1/responses", RESPONSE | {"stream": stream, "background": background})
    if stream:
        events = events_of(answer)
        response = events[-1]["response"]
        kinds = [event["type"] for event in events if "delta" not in event["type"]]
        assert kinds[3 if background else 2 :] == [
            "response.output_item.added", "response.compaction.compacting", "response.output_item.done",
            "response.output_item.added", "response.content_part.added", "response.output_text.done",
            "response.content_part.done", "response.output_item.done", "response.completed",
        ]  # fmt: skip
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["output_index"] for event in events if "output_index" in event][:3] == [0, 0, 0]
    else:
        response = answer.json
        while response["status"] in ("queued", "in_progress"):
            response = (await server.get(f"/v1/responses/{response['id']}")).json
    assert [item["type"] for item in response["output"]] == ["compaction", "message"]
    assert response["output"][1]["content"][0]["text"] == await text_of(server, ANSWER)
    asking, answering = parts.asked
    assert response["usage"]["input_tokens"] == len(asking.token_ids) + len(answering.token_ids)
    assert response["usage"]["output_tokens"] == len(SUMMARY) + len(ANSWER)
    following = {"model": "tiny", "previous_response_id": response["id"], "input": "b", "instructions": "Be kind."}
    assert (await server.post("/v1/responses", following)).status == 200
    assert parts.asked[2].token_ids[: len(answering.token_ids)] == answering.token_ids


async def test_the_answer_keeps_its_format_and_the_summary_has_none(serve):
    parts = TwoParts()
    server = await serve(reply=parts.reply)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "schema": schema}}
    assert (await server.post("/v1/messages", TALK | {"output_config": form})).status == 200
    asking, answering = parts.asked
    assert not asking.grammar and answering.grammar
    assert asking.max_tokens > 9 == answering.max_tokens


async def test_a_request_of_two_parts_counts_once(serve):
    server = await serve(reply=TwoParts().reply)
    assert (await server.post("/v1/messages", TALK)).status == 200
    page = (await server.get("/metrics")).body.decode()
    ended = [line for line in page.splitlines() if line.startswith("vllm:request_success_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in ended) == 1


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("ending", ["stop", "leave", "lose"])
async def test_each_part_can_be_stopped_left_or_lost(serve, part, ending):
    parts = TwoParts([70] * 20)
    server = await serve(reply=parts.reply)
    if part == 1:
        server.engine.step_gate.clear()
    else:
        parts.held_server = server
    body = RESPONSE | {"stream": True}
    task = asyncio.create_task(server.post("/v1/responses", body))
    await server.until(lambda: len(parts.asked) == 2 if part == 2 else bool(server.model.open_requests))
    if ending == "leave":
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif ending == "lose":
        server.engine.crash_engine()
        answer = await task
        assert answer.status == 503 or events_of(answer)[-1]["type"] == "response.failed"
    else:
        (generation,) = server.model.open_requests
        generation.finish_early()
        response = events_of(await task)[-1]["response"]
        assert response["status"] == "incomplete"
        page = (await server.get("/metrics")).body.decode()
        assert re.search(r'^vllm:request_success_total\{.*finished_reason="abort"\} 1$', page, re.MULTILINE)
        assert [item["type"] for item in response["output"]][: part - 1] == ["compaction"][: part - 1]
    server.engine.step_gate.set()
    await server.until(lambda: not server.model.used_slots and not server.model.open_requests)


async def test_a_server_that_is_about_to_stop_still_answers_after_a_summary(serve):
    parts = TwoParts()
    server = await serve(reply=parts.reply)
    server.engine.step_gate.clear()
    task = asyncio.create_task(server.post("/v1/messages", TALK))
    await server.until(lambda: parts.asked)
    server.model.ending_reason = "The server is stopping."
    server.engine.step_gate.set()
    answer = await task
    assert answer.status == 200 and [block["type"] for block in answer.json["content"]] == ["compaction", "text"]
