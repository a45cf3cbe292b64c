"""Anthropic's Messages as vLLM serves them. Bytes are those of vLLM 0.33 for the same answers, but for ids."""

import json
from dataclasses import replace
from typing import Any

import pytest

from parley.dialects.admin_requests import TokenizeResult
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import messages
from parley.errors import (
    ContextLength,
    EngineError,
    NotAllowed,
    NotFound,
    Overloaded,
    ParleyError,
    Unauthorized,
    UnknownModel,
)
from parley.types import ChoiceDelta, ChoiceDone, PromptAccepted, ToolCallDelta, Usage

CONTEXT = RequestContext(
    "0123456789abcdef0123456789abcdef",
    1700000000,
    "fp_1",
    context_length=512,
    headers={b"content-type": b"application/json"},
    abilities=frozenset({"chat", "tools", "thinking"}),
)
USAGE = Usage(prompt_tokens=18, completion_tokens=6, cached_tokens=4)
TOOL = {"name": "get_weather", "description": "weather", "input_schema": {"type": "object", "properties": {}}}
MODEL, ID = b'"model":"m"', b'"id":"chatcmpl-0123456789abcdef"'


def read(context: RequestContext = CONTEXT, **members: Any) -> messages.VllmMessagesReply:
    body = {"model": "m", "max_tokens": 12, "messages": [{"role": "user", "content": "Hi"}]} | members
    return messages.read_vllm_messages(json.dumps({k: v for k, v in body.items() if v is not None}).encode(), context)


def refusal(**members: Any) -> tuple[int, Any]:
    with pytest.raises(ParleyError) as caught:
        read(**members)
    answer = messages.messages_error(caught.value)
    return answer.status, json.loads(answer.body)


def text(value: str) -> ChoiceDelta:
    return ChoiceDelta(0, value, "content")


def reasoning_delta(value: str) -> ChoiceDelta:
    return ChoiceDelta(0, value, "reasoning")


def call(arguments: str, name: str | None = None) -> ChoiceDelta:
    call_id = None if name is None else "call_b714399d7171e1cd"
    return ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, call_id, name, arguments))


def done(reason: Any = "stop", stop: Any = None) -> ChoiceDone:
    return ChoiceDone(0, reason, USAGE, stop)


def answer_body(*events: Any, **members: Any) -> bytes:
    reply = read(**members)
    reply.add_events(events)
    return reply.render_body(USAGE)


def stream_bytes(*events: Any, **members: Any) -> bytes:
    reply = read(stream=True, **members)
    return reply.render_chunk([PromptAccepted(0, list(range(18))), *events]) + reply.finish_stream(USAGE)


# -- answers

WHOLE_END = (
    b'"stop_reason":"%b",%b"usage":{"input_tokens":14,"output_tokens":6,"cache_creation_input_tokens":0,'
    b'"cache_read_input_tokens":4}}'
)
WHOLE_START = b"{" + ID + b',"type":"message","role":"assistant","content":['


def test_vllm_message_has_its_own_bytes():
    start = WHOLE_START + b'{"type":"text","text":"The sky is blue."}],' + MODEL + b","
    assert answer_body(text("The sky is"), text(" blue."), done()) == start + WHOLE_END % (b"end_turn", b"")
    stopped = answer_body(text("The sky is blue."), done(stop="e"), stop_sequences=["e"])
    assert stopped == start + WHOLE_END % (b"stop_sequence", b'"stop_sequence":"e",')
    assert answer_body(text("The sky is blue."), done("length")) == start + WHOLE_END % (b"max_tokens", b"")


def test_vllm_message_ignores_members_that_the_original_does_not_know():
    members: dict[str, Any] = {
        "container": "c", "mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}], "service_tier": "x",
        "thread": {"id": "t"}, "context_management": {"edits": [{"type": "clear_thinking_20251015"}]}, "speed": 5,
        "compaction": 5,
    }  # fmt: skip
    assert read(**members).request == read().request
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    counts = [
        messages.read_vllm_count(json.dumps(request_body).encode(), CONTEXT) for request_body in (body, body | members)
    ]
    assert counts[0].prompt == counts[1].prompt


def test_vllm_message_that_fills_the_context_ends_like_any_other():
    reply = read(max_tokens=500)
    reply.add_events([text("a"), done("length")])
    answer = json.loads(reply.render_body(Usage(prompt_tokens=500, completion_tokens=12)))
    assert answer["stop_reason"] == "max_tokens"


def test_vllm_message_counts_whole_new_pages_of_the_cache():
    for page, created in ((0, 0), (4, 12), (8, 12), (16, 12), (32, 0)):
        reply = read(replace(CONTEXT, page_tokens=page))
        reply.add_events([text("a"), done()])
        usage = json.loads(reply.render_body(USAGE))["usage"]
        assert (usage["cache_creation_input_tokens"], usage["input_tokens"]) == (created, 14 - created)


def test_vllm_message_without_text_has_an_empty_one():
    assert answer_body(done()) == WHOLE_START + b'{"type":"text","text":""}],' + MODEL + b"," + WHOLE_END % (
        b"end_turn",
        b"",
    )


def test_vllm_message_shows_thinking_and_calls():
    answer = json.loads(
        answer_body(reasoning_delta("Hm."), call('{"city": ', "get_weather"), call('"Paris"}'), done("tool"))
    )
    thinking, use = answer["content"]
    assert list(thinking) == ["type", "thinking", "signature"] and thinking["thinking"] == "Hm."
    assert CONTEXT.open_reasoning(thinking["signature"]) == b"Hm."
    called = {"type": "tool_use", "id": "chatcmpl-tool-b714399d7171e1cd", "name": "get_weather"}
    assert use == called | {"input": {"city": "Paris"}} and answer["stop_reason"] == "tool_use"


def test_vllm_message_is_streamed_in_its_own_bytes():
    assert stream_bytes(text("The"), text(" sky"), done()) == (
        b'event: message_start\ndata: {"type":"message_start","message":{' + ID + b',"type":"message",'
        b'"role":"assistant","content":[],"model":"m","stop_reason":null,"stop_sequence":null,'
        b'"usage":{"input_tokens":18,"output_tokens":0}}}\n\n'
        b'event: content_block_start\ndata: {"type":"content_block_start","content_block":{"type":"text","text":""},'
        b'"index":0}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"The"},'
        b'"index":0}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta",'
        b'"text":" sky"},"index":0}\n\n'
        b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn",'
        b'"stop_sequence":null},"usage":{"input_tokens":14,"output_tokens":6,"cache_creation_input_tokens":0,'
        b'"cache_read_input_tokens":4}}\n\n'
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )


def test_vllm_calls_and_thinking_are_streamed_in_its_own_bytes():
    start, _, rest = stream_bytes(
        reasoning_delta("Hm."), call('{"', "get_weather"), call('city":1}'), done("tool"), tools=[TOOL]
    ).partition(b"event: content_block_start")
    assert start.startswith(b"event: message_start")
    signature, _, calls = rest.partition(b'{"type":"signature_delta","signature":"')[2].partition(b'"')
    assert CONTEXT.open_reasoning(signature.decode()) == b"Hm."
    assert rest.startswith(
        b'\ndata: {"type":"content_block_start","content_block":{"type":"thinking","thinking":""},"index":0}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"thinking_delta",'
        b'"thinking":"Hm."},"index":0}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"signature_delta"'
    )
    assert calls.startswith(
        b'},"index":0}\n\n'
        b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        b'event: content_block_start\ndata: {"type":"content_block_start","content_block":{"type":"tool_use",'
        b'"id":"chatcmpl-tool-b714399d7171e1cd","name":"get_weather","input":{}},"index":1}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"input_json_delta",'
        b'"partial_json":"{\\""},"index":1}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"input_json_delta",'
        b'"partial_json":"city\\":1}"},"index":1}\n\n'
        b'event: content_block_stop\ndata: {"type":"content_block_stop","index":1}\n\n'
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"tool_use",'
    )


def test_vllm_stop_sequence_counts_unless_calls_are_complete():
    for arguments, expected in (("{}", ("tool_use", None)), ('{"a', ("stop_sequence", "e"))):
        written = stream_bytes(call(arguments, "get_weather"), done(stop="e"), tools=[TOOL], stop_sequences=["e"])
        (event,) = [line for line in written.split(b"\n") if line.startswith(b'data: {"type":"message_delta"')]
        delta = json.loads(event.removeprefix(b"data: "))["delta"]
        assert (delta["stop_reason"], delta["stop_sequence"]) == expected
    whole = json.loads(answer_body(call("{}", "get_weather"), done(stop="e"), tools=[TOOL], stop_sequences=["e"]))
    assert whole["stop_reason"] == "tool_use" and "stop_sequence" not in whole


def test_vllm_message_stream_ends_with_an_error_of_its_type():
    failed = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"broken"}}\n\n'
    assert read(stream=True).fail_stream(EngineError("broken")) == failed
    reply = read(stream=True)
    reply.render_chunk([PromptAccepted(0, [1]), reasoning_delta("Hm.")])
    signature, _, ended = reply.fail_stream(EngineError("broken")).partition(b'"},"index":0}\n\n')
    assert b'{"type":"signature_delta","signature":"' in signature
    stopped = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    assert ended == stopped + failed
    assert b'"type":"overloaded_error"' in read(stream=True).fail_stream(Overloaded("x"))
    assert read(stream=True).render_ping() == b": ping\n\n"


def test_vllm_message_has_the_id_of_the_header():
    context = replace(CONTEXT, headers={**CONTEXT.headers, b"x-request-id": b"abc"})
    reply = read(context)
    reply.add_events([text("a"), done()])
    assert json.loads(reply.render_body(USAGE))["id"] == "chatcmpl-abc"


def test_vllm_counts_tokens_with_those_before_edits():
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "system": "Be kind."}
    counted = messages.read_vllm_count(json.dumps(body).encode(), CONTEXT)
    assert counted.prompt.add_generation_prompt and counted.prompt.tools and counted.writer is not None  # type: ignore[union-attr]
    result = TokenizeResult([5] * 11, 512, ["a"] * 11, False)
    assert counted.writer(result) == b'{"input_tokens":11,"context_management":{"original_input_tokens":11}}'


# -- requests


def test_vllm_message_takes_options_of_chat_completions():
    request = read(
        max_tokens=2000 - 1500, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"], cache_salt="s",
        vllm_xargs={"a": 1}, chat_template_kwargs={"x": 1}, watermarking=False, mm_payload="none",
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    ).request  # fmt: skip
    stop, sampling = request.stop_conditions, request.sampling
    assert (stop.max_tokens, stop.strings, stop.reserved_tokens) == (500, ["a", "b"], 1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    (prompt,) = request.prompts
    assert request.cache_salt == "s" and prompt.options == {"x": 1}  # type: ignore[union-attr]
    assert [message.role for message in prompt.messages] == ["system", "user"]  # type: ignore[union-attr]
    assert read().request.sampling.temperature == 1.0
    defaults = replace(CONTEXT, generation_defaults={"temperature": 0.25})
    assert read(defaults).request.sampling.temperature == 0.25
    assert read(seed=5, min_p=0.5).request.sampling == read().request.sampling  # not members of this route


@pytest.mark.parametrize(
    ("members", "thinking", "effort", "budget"),
    [
        ({}, None, None, None),
        ({"thinking": {"type": "adaptive"}}, None, None, None),
        ({"thinking": {"type": "disabled"}}, False, "none", None),
        ({"output_config": {"effort": "low"}}, None, "low", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, "max_tokens": 1025}, None, None,
         1024),
    ],
)  # fmt: skip
def test_vllm_template_decides_whether_a_message_has_thinking(members, thinking, effort, budget):
    request = read(replace(CONTEXT, context_length=4096), **members).request
    chat = request.prompts[0]
    assert (chat.thinking, chat.reasoning_effort, request.thinking_budget) == (thinking, effort, budget)  # type: ignore[union-attr]


def test_vllm_message_does_not_continue_the_last_turn():
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The"}]
    (chat,) = read(messages=turns).request.prompts
    assert chat.add_generation_prompt and not chat.continue_final  # type: ignore[union-attr]


# -- refusals


def shape_error(entry: str, param: str) -> tuple[int, Any]:
    message = f"1 validation error:\n  {entry}"
    return 400, {"error": {"message": message, "type": "Bad Request", "param": param, "code": 400}}


def message_error(message: str, status: int = 400, kind: str = "invalid_request_error") -> tuple[int, Any]:
    return status, {"type": "error", "error": {"type": kind, "message": message}}


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"model": None}, shape_error(
            "{'type': 'missing', 'loc': 'body.model', 'msg': 'Field required', 'input': '<dict of 2 items>'}",
            "body.model")),
        ({"model": ""}, shape_error(
            "{'type': 'value_error', 'loc': 'body.model', 'msg': 'Value error, Model is required', 'input': '', "
            "'ctx': {'error': ValueError('Model is required')}}", "body.model")),
        ({"max_tokens": 0}, shape_error(
            "{'type': 'value_error', 'loc': 'body.max_tokens', 'msg': 'Value error, max_tokens must be positive', "
            "'input': '0', 'ctx': {'error': ValueError('max_tokens must be positive')}}", "body.max_tokens")),
        ({"max_tokens": "x"}, shape_error(
            "{'type': 'int_parsing', 'loc': 'body.max_tokens', 'msg': 'Input should be a valid integer, unable to "
            "parse string as an integer', 'input': 'x'}", "body.max_tokens")),
        ({"messages": [{"role": "tool", "content": "x"}]}, shape_error(
            "{'type': 'literal_error', 'loc': 'body.messages.0.role', 'msg': \"Input should be 'user', 'assistant' or "
            "'system'\", 'input': 'tool', 'ctx': {'expected': \"'user', 'assistant' or 'system'\"}}",
            "body.messages.0.role")),
        ({"stop_sequences": list("abcde")}, shape_error(
            "{'type': 'too_long', 'loc': 'body.stop_sequences', 'msg': 'List should have at most 4 items after "
            "validation, not 5', 'input': '<list of 5 items>', 'ctx': {'field_type': 'List', 'max_length': 4, "
            "'actual_length': 5}}", "body.stop_sequences")),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, shape_error(
            "{'type': 'value_error', 'loc': 'body', 'msg': 'Value error, thinking.budget_tokens must be less than "
            "max_tokens', 'input': '<dict of 4 items>', 'ctx': {'error': ValueError('thinking.budget_tokens must be "
            "less than max_tokens')}}", "body")),
        ({"max_tokens": 100000}, message_error(
            "max_completion_tokens=100000 cannot be greater than max_model_len=512. Please request fewer output "
            "tokens. (parameter=max_completion_tokens, value=100000)")),
        ({"temperature": 3}, message_error(
            "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)")),
        ({"top_p": 0}, message_error("top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)")),
        ({"top_k": -2}, message_error("top_k must be 0 (disable), or at least 1, got -2.")),
        ({"stop_sequences": [""]}, message_error("stop cannot contain an empty string.")),
        ({"messages": []}, message_error(
            "Cannot apply chat template to an empty conversation. Provide at least one message.")),
        ({"cache_salt": "@"}, message_error(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL. "
            "(parameter=cache_salt)")),
    ],
    ids=str,
)  # fmt: skip
def test_vllm_message_refusals_have_the_form_of_their_layer(members, expected):
    assert refusal(**members) == expected


def test_vllm_messages_take_transfers_without_effect():
    members = {"kv_transfer_params": {"do_remote_decode": True}, "ec_transfer_params": {"a": 1}}
    assert read(**members).request == read().request


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (UnknownModel("x", name="no", served=["m"]), 404,
         {"type": "error", "error": {"type": "not_found_error",
                                     "message": "The model `no` does not exist. Valid aliases: m."}}),
        (EngineError("broken"), 500, {"type": "error", "error": {"type": "api_error", "message": "broken"}}),
        (Overloaded("x"), 503, "overloaded_error"),
        (ContextLength("x", limit=512, prompt=513), 400, "invalid_request_error"),
        (NotFound("x"), 404, {"detail": "Not Found"}),
        (NotAllowed("x"), 405, {"detail": "Method Not Allowed"}),
        (Unauthorized("x"), 401, {"error": "Unauthorized"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_vllm_message_errors_have_anthropics_form_after_routing(error, status, body):
    answer = messages.messages_error(error)
    assert answer.status == status
    written = json.loads(answer.body)
    if isinstance(body, str):
        assert list(written) == ["type", "error"] and written["error"]["type"] == body
    else:
        assert written == body
