"""Chat completions: meaning of bodies, and the exact bytes of answers."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from parley.dialects.openai import DIALECT, chat
from parley.dialects.request_context import RequestContext
from parley.errors import BadRequest, EngineError, NotReady, Overloaded, Unauthorized, Unsupported
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    Message,
    PromptAccepted,
    PromptScored,
    TokenInfo,
    ToolCall,
    ToolCallDelta,
    Usage,
)

CONTEXT = RequestContext("0f", 1700000000, "fp_1")
MESSAGES = [{"role": "user", "content": "Hi"}]
USAGE = Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=4, reasoning_tokens=1)


def read_chat(**members: Any) -> chat.ChatReply:
    body = {"model": "m", "messages": MESSAGES} | members
    return chat.read_chat_request(json.dumps(body).encode(), CONTEXT)


def refusal(**members: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_chat(**members)
    return caught.value


def test_openai_chat_minimal_body_means_defaults():
    request = read_chat().request
    assert (request.id, request.model, request.n, request.stream) == ("0f", "m", 1, False)
    (prompt,) = request.prompts
    assert prompt.messages == [Message("user", "Hi")]
    assert prompt.add_generation_prompt and not prompt.continue_final
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, 0, None)
    assert request.stop_conditions.max_tokens is None
    assert request.output_options.logprobs is None and not request.output_options.usage


def test_openai_chat_members_reach_the_request():
    request = read_chat(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, typical_p=0.7, seed=2**64 - 1, repetition_penalty=1.1,
        presence_penalty=-2, frequency_penalty=2, logit_bias={"5": -100}, stop=["a", "b"], stop_token_ids=[7],
        max_tokens=5, max_completion_tokens=9, min_tokens=2, ignore_eos=True, include_stop_str_in_output=True,
        logprobs=True, top_logprobs=3, stream=True, stream_options={"include_usage": True}, n=2,
        skip_special_tokens=False, cache_salt="tenant", add_special_tokens=True,
    ).request  # fmt: skip
    assert request.prompts[0].add_special_tokens and not read_chat().request.prompts[0].add_special_tokens
    sampling, stop, want = request.sampling, request.stop_conditions, request.output_options
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.seed, sampling.typical_p, sampling.repetition_penalty) == (2**64 - 1, 0.7, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2, 2)
    assert sampling.logit_bias == {5: -100.0}
    assert (stop.strings, stop.ids, stop.max_tokens, stop.min_tokens) == (["a", "b"], [7], 9, 2)
    assert stop.ignore_eos and stop.include_in_output
    assert (want.logprobs, want.usage, want.skip_special) == (3, True, False)
    assert (request.n, request.stream, request.cache_salt) == (2, True, "tenant")


def test_openai_chat_null_means_absent():
    names = [
        "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "n", "stop",
        "frequency_penalty", "logit_bias", "stop_token_ids", "max_tokens", "max_completion_tokens", "min_tokens",
        "ignore_eos", "logprobs", "top_logprobs", "stream", "stream_options", "response_format", "tools", "tool_choice",
        "functions", "function_call", "reasoning_effort", "chat_template_kwargs", "user", "metadata", "audio",
        "modalities", "model", "echo", "cache_salt", "prompt_logprobs", "best_of", "guided_json", "parallel_tool_calls",
    ]  # fmt: skip
    assert read_chat(**dict.fromkeys(names)).request == read_chat(model="").request


def test_openai_chat_ignores_unknown_members():
    assert read_chat(frobnicate={"a": [1]}, user="me", metadata={"k": "v"}, store=True).request == read_chat().request


def test_openai_chat_top_k_of_minus_one_means_off():
    assert read_chat(top_k=-1).request.sampling.top_k == 0


def test_openai_chat_reads_roles_parts_and_tool_calls():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    (prompt,) = read_chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "c1"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": None},
            {"role": "assistant", "content": "x", "reasoning": "hm"},
            {"role": "assistant", "function_call": {"name": "g", "arguments": "{}"}},
            {"role": "function", "name": "g", "content": "5"},
        ]
    ).request.prompts
    assert prompt.messages == [
        Message("system", "be brief"),
        Message("user", "a\nb", "Ann"),
        Message("assistant", None, tool_calls=[ToolCall("c1", "f", '{"x":1}')]),
        Message("tool", "4", tool_call_id="c1"),
        Message("assistant", "", reasoning="hm"),
        Message("assistant", "x", reasoning="hm"),
        Message("assistant", None, tool_calls=[ToolCall("", "g", "{}")]),
        Message("tool", "5", "g"),
    ]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "g", "description": "d"}}
NAMED = {"type": "function", "function": {"name": "f"}}


def test_openai_chat_checks_types_of_descriptive_members():
    """Descriptions have no effect on decoding, but a wrong type is still refused."""
    strict_schema = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    strict_function = {"name": "f", "description": "d", "parameters": strict_schema, "strict": True}
    for tools in ({"tools": [{"type": "function", "function": strict_function}]}, {"functions": [strict_function]}):
        assert read_chat(**tools).request.prompts[0].tools == [{"type": "function", "function": strict_function}]
    for wrong in ({"description": 5}, {"strict": "yes"}):
        for tools in (
            {"tools": [{"type": "function", "function": strict_function | wrong}]},
            {"functions": [strict_function | wrong]},
        ):
            with pytest.raises(BadRequest, match="Invalid type"):
                read_chat(**tools)
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}} | wrong}
        with pytest.raises(BadRequest, match="Invalid type"):
            read_chat(response_format=schema)
    assert read_chat(guided_whitespace_pattern=" ?").request == read_chat().request
    with pytest.raises(BadRequest):
        read_chat(structured_outputs={"json": {}, "disable_additional_properties": 5})


def test_openai_chat_passes_tools_unless_choice_is_none():
    assert read_chat(tools=[TOOL]).request.prompts[0].tools == [TOOL]
    assert read_chat(tools=[TOOL], tool_choice="auto").request.prompts[0].tools == [TOOL]
    assert read_chat(tools=[TOOL], tool_choice="none").request.prompts[0].tools == []
    assert read_chat(functions=[TOOL["function"]]).request.prompts[0].tools == [TOOL]


def test_openai_chat_passes_template_options():
    def template_arguments(**members):
        (chat,) = read_chat(**members).request.prompts
        return chat.thinking, chat.reasoning_effort, chat.options

    assert template_arguments() == (None, None, {})
    assert template_arguments(reasoning_effort="none") == (None, "none", {})
    mixed = {"enable_thinking": False, "k": 1}
    assert template_arguments(reasoning_effort="high", chat_template_kwargs=mixed) == (None, "high", mixed)
    assert template_arguments(enable_thinking=True) == (True, None, {})
    for name in ("messages", "tokenize", "chat_template", "__class__", "add_generation_prompt"):
        assert refusal(chat_template_kwargs={name: 1}).field == "chat_template_kwargs"


def test_openai_chat_continues_final_message():
    messages = [*MESSAGES, {"role": "assistant", "content": "Once"}]
    (prompt,) = read_chat(messages=messages, continue_final_message=True).request.prompts
    assert prompt.continue_final and not prompt.add_generation_prompt
    assert refusal(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert refusal(continue_final_message=True).field == "continue_final_message"


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role", "invalid_type"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text",
     "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type", "unsupported_value"),
    ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0].type",
     "invalid_value"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function",
     "missing_required_parameter"),
    ({"model": 5}, "model", "invalid_type"),
    ({"temperature": 2.5}, "temperature", "decimal_above_max_value"),
    ({"temperature": -1}, "temperature", "decimal_below_min_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": 1.5}, "top_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", "integer_below_min_value"),
    ({"min_p": 1.5}, "min_p", "decimal_above_max_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "decimal_below_min_value"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"n": 2**63}, "n", "integer_above_max_value"),
    ({"n": 1.5}, "n", "invalid_type"),
    ({"n": 1e300}, "n", "integer_above_max_value"),
    ({"seed": 2**64}, "seed", "integer_above_max_value"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "integer_below_min_value"),
    ({"max_tokens": 2**31}, "max_tokens", "integer_above_max_value"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": ["a"] * 1025}, "stop", "array_above_max_length"),
    ({"stop": ["a" * 10_000, "b" * 10_000]}, "stop", "invalid_value"),
    ({"stop": "a" * 20_000}, "stop", "string_above_max_length"),
    ({"stop": ["a", ""]}, "stop[1]", "empty_string"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "integer_below_min_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "integer_above_max_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "object_above_max_length"),
    ({"logprobs": 3}, "logprobs", "invalid_type"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": 5}, "stream_options", "invalid_type"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"tools": [{}]}, "tools[0].type", "missing_required_parameter"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools[0].function.name",
     "string_above_max_length"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters",
     "invalid_type"),
    ({"tools": [TOOL] * 129}, "tools", "array_above_max_length"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
    ({"tool_choice": NAMED}, "tool_choice", "invalid_value"),
    ({"tool_choice": 5}, "tool_choice", "invalid_type"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "f"}}}, "tool_choice.type", "missing_required_parameter"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", "missing_required_parameter"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}},
     "tool_choice.function.name", "missing_required_parameter"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice.function.name", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
     "tool_choice.allowed_tools", "missing_required_parameter"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none"}}},
     "tool_choice.allowed_tools.mode", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools.tools", "empty_array"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}},
     "tool_choice.allowed_tools.tools[0].function.name", "invalid_value"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "invalid_value"),
    ({"functions": [TOOL["function"]] * 2}, "functions[1].name", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters", "invalid_value"),
    ({"function_call": {"name": "f"}}, "function_call", "invalid_value"),
    ({"functions": [TOOL["function"]], "function_call": "required"}, "function_call", "invalid_value"),
    ({"functions": [TOOL["function"]], "function_call": {"name": "g"}}, "function_call.name", "invalid_value"),
    ({"functions": [TOOL["function"]], "tools": [TOOL]}, "functions", "invalid_value"),
    ({"reasoning_effort": "heroic"}, "reasoning_effort", "invalid_value"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
     "response_format.json_schema.name", "invalid_value"),
    ({"n": 3, "best_of": 2}, "best_of", "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "field", "code"), CASES, ids=lambda value: str(value)[:60])
def test_openai_chat_error_names_wrong_field(members, field, code):
    error = refusal(**members)
    assert (error.field, error.code, error.status) == (field, code, 400)
    assert field in error.message
    assert len(error.message) < 400


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ({"web_search_options": {}}, "web_search_options"),  # the search with its defaults
    ({"moderation": {"model": "omni-moderation-latest"}}, "moderation"),
    ({"audio": {"voice": "v", "format": "mp3"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "field"), UNSUPPORTED, ids=lambda value: str(value)[:60])
def test_openai_chat_refuses_unavailable_members(members, field):
    error = refusal(**members)
    assert isinstance(error, Unsupported)
    assert error.field == field
    assert "available" in error.message


def test_openai_chat_accepts_unavailable_members_set_to_off():
    read_chat(best_of=1, use_beam_search=False, guided_json=None, bad_words=[], response_format={"type": "text"},
         modalities=["text"], truncate_prompt_tokens=-1, logits_processors=[])  # fmt: skip


STRICT_LABELS: list[tuple[str, Any, str]] = [
    ("service_tier", "zzz", "'auto', 'default', 'flex', 'scale', 'priority'"),
    ("service_tier", {}, "string"),
    ("verbosity", "huge", "'low', 'medium'"),
    ("prompt_cache_retention", "2h", "'24h'"),
    ("prompt_cache_options", "30m", "object"),
    ("prompt_cache_key", 5, "string"),
    ("safety_identifier", "x" * 513, "512"),
    ("user", ["me"], "string"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), STRICT_LABELS, ids=lambda value: str(value)[:30])
def test_openai_chat_checks_members_without_effect_when_strict(name, value, allowed):
    body = {"model": "m", "messages": MESSAGES, name: value}
    with pytest.raises(BadRequest) as caught:
        chat.read_strict_chat_request(json.dumps(body).encode(), CONTEXT)
    assert caught.value.field == name and name in caught.value.message and allowed in caught.value.message
    assert read_chat(**{name: value}).request == read_chat().request


def test_openai_chat_accepts_members_without_effect_when_strict():
    labels = {"service_tier": "flex", "verbosity": "low", "prompt_cache_options": {"ttl": "30m"}, "user": "me"}
    body = {"model": "m", "messages": MESSAGES, "prompt_cache_retention": "24h", "safety_identifier": "s"} | labels
    assert chat.read_strict_chat_request(json.dumps(body).encode(), CONTEXT).request == read_chat().request


def test_openai_chat_reads_prediction_and_counts_its_tokens():
    assert read_chat().request.prediction == read_chat(prediction=None).request.prediction == ""
    assert read_chat(prediction={"type": "content", "content": "a b"}).request.prediction == "a b"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_chat(prediction={"content": parts}).request.prediction == "ab"
    for wrong, field in (({"content": 5}, ".content"), ({"type": "other"}, ".type"), ({}, ".content"), ("a", "")):
        assert refusal(prediction=wrong).field == "prediction" + field
    reply, usage = read_chat(prediction={"content": "a"}), Usage(9, 3, accepted_tokens=5, rejected_tokens=7)
    reply.add_events([PromptAccepted(0, [1]), ChoiceDelta(0, "a"), ChoiceDone(0, "stop", usage)])
    details = json.loads(reply.render_body(usage))["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (5, 7)


# -- answers

OPENING = (
    b'{"id":"chatcmpl-0f","object":"chat.completion","created":1700000000,"model":"m","service_tier":"default",'
    b'"system_fingerprint":"fp_1","choices":['
)
CHUNK = OPENING.replace(b"chat.completion", b"chat.completion.chunk")
COUNTED = (
    b'"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12,"prompt_tokens_details":{"cached_tokens":4,'
    b'"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":1,"audio_tokens":0,'
    b'"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}}'
)


def chunk(choice: bytes, tail: bytes = b"]}") -> bytes:
    return b"data: " + CHUNK + choice + tail + b"\n\n"


def role(index: int = 0) -> bytes:
    return (
        b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        % index
    )


def content(text: bytes, index: int = 0) -> bytes:
    return b'{"index":%d,"delta":{"content":"%b"},"logprobs":null,"finish_reason":null}' % (index, text)


def finish(reason: bytes, index: int = 0, stop: bytes = b"null") -> bytes:
    return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b","stop_reason":%b}' % (index, reason, stop)


def test_openai_chat_writes_body():
    reply = read_chat()
    reply.add_events([PromptAccepted(0, [1, 2]), ChoiceDelta(0, "Pa")])
    reply.add_events([ChoiceDelta(0, 'ris "é"'), ChoiceDone(0, "stop", USAGE)])
    assert reply.render_body(USAGE) == (
        OPENING
        + '{"index":0,"message":{"role":"assistant","content":"Paris \\"é\\"","refusal":null,"annotations":[],'
        '"reasoning_content":null,"reasoning":null},"logprobs":null,"finish_reason":"stop","stop_reason":null}],'.encode()
        + COUNTED
    )


def test_openai_chat_writes_stream():
    reply = read_chat(stream=True)
    assert reply.render_chunk([PromptAccepted(0, [1, 2])]) == b""
    assert reply.render_chunk([ChoiceDelta(0, "Pa")]) == chunk(role()) + chunk(content(b"Pa"))
    assert reply.render_chunk([ChoiceDelta(0, "r"), ChoiceDelta(0, "is\n")]) == chunk(content(b"r")) + chunk(
        content(b"is\\n")
    )
    assert reply.render_chunk([ChoiceDelta(0, "")]) == b""
    assert reply.render_chunk([ChoiceDone(0, "length", USAGE)]) == chunk(finish(b"length"))
    assert reply.finish_stream(USAGE) == b"data: [DONE]\n\n"


def test_openai_chat_stream_usage_is_null_until_the_end():
    reply = read_chat(stream=True, stream_options={"include_usage": True})
    tail = b'],"usage":null}'
    assert reply.render_chunk([ChoiceDelta(0, "a")]) == chunk(role(), tail) + chunk(content(b"a"), tail)
    assert reply.render_chunk([ChoiceDone(0, "stop", USAGE)]) == chunk(finish(b"stop"), tail)
    assert reply.finish_stream(USAGE) == b"data: " + CHUNK + b"]," + COUNTED + b"\n\ndata: [DONE]\n\n"


def test_openai_chat_empty_stream_still_sends_role():
    reply = read_chat(stream=True)
    assert reply.render_chunk([ChoiceDone(0, "stop", USAGE)]) == chunk(role()) + chunk(finish(b"stop"))


def test_openai_chat_stream_interleaves_choices():
    reply = read_chat(stream=True, n=2)
    data = reply.render_chunk(
        [ChoiceDelta(1, "b"), ChoiceDelta(0, "a"), ChoiceDone(1, "stop", USAGE, "###"), ChoiceDone(0, "stop", USAGE, 7)]
    )
    assert data == b"".join(
        map(chunk, [role(1), content(b"b", 1), role(0), content(b"a"), finish(b"stop", 1, b'"###"'),
                    finish(b"stop", 0, b"7")])
    )  # fmt: skip


def test_openai_chat_body_orders_choices_by_index():
    reply = read_chat(n=2)
    reply.add_events(
        [ChoiceDelta(1, "b"), ChoiceDone(1, "length", USAGE), ChoiceDelta(0, "a"), ChoiceDone(0, "stop", USAGE)]
    )
    choices = json.loads(reply.render_body(USAGE))["choices"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (0, "a", "stop"),
        (1, "b", "length"),
    ]


SPLIT = TokenInfo(
    5, "\ufffd", b"\xe2\x96", -0.25, 1, [TokenInfo(5, "\ufffd", b"\xe2\x96", -0.25, 1), TokenInfo(6, "x", b"x", -9)]
)


def test_openai_chat_logprobs_have_bytes_and_alternatives():
    expected = {
        "content": [
            {
                "token": "\ufffd",
                "logprob": -0.25,
                "bytes": [0xE2, 0x96],
                "top_logprobs": [
                    {"token": "\ufffd", "logprob": -0.25, "bytes": [0xE2, 0x96]},
                    {"token": "x", "logprob": -9, "bytes": [0x78]},
                ],
            }
        ],
        "refusal": None,
    }
    reply = read_chat(logprobs=True, top_logprobs=2)
    reply.add_events([ChoiceDelta(0, "", tokens=[SPLIT]), ChoiceDone(0, "stop", USAGE)])
    assert json.loads(reply.render_body(USAGE))["choices"][0]["logprobs"] == expected
    reply = read_chat(logprobs=True, top_logprobs=2, stream=True)
    chunks = frames(reply.render_chunk([ChoiceDelta(0, "", tokens=[SPLIT])]))
    expected_choice = {"index": 0, "delta": {"content": ""}, "logprobs": expected, "finish_reason": None}
    assert chunks[1]["choices"][0] == expected_choice


def frames(data: bytes) -> list[dict[str, Any]]:
    return [
        json.loads(frame.removeprefix(b"data: ")) for frame in data.split(b"\n\n") if frame and b"[DONE]" not in frame
    ]


def test_openai_chat_writes_infinite_logprobs_as_minus_9999():
    reply = read_chat(logprobs=True)
    tokens = [TokenInfo(1, "a", b"a", float("-inf"), 9), TokenInfo(2, "b", b"b", float("nan"), 9)]
    reply.add_events([ChoiceDelta(0, "ab", tokens=tokens), ChoiceDone(0, "stop", USAGE)])
    scored = json.loads(reply.render_body(USAGE))["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in scored] == [-9999.0, -9999.0]
    assert scored[0]["top_logprobs"] == []


def test_openai_chat_writes_tokens_as_ids():
    reply = read_chat(logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)
    reply.add_events(
        [
            PromptAccepted(0, [1, 2]),
            ChoiceDelta(0, "a", tokens=[TokenInfo(791, "a", b"a", -1, 1)]),
            ChoiceDone(0, "stop", USAGE),
        ]
    )
    answer = json.loads(reply.render_body(USAGE))
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:791"
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([1, 2], [791])
    reply = read_chat(stream=True, return_token_ids=True)
    reply.render_chunk([PromptAccepted(0, [1, 2])])
    first, second = frames(reply.render_chunk([ChoiceDelta(0, "a", tokens=[TokenInfo(791, "a", b"a")])]))
    assert first["prompt_token_ids"] == [1, 2]
    assert second["choices"][0]["token_ids"] == [791]


CALLS = [
    ChoiceDelta(0, "Let me see."),
    ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, "call_1", "add", "")),
    ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, arguments='{"a":')),
    ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, arguments="1}")),
    ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(1, "call_2", "sub", "{}")),
    ChoiceDone(0, "tool", USAGE),
]


def test_openai_chat_writes_tool_calls():
    reply = read_chat(tools=[TOOL])
    reply.add_events(CALLS)
    choice = json.loads(reply.render_body(USAGE))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
    ]


def test_openai_chat_streams_tool_calls():
    deltas = [c["choices"][0]["delta"] for c in frames(read_chat(tools=[TOOL], stream=True).render_chunk(CALLS))]
    add, sub = {"name": "add", "arguments": ""}, {"name": "sub", "arguments": "{}"}
    assert deltas[2:] == [
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": add}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{"index": 1, "id": "call_2", "type": "function", "function": sub}]},
        {},
    ]


def test_openai_chat_refuses_loose_schema_of_strict_function_below_the_prefix():
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    for members, field in (
        ({"tools": [{"type": "function", "function": function}]}, "tools[0].function.parameters"),
        ({"functions": [function]}, "functions[0].parameters"),
    ):
        (tool,) = read_chat(**members).request.prompts[0].tools  # the root follows it as it is
        assert tool["function"] == function
        with pytest.raises(BadRequest) as caught:
            chat.read_strict_chat_request(json.dumps({"model": "m", "messages": MESSAGES} | members).encode(), CONTEXT)
        error = caught.value
        assert (error.field, error.code) == (field, "invalid_function_parameters")
        assert error.message.startswith("Invalid schema for function 'f': In context=(), 'additionalProperties'")


def test_openai_chat_reads_parallel_tool_calls():
    assert not read_chat(tools=[TOOL], parallel_tool_calls=False).request.prompts[0].parallel_calls
    assert read_chat(tools=[TOOL], parallel_tool_calls=True).request.prompts[0].parallel_calls
    assert not read_chat(functions=[TOOL["function"]]).request.prompts[0].parallel_calls


@pytest.mark.parametrize("old", [False, True])
def test_openai_chat_reads_tool_choice(old):
    def read_choice(value: Any) -> tuple[str, str | None, list[str]]:
        members = {"functions": [TOOL["function"], OTHER["function"]], "function_call": value}
        if not old:
            members = {"tools": [TOOL, OTHER], "tool_choice": value}
        (chat,) = read_chat(**members).request.prompts
        assert [tool["function"]["name"] for tool in chat.tools] == ["f", "g"]
        return chat.tool_choice, chat.forced_tool, chat.allowed_tools

    assert read_choice("auto") == read_choice(None) == ("auto", None, [])
    if old:
        assert read_choice({"name": "f"}) == ("required", "f", [])
        return
    assert read_choice("required") == ("required", None, [])
    assert read_choice(NAMED) == ("required", "f", [])
    allowed_tools = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    assert read_choice(allowed_tools) == ("required", None, ["f"])
    allowed_tools["allowed_tools"]["mode"] = "auto"
    assert read_choice(allowed_tools) == ("auto", None, ["f"])


@pytest.mark.parametrize(
    ("tool_choice", "reason"),
    [
        ({"tools": [TOOL]}, "tool_calls"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_calls"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "stop"),
        ({"functions": [TOOL["function"]], "function_call": {"name": "f"}}, "stop"),
    ],
)
def test_openai_chat_named_tool_call_finishes_with_stop(tool_choice, reason):
    """As with OpenAI, finish_reason is stop if the client named the function to call."""
    whole, streamed = read_chat(**tool_choice), read_chat(**tool_choice, stream=True)
    whole.add_events(CALLS[1:4] + CALLS[-1:])
    chunks = frames(streamed.render_chunk(CALLS[1:4] + CALLS[-1:]))
    assert json.loads(whole.render_body(USAGE))["choices"][0]["finish_reason"] == reason
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    unfinished = read_chat(**tool_choice)
    unfinished.add_events([*CALLS[1:3], ChoiceDone(0, "length", USAGE)])
    assert json.loads(unfinished.render_body(USAGE))["choices"][0]["finish_reason"] == "length"


def test_openai_chat_writes_legacy_function_call():
    reply = read_chat(functions=[TOOL["function"]])
    reply.add_events(CALLS[1:4] + CALLS[-1:])
    choice = json.loads(reply.render_body(USAGE))["choices"][0]
    assert choice["message"]["function_call"] == {"name": "add", "arguments": '{"a":1}'}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    deltas = [
        c["choices"][0]["delta"]
        for c in frames(read_chat(functions=[TOOL["function"]], stream=True).render_chunk(CALLS[1:4] + CALLS[-1:]))
    ]
    assert deltas[1:] == [
        {"function_call": {"name": "add", "arguments": ""}},
        {"function_call": {"arguments": '{"a":'}},
        {"function_call": {"arguments": "1}"}},
        {},
    ]


THOUGHT = [ChoiceDelta(0, "hm", "reasoning"), ChoiceDelta(0, "yes"), ChoiceDone(0, "stop", USAGE)]


def test_openai_chat_writes_reasoning_under_both_names():
    reply = read_chat()
    reply.add_events(THOUGHT)
    message = json.loads(reply.render_body(USAGE))["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hm", "hm", "yes")
    deltas = [c["choices"][0]["delta"] for c in frames(read_chat(stream=True).render_chunk(THOUGHT))]
    assert deltas[1:] == [{"reasoning_content": "hm", "reasoning": "hm"}, {"content": "yes"}, {}]


def test_openai_chat_include_reasoning_false_omits_reasoning():
    reply = read_chat(include_reasoning=False)
    reply.add_events(THOUGHT)
    assert json.loads(reply.render_body(USAGE))["choices"][0]["message"]["reasoning"] is None
    assert b"hm" not in read_chat(stream=True, include_reasoning=False).render_chunk(THOUGHT)


def test_openai_chat_unfinished_reasoning_leaves_content_null():
    reply = read_chat()
    reply.add_events([ChoiceDelta(0, "hm", "reasoning"), ChoiceDone(0, "length", USAGE)])
    assert json.loads(reply.render_body(USAGE))["choices"][0]["message"]["content"] is None


def test_openai_chat_echo_repeats_continued_message():
    members = {"messages": [*MESSAGES, {"role": "assistant", "content": "Sure"}], "echo": True}
    reply = read_chat(**members)
    reply.add_events([ChoiceDelta(0, "!"), ChoiceDone(0, "stop", USAGE)])
    assert json.loads(reply.render_body(USAGE))["choices"][0]["message"]["content"] == "Sure!"
    assert b'"content":"Sure"' in read_chat(**members, stream=True).render_chunk([ChoiceDelta(0, "!")])


def test_openai_chat_writes_prompt_logprobs():
    reply = read_chat(prompt_logprobs=1)
    tokens = [TokenInfo(1, "a", b"a"), TokenInfo(2, "b", b"b", -0.5, 2, [TokenInfo(3, "c", b"c", -0.1, 1)])]
    reply.add_events([PromptScored(0, tokens), ChoiceDone(0, "stop", USAGE)])
    scores = [
        None,
        {
            "3": {"logprob": -0.1, "rank": 1, "decoded_token": "c"},
            "2": {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
        },
    ]
    assert json.loads(reply.render_body(USAGE))["prompt_logprobs"] == scores
    reply = read_chat(prompt_logprobs=1, n=2, stream=True)  # sent with the first chunk
    events = reply.render_chunk([PromptScored(0, tokens), ChoiceDelta(1, "!")]).decode().split("\n\n")[:-1]
    chunks = [json.loads(line.removeprefix("data: ")) for line in events]
    assert [chunk.get("prompt_logprobs") for chunk in chunks] == [scores, None, None]
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1, 1]


# -- errors

ERRORS: list[tuple[Callable[[], Exception], int, bytes]] = [
    (lambda: refusal(n=0), 400,
     b'{"error":{"message":"Invalid \'n\': must be at least 1 and at most 128, but got 0.",'
     b'"type":"invalid_request_error","param":"n","code":"integer_below_min_value"}}'),
    (lambda: Unauthorized("Who?"), 401,
     b'{"error":{"message":"Who?","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}'),
    (lambda: Overloaded("Full."), 429,
     b'{"error":{"message":"Full.","type":"requests","param":null,"code":"rate_limit_exceeded"}}'),
    (lambda: EngineError("Broken."), 500,
     b'{"error":{"message":"Broken.","type":"server_error","param":null,"code":null}}'),
    (lambda: NotReady("Wait."), 503,
     b'{"error":{"message":"Wait.","type":"service_unavailable","param":null,"code":null}}'),
]  # fmt: skip


@pytest.mark.parametrize(("make", "status", "body"), ERRORS)
def test_openai_error_has_four_members(make, status, body):
    assert DIALECT.render_error(make()) == (status, body, b"application/json")


def test_openai_chat_stream_ends_after_error():
    assert read_chat(stream=True).fail_stream(EngineError("Broken.")) == (
        b'data: {"error":{"message":"Broken.","type":"server_error","param":null,"code":null}}\n\ndata: [DONE]\n\n'
    )


def test_openai_chat_returns_prompt_text():
    assert (
        read_chat(return_prompt_text=True).request.output_options.prompt_text
        and not read_chat().request.output_options.prompt_text
    )
    output = [PromptAccepted(0, [1, 2], 0, "<user>Hi"), ChoiceDelta(0, "a"), ChoiceDone(0, "stop", Usage(2, 1))]
    reply = read_chat(return_prompt_text=True)
    reply.add_events(output)
    assert json.loads(reply.render_body(Usage(2, 1)))["prompt_text"] == "<user>Hi"
    first, *others = read_chat(return_prompt_text=True, stream=True).render_chunk(output).split(b"\n\n")[:-1]
    assert json.loads(first.removeprefix(b"data: "))["prompt_text"] == "<user>Hi"
    assert not any(b"prompt_text" in frame for frame in others)
