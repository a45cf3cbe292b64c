"""Responses: meaning of bodies, exact bytes of answers, and the events of streams."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from parley.dialects.openai.responses.reply import ResponsesReply, read_response_request
from parley.dialects.openai.responses.response_rules import LENIENT, STRICT, ResponsesRules
from parley.dialects.reply import RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.summary_request import SUMMARY_REQUEST
from parley.errors import BadRequest, EngineError, NotFound, Overloaded, ParleyError
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    EncodedMedia,
    Event,
    Grammar,
    Media,
    Message,
    PromptAccepted,
    SummarizeContext,
    TokenInfo,
    ToolCall,
    ToolCallDelta,
    Usage,
)

CONTEXT = RequestContext("0f", 1700000000, "fp_1")
USAGE = Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=4, reasoning_tokens=1)
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CUSTOM = {"type": "custom", "name": "raw", "description": "Raw text."}
NAMESPACE = {"type": "namespace", "name": "ns", "description": "d", "tools": [{"type": "function", "name": "g"}]}
IMAGE = "data:image/png;base64,aGk="


def read(rules: ResponsesRules = LENIENT, context: RequestContext = CONTEXT, **members: Any) -> ResponsesReply:
    body = {"model": "m", "input": "Hi"} | members
    return read_response_request(json.dumps(body).encode(), context, rules)


def messages_of(*items: Any, **members: Any) -> list[Message]:
    return read(input=list(items), **members).request.prompts[0].messages


def refusal(rules: ResponsesRules = LENIENT, **members: Any) -> ParleyError:
    with pytest.raises((BadRequest, NotFound)) as caught:
        read(rules, **members)
    return caught.value


def call(index: int, call_id: str | None = None, name: str | None = None, arguments: str = "") -> ChoiceDelta:
    return ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(index, call_id, name, arguments))


def done(reason: Any = "stop") -> ChoiceDone:
    return ChoiceDone(0, reason, USAGE)


def stream(reply: ResponsesReply, *events: Event) -> bytes:
    reply.timings = RequestTimings(2.5, 0, 0, 0)
    return b"".join(reply.render_chunk([event]) for event in (PromptAccepted(0, [1]), *events)) + reply.finish_stream(
        USAGE
    )


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Decode the events of a stream, and check what holds for every stream."""
    *frames, last, rest = data.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    events = []
    for number, frame in enumerate(frames):
        name, line = frame.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        first, *others = event
        assert first == "type" and sorted(others) == others
        events.append(event)
    return events


def answer_body(reply: ResponsesReply, *events: Event) -> dict[str, Any]:
    reply.timings = RequestTimings(2.5, 0, 0, 0)
    reply.add_events(events)
    return json.loads(reply.render_body(USAGE))


# -- bodies


def test_responses_minimal_body_means_defaults():
    request = read().request
    assert (request.id, request.model, request.n, request.stream) == ("0f", "m", 1, False)
    (prompt,) = request.prompts
    assert prompt.messages == [Message("user", "Hi")] and prompt.tools == [] and prompt.parallel_calls
    assert (request.sampling.temperature, request.stop_conditions.max_tokens) == (1.0, None)
    assert (request.on_overflow, request.output_options.logprobs, request.grammar) == ("refuse", None, None)


def test_responses_members_reach_the_request():
    request = read(
        instructions="Be brief.", max_output_tokens=5, temperature=0.5, top_p=0.9, top_k=3, presence_penalty=1,
        frequency_penalty=-1, top_logprobs=2, truncation="auto", reasoning={"effort": "low"}, stream=True,
        parallel_tool_calls=False, stream_options={"include_obfuscation": False}, chat_template_kwargs={"x": 1},
    ).request  # fmt: skip
    (prompt,) = request.prompts
    assert prompt.messages == [Message("system", "Be brief."), Message("user", "Hi")]
    assert (prompt.reasoning_effort, prompt.parallel_calls, prompt.options) == ("low", False, {"x": 1})
    assert (request.stop_conditions.max_tokens, request.on_overflow, request.stream) == (5, "oldest_turns", True)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, request.output_options.logprobs) == (1, -1, 2)
    included = read(include=["message.output_text.logprobs"]).request
    assert included.output_options.logprobs == 0


def test_responses_null_means_absent():
    names = [
        "instructions", "previous_response_id", "conversation", "store", "background", "stream", "stream_options",
        "include", "max_output_tokens", "max_tool_calls", "temperature", "top_p", "top_logprobs", "reasoning", "text",
        "tools", "tool_choice", "parallel_tool_calls", "truncation", "metadata", "user", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "service_tier", "client_metadata",
        "background_options", "prompt", "context_management", "moderation", "image", "access_programs",
    ]  # fmt: skip
    for rules in (LENIENT, STRICT):
        assert answer_body(read(rules, **dict.fromkeys(names)), done()) == answer_body(read(rules), done())


def test_responses_text_format_is_a_grammar():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "name": "answer", "schema": schema}
    reply = read(text={"format": form, "verbosity": "low"})
    assert reply.request.grammar == Grammar("json", schema, field="text.format")
    shown = {"type": "json_schema", "description": None, "name": "answer", "schema": schema, "strict": False}
    assert answer_body(reply, done())["text"] == {"format": shown, "verbosity": "low"}
    assert read(text={"format": {"type": "json_object"}}).request.grammar.value == {"type": "object"}
    assert read(text={"format": {"type": "text"}}).request.grammar is None


def test_responses_consecutive_output_items_are_one_turn():
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_0", "summary": [{"type": "summary_text", "text": "s"}],
         "content": [{"type": "reasoning_text", "text": "t"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}], "id": "msg_1"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}', "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "raw", "input": "x\n", "namespace": "ns"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "c"},
    ]  # fmt: skip
    calls = [ToolCall("c1", "f", '{"a":1}'), ToolCall("c2", "ns__raw", '{"input":"x\\n"}')]
    assert messages_of(*items) == [
        Message("user", "a"),
        Message("assistant", "b", reasoning="t", tool_calls=calls),
        Message("tool", "one", tool_call_id="c1"),
        Message("tool", "two", tool_call_id="c2"),
        Message("assistant", "c"),
    ]


def test_responses_outputs_between_calls_keep_their_order():
    items = [
        {"type": kind, "call_id": call_id, "name": "f", "output": "o"}
        for call_id in ("c1", "c2")
        for kind in ("function_call", "function_call_output")
    ]
    roles = [message.role for message in messages_of({"role": "user", "content": "a"}, *items)]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


def test_responses_leading_system_messages_and_neighbouring_user_messages_are_joined():
    items = [{"role": role, "content": text} for role, text in
             (("developer", "a"), ("system", "b"), ("user", "c"), ("user", "d"), ("developer", "e"))]  # fmt: skip
    assert messages_of(*items, instructions="i") == [
        Message("system", "i\n\na\n\nb"),
        Message("user", "c\n\nd"),
        Message("system", "e"),
    ]


def test_responses_media_parts_are_read():
    context = replace(CONTEXT, media_limits={"image": 3})
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": IMAGE, "detail": "low"},
        {"type": "input_file", "file_data": IMAGE, "filename": "b.png"},
        {"type": "input_file", "file_data": "data:text/plain;base64,Ynll", "filename": "b.txt"},
        {"type": "input_file", "file_data": "Lg==", "filename": "c.txt"},
    ]
    (message,) = read(context=context, input=[{"role": "user", "content": parts}]).request.prompts[0].messages
    source = EncodedMedia("aGk=", "image/png")
    assert message.content == "abye\n."
    assert [(placed.position, placed.media) for placed in message.media] == [
        (1, Media("image", source, "input[0].content[1].image_url", "low")),
        (1, Media("image", source, "input[0].content[2].file_data")),
    ]


@pytest.mark.parametrize(
    ("data", "filename"),
    [("data:application/json;base64,Ynll", "a"), ("data:application/x-yaml;base64,Ynll", "a"),
     ("data:application/vnd.api+json;base64,Ynll", "a"), ("data:message/rfc822;base64,Ynll", "a"),
     *(("Ynll", f"a.{end}") for end in ("json", "ts", "rs", "go", "TOML", "jsonl", "ipynb", "sh", "sql", "eml", "tf"))],
)  # fmt: skip
def test_responses_files_of_text_and_code_are_texts(data, filename):
    part = {"type": "input_file", "file_data": data, "filename": filename}
    assert messages_of({"role": "user", "content": [part]}) == [Message("user", "bye")]
    for other in ("data:image/svg+xml;base64,Ynll", "data:application/pdf;base64,Ynll"):
        assert refusal(input=[{"role": "user", "content": [part | {"file_data": other}]}]).code == "unsupported_value"


def test_responses_sealed_reasoning_is_replayed_exactly():
    text = " think\n\nfirst "
    reply = read(include=["reasoning.encrypted_content"])
    item = answer_body(reply, ChoiceDelta(0, text, "reasoning"), ChoiceDelta(0, "b"), done())["output"][0]
    assert text.encode() == CONTEXT.open_reasoning(item["encrypted_content"])
    bare = {"type": "reasoning", "id": "x", "encrypted_content": item["encrypted_content"], "summary": []}
    (_, turn) = messages_of({"role": "user", "content": "a"}, bare, {"role": "assistant", "content": "b"})
    assert turn == Message("assistant", "b", reasoning=text)


def test_responses_reasoning_of_others_falls_back_to_its_text():
    item = {"type": "reasoning", "encrypted_content": "AAAA", "summary": [{"type": "summary_text", "text": "s"}]}
    assert messages_of(item) == [Message("assistant", reasoning="s")]
    error = refusal(STRICT, input=[item])
    assert (error.code, error.field) == ("invalid_encrypted_content", "input[0].encrypted_content")
    foreign = replace(CONTEXT, tenant="another").seal_reasoning(b"t")
    assert messages_of(item | {"encrypted_content": foreign}) == [Message("assistant", reasoning="s")]


# -- tools


def test_responses_tools_reach_the_model_as_functions():
    prompt = read(tools=[FUNCTION, CUSTOM, NAMESPACE, {"type": "web_search", "external_web_access": False}])
    functions = [tool["function"] for tool in prompt.request.prompts[0].tools]
    assert [function["name"] for function in functions] == ["f", "raw", "ns__g"]
    assert functions[0] == {"name": "f", "parameters": FUNCTION["parameters"]}
    text_schema = functions[1]["parameters"]
    assert text_schema["properties"] == {"input": {"type": "string"}} and functions[1]["strict"]


def test_responses_tools_are_shown_as_they_were_declared():
    web_search = {"type": "web_search", "external_web_access": False}
    shown = answer_body(read(tools=[FUNCTION, CUSTOM, NAMESPACE, web_search]), done())["tools"]
    inner = {"type": "function", "description": None, "name": "g", "parameters": None, "strict": False}
    assert shown == [
        FUNCTION | {"description": None, "strict": False},
        CUSTOM,
        NAMESPACE | {"tools": [inner]},
        web_search,
    ]
    assert list(shown[0]) == ["type", "description", "name", "parameters", "strict"]


def test_responses_functions_are_strict_where_strict_mode_accepts_their_schema():
    closed = FUNCTION["parameters"] | {"required": ["a"], "additionalProperties": False}
    for members, is_strict in (({}, False), ({"parameters": closed}, True),
                               ({"parameters": closed, "strict": False}, False)):  # fmt: skip
        reply = read(tools=[FUNCTION | members])
        assert reply.request.prompts[0].tools[0]["function"].get("strict", False) is is_strict
    assert read(tools=[FUNCTION | {"strict": True}]).request.prompts[0].tools[0]["function"]["strict"] is True


def test_responses_custom_tool_with_a_grammar_is_constrained():
    form = {"type": "grammar", "syntax": "regex", "definition": "a+|b"}
    reply = read(tools=[CUSTOM | {"format": form}])
    parameters = reply.request.prompts[0].tools[0]["function"]["parameters"]
    assert parameters["properties"]["input"] == {"type": "string", "pattern": "^(?:a+|b)$"}
    reply = read(tools=[CUSTOM | {"format": form | {"syntax": "lark", "definition": "start: /a/"}}])
    parameters = reply.request.prompts[0].tools[0]["function"]["parameters"]
    assert parameters["properties"]["input"] == {"type": "string", "x-lark": "start: /a/"}
    assert refusal(tools=[CUSTOM | {"format": form | {"syntax": "ebnf"}}]).field == "tools[0].format.syntax"


def test_responses_names_the_members_with_schemas_of_tools():
    assert read(tools=[FUNCTION, CUSTOM, NAMESPACE]).request.prompts[0].schema_fields == {
        "f": "tools[0].parameters",
        "raw": "tools[1].format.definition",
        "ns__g": "tools[2].tools[0].parameters",
    }


def test_responses_tool_choice_forms():
    def choice(value: Any) -> tuple[str, str | None, list[str]]:
        prompt = read(tools=[FUNCTION, CUSTOM, NAMESPACE], tool_choice=value).request.prompts[0]
        return prompt.tool_choice, prompt.forced_tool, prompt.allowed_tools

    assert choice("required") == ("required", None, [])
    assert choice({"type": "function", "name": "f"}) == ("required", "f", [])
    assert choice({"type": "custom", "name": "raw"}) == ("required", "raw", [])
    assert choice({"type": "function", "name": "g", "namespace": "ns"}) == ("required", "ns__g", [])
    assert choice({"type": "function", "function": {"name": "f"}}) == ("required", "f", [])
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    assert choice(allowed) == ("auto", None, ["f"])
    assert read(tools=[FUNCTION], tool_choice="none").request.prompts[0].tools == []


def test_responses_items_add_tools():
    item = {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]}
    reply = read(input=[item, {"role": "user", "content": "a"}])
    assert [tool["function"]["name"] for tool in reply.request.prompts[0].tools] == ["f"]


# -- refusals

REFUSED = [  # members, field and code of the refusal
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": ""}, "input", "empty_string"),
    ({"input": []}, "input", "empty_array"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": {}}, "input", "invalid_type"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"type": "message", "role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"type": "nonsense"}]}, "input[0].type", "invalid_value"),
    ({"input": [{"type": "mcp_call"}]}, "input[0].type", "unsupported_value"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "missing_required_parameter"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]}, "input", None),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", None),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
     "input[0].content[0].type", "unsupported_value"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
     "input[0].content[0].file_id", "unsupported_value"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://h/f"}]}]},
     "input[0].content[0].file_url", "unsupported_value"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "data:,a"}]}]},
     "input[0].content[0].file_data", "invalid_value"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "YQ==", "filename": "a.pdf"}]}]},
     "input[0].content[0].file_data", "unsupported_value"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"context_management": {"type": "compaction"}}, "context_management", "invalid_type"),
    ({"context_management": [{}]}, "context_management[0].type", "missing_required_parameter"),
    ({"context_management": [{"type": "x"}]}, "context_management[0].type", "invalid_value"),
    ({"context_management": [{"type": "compaction"}] * 2}, "context_management", "array_above_max_length"),
    ({"context_management": [{"type": "compaction", "compact_threshold": 999}]},
     "context_management[0].compact_threshold", "integer_below_min_value"),
    ({"moderation": {"a": 1}}, "moderation", "unsupported_parameter"),
    ({"image": {"a": 1}}, "image", "unsupported_parameter"),
    ({"access_programs": {"a": 1}}, "access_programs", "unsupported_parameter"),
    ({"background": True, "store": False}, "background", "invalid_value"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"conversation": {"id": "conv_x"}}, "conversation", "unsupported_parameter"),
    ({"conversation": {}}, "conversation.id", "missing_required_parameter"),
    ({"background_options": {"completion_window": "2h"}}, "background_options.completion_window", "unsupported_value"),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "text.format.name",
     "missing_required_parameter"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "missing_required_parameter"),
    ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
    ({"max_tool_calls": 0}, "max_tool_calls", "integer_below_min_value"),
    ({"temperature": 2.5}, "temperature", "decimal_above_max_value"),
    ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"include": ["nothing"]}, "include[0]", "invalid_value"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "unsupported_value"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
    ({"metadata": {"a": 5}}, "metadata.a", "invalid_type"),
    ({"metadata": {"a" * 65: ""}}, "metadata", "invalid_value"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type", "unsupported_value"),
    ({"tools": [FUNCTION, {"type": "code_interpreter"}]}, "tools[1].type", "unsupported_value"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [FUNCTION]}, "tool_choice.name", "invalid_value"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice", "unsupported_value"),
    ({"service_tier": "golden"}, "service_tier", "invalid_value"),
    ({"truncation": "some"}, "truncation", "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "field", "code"), REFUSED)
def test_responses_refusals_name_the_member(members, field, code):
    error = refusal(**members)
    assert (error.field, error.code) == (field, code)


@pytest.mark.parametrize("kind", ["mcp", "file_search", "code_interpreter", "acme:search", "nonsense"])
def test_responses_tools_that_would_never_run_are_refused_by_name(kind):
    error = refusal(tools=[FUNCTION, {"type": kind}])
    assert (error.field, error.code) == ("tools[1].type", "unsupported_value") and f"'{kind}'" in error.message
    assert refusal(tools=[FUNCTION], tool_choice={"type": kind}).field.startswith("tool_choice")


@pytest.mark.parametrize(
    "kind",
    ["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "image_generation",
     "tool_search", "programmatic_tool_calling"],
)  # fmt: skip
def test_responses_tools_of_the_service_are_shown_and_kept_from_the_model(kind):
    reply = read(tools=[FUNCTION, {"type": kind, "x": [1]}])
    assert [tool["function"]["name"] for tool in reply.request.prompts[0].tools] == ["f"]
    assert answer_body(reply, done())["tools"][1] == {"type": kind, "x": [1]}
    assert refusal(tools=[{"type": kind}], tool_choice={"type": kind}).field == "tool_choice"


STRICT_REFUSED = [
    ({"foo": 1}, "foo", "unknown_parameter"),
    ({"top_k": 5}, "top_k", "unknown_parameter"),
    ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
    ({"messages": []}, "messages", "unsupported_parameter"),
    ({"max_output_tokens": 15}, "max_output_tokens", "integer_below_min_value"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_value"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "missing_required_parameter"),
    ({"input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "input[0].content[0].type",
     "invalid_value"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type", "unsupported_value"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input", None),
    ({"tools": [FUNCTION | {"strict": True}]}, "tools[0].parameters", "invalid_function_parameters"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
     "text.format.schema", "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize("rules", [LENIENT, STRICT])
def test_responses_error_names_the_new_place_of_a_chat_completions_member(rules):
    message = refusal(rules, response_format={"type": "json_object"}).message
    assert message.endswith("In the Responses API, this parameter has moved to 'text.format'.")


@pytest.mark.parametrize(("members", "field", "code"), STRICT_REFUSED)
def test_responses_strict_surface_refuses_what_the_service_refuses(members, field, code):
    error = refusal(STRICT, **members)
    assert (error.field, error.code) == (field, code)
    read(**members)  # the universal surface accepts it


def test_responses_members_without_effect_are_shown_again():
    labels = {"max_tool_calls": 3, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s",
              "user": "u", "metadata": {"a": "b"}, "instructions": "i"}  # fmt: skip
    hidden = {"client_metadata": {"a": 1}, "prompt_cache_options": {"mode": "x"}, "service_tier": "flex"}
    reasoning = {"effort": "high", "generate_summary": "auto", "context": "auto", "mode": "standard"}
    answer = answer_body(read(**labels, **hidden, reasoning=reasoning), done())
    assert {name: answer[name] for name in labels} == labels
    assert answer["service_tier"] == "default" and "client_metadata" not in answer
    assert answer["reasoning"] == {"context": "auto", "effort": "high", "mode": "standard", "summary": "auto"}


# -- answers

BODY = (
    b'{"id":"resp_0f","object":"response","created_at":1700000000,"status":"completed","background":false,'
    b'"completed_at":1700000002,"error":null,"frequency_penalty":0.0,"incomplete_details":null,"instructions":null,'
    b'"max_output_tokens":null,"max_tool_calls":null,"model":"m","output":[{"id":"msg_0f0000","type":"message",'
    b'"status":"completed","content":[{"type":"output_text","annotations":[],"logprobs":[],"text":"Hi"}],'
    b'"role":"assistant"}],"parallel_tool_calls":true,"presence_penalty":0.0,"previous_response_id":null,'
    b'"prompt_cache_key":null,"prompt_cache_retention":null,"reasoning":{"effort":null,"summary":null},'
    b'"safety_identifier":null,"service_tier":"default","store":false,"temperature":1.0,"text":{"format":{"type":'
    b'"text"},"verbosity":"medium"},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,"truncation":'
    b'"disabled","usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4,"cache_write_tokens":0},'
    b'"output_tokens":3,"output_tokens_details":{"reasoning_tokens":1},"total_tokens":12},"user":null,"metadata":{}}'
)


def test_responses_writes_body():
    reply = read()
    reply.timings = RequestTimings(2.5, 0, 0, 0)
    reply.add_events([PromptAccepted(0, [1]), ChoiceDelta(0, "H"), ChoiceDelta(0, "i"), done()])
    assert reply.render_body(USAGE) == BODY


def test_responses_writes_stream():
    opening = json.loads(BODY) | {"status": "in_progress", "completed_at": None, "output": [], "usage": None}
    opening_bytes = json.dumps(opening | {"service_tier": "auto"}, separators=(",", ":")).encode()
    place = b'"item_id":"msg_0f0000"'
    done_part = b'{"type":"output_text","annotations":[],"logprobs":[],"text":"Hi"}'
    frames = [
        (b"response.created", b'"response":%b' % opening_bytes),
        (b"response.in_progress", b'"response":%b' % opening_bytes),
        (b"response.output_item.added", b'"item":{"id":"msg_0f0000","type":"message","status":"in_progress",'
         b'"content":[],"role":"assistant"},"output_index":0'),
        (b"response.content_part.added", b'"content_index":0,%b,"output_index":0,"part":{"type":"output_text",'
         b'"annotations":[],"logprobs":[],"text":""}' % place),
        (b"response.output_text.delta", b'"content_index":0,"delta":"H",%b,"logprobs":[],"output_index":0' % place),
        (b"response.output_text.delta", b'"content_index":0,"delta":"i",%b,"logprobs":[],"output_index":0' % place),
        (b"response.output_text.done", b'"content_index":0,%b,"logprobs":[],"output_index":0' % place),
        (b"response.content_part.done", b'"content_index":0,%b,"output_index":0,"part":%b' % (place, done_part)),
        (b"response.output_item.done", b'"item":{"id":"msg_0f0000","type":"message","status":"completed","content":'
         b'[%b],"role":"assistant"},"output_index":0' % done_part),
        (b"response.completed", b'"response":%b' % BODY),
    ]  # fmt: skip
    tails = {b"response.output_text.done": b',"text":"Hi"'}
    expected = b"".join(
        b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%d%b}\n\n' % (kind, kind, rest, n, tails.get(kind, b""))
        for n, (kind, rest) in enumerate(frames)
    )
    answer = stream(read(stream=True), ChoiceDelta(0, "H"), ChoiceDelta(0, "i"), done())
    assert answer == expected + b"data: [DONE]\n\n"


ANSWERS: dict[str, tuple[dict[str, Any], list[Event], list[str]]] = {  # members, events, types of the output items
    "text": ({}, [ChoiceDelta(0, "a"), done()], ["message"]),
    "nothing": ({}, [done()], ["message"]),
    "reasoning": ({}, [ChoiceDelta(0, "t", "reasoning"), ChoiceDelta(0, "a"), done()], ["reasoning", "message"]),
    "summary": ({"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
                [ChoiceDelta(0, "t", "reasoning"), ChoiceDelta(0, "a"), done()], ["reasoning", "message"]),
    "one call": ({"tools": [FUNCTION]}, [call(0, "c", "f"), call(0, arguments="{}"), done("tool")], ["function_call"]),
    "text and calls": ({"tools": [FUNCTION, CUSTOM, NAMESPACE]},
                       [ChoiceDelta(0, "a"), call(0, "c", "f", '{"a"'), call(0, arguments=":1}"),
                        call(1, "d", "raw", '{"input": "x\\u00e9'), call(1, arguments='\\n"}'), call(2, "e", "ns__g"),
                        done("tool")], ["message", "function_call", "custom_tool_call", "function_call"]),
    "length": ({}, [ChoiceDelta(0, "t", "reasoning"), ChoiceDelta(0, "a"), done("length")], ["reasoning", "message"]),
    "cut call": ({"tools": [FUNCTION]}, [call(0, "c", "f", '{"a'), done("length")], ["function_call"]),
    "cut reasoning": ({}, [ChoiceDelta(0, "t", "reasoning"), done("length")], ["reasoning"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_responses_stream_ends_with_the_answer_in_one_piece(name):
    members, events, kinds = ANSWERS[name]
    answer = answer_body(read(**members), *events)
    streamed = events_of(stream(read(**members, stream=True), *events))
    assert [event["type"] for event in streamed[:2]] == ["response.created", "response.in_progress"]
    assert streamed[-1]["type"] == f"response.{answer['status']}" and streamed[-1]["response"] == answer
    assert [item["type"] for item in answer["output"]] == kinds
    added = [event for event in streamed if event["type"] == "response.output_item.added"]
    ended = [event for event in streamed if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in ended] == answer["output"]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in answer["output"]]
    assert [event["output_index"] for event in ended] == list(range(len(kinds)))
    assert all(one["sequence_number"] < two["sequence_number"] for one, two in pairwise(added))


@pytest.mark.parametrize("name", ANSWERS)
def test_responses_deltas_join_to_the_texts_of_their_done_events(name):
    members, events, _ = ANSWERS[name]
    texts: dict[tuple[str, str], str] = {}
    for event in events_of(stream(read(**members, stream=True), *events)):
        kind, _, step = event["type"].rpartition(".")
        if step == "delta":
            key = (kind, event["item_id"])
            texts[key] = texts.get(key, "") + event["delta"]
        elif step == "done" and (kind, event.get("item_id")) in texts:
            final = event.get("text", event.get("arguments", event.get("input")))
            assert texts.pop((kind, event["item_id"])) == final
    assert not texts


def test_responses_calls_have_their_declared_names():
    members, events, _ = ANSWERS["text and calls"]
    _, function, custom, inner = answer_body(read(**members), *events)["output"]
    assert function == {"id": "fc_0f0001", "type": "function_call", "status": "completed", "arguments": '{"a":1}',
                        "call_id": "c", "name": "f"}  # fmt: skip
    assert (custom["input"], custom["name"], custom["call_id"]) == ("xé\n", "raw", "d")
    assert (inner["name"], inner["namespace"], inner["arguments"]) == ("g", "ns", "")


def test_responses_limit_leaves_the_last_item_incomplete():
    for name, statuses in (("length", [None, "incomplete"]), ("cut call", ["incomplete"])):
        members, events, _ = ANSWERS[name]
        answer = answer_body(read(**members), *events)
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item.get("status") for item in answer["output"]] == statuses
        assert answer["completed_at"] is None


def test_responses_summary_carries_the_reasoning_if_the_client_asks_for_one():
    members, events, _ = ANSWERS["summary"]
    item = answer_body(read(**members), *events)["output"][0]
    assert list(item) == ["id", "type", "encrypted_content", "summary"]
    assert item["summary"] == [{"type": "summary_text", "text": "t"}]
    kinds = [event["type"] for event in events_of(stream(read(**members, stream=True), *events))]
    assert kinds[3:7] == [
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
    ]


def test_responses_logprobs_cover_the_tokens_of_the_text():
    token = TokenInfo(5, "a", b"a", -0.5, top_tokens=[TokenInfo(5, "a", b"a", -0.5), TokenInfo(6, "b", b"b")])
    events = [ChoiceDelta(0, "t", "reasoning", [token]), ChoiceDelta(0, "", tokens=[token]),
              ChoiceDelta(0, "aa", tokens=[token]), done()]  # fmt: skip
    members = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    scored = {"token": "a", "bytes": [97], "logprob": -0.5}
    unlikely = {"token": "b", "bytes": [98], "logprob": -9999.0}
    part = answer_body(read(**members), *events)["output"][1]["content"][0]
    final = scored | {"top_logprobs": [scored, unlikely]}
    assert part["logprobs"] == [final, final]
    streamed = events_of(stream(read(**members, stream=True), *events))
    (delta,) = [event for event in streamed if event["type"] == "response.output_text.delta"]
    assert delta["logprobs"] == [final, final]  # Open Responses requires the bytes in events too


def test_responses_error_in_a_stream_is_followed_by_the_failed_response():
    reply = read(stream=True)
    data = reply.render_chunk([PromptAccepted(0, [1]), ChoiceDelta(0, "a")])
    data += reply.fail_stream(EngineError("The engine failed."))
    *_, error, failed = events_of(data)
    fault = {"code": "server_error", "message": "The engine failed.", "param": None, "type": "server_error"}
    assert error["error"] == fault and error["message"] == "The engine failed."
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "The engine failed."}
    *_, busy, _ = events_of(read(stream=True).fail_stream(Overloaded("Full.")))
    assert busy["code"] == "rate_limit_exceeded"


def test_responses_keepalive_is_an_event_once_the_response_is_announced():
    reply = read(stream=True)
    assert reply.render_ping() == b": ping\n\n" and reply.ping_interval == 15
    reply.render_chunk([PromptAccepted(0, [1])])
    assert reply.render_ping() == b'event: keepalive\ndata: {"type":"keepalive","sequence_number":2}\n\n'
    assert b'"sequence_number":3' in reply.render_chunk([ChoiceDelta(0, "a")])


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\"b\\\\\\u00e9\\ud83d\\ude00\\n\n"}', 'a"b\\é😀\n\n'),
        ('{"input": "cut off \\', "cut off "),
        ("no object", "no object"),
        ('{"more": 1, "input": "late"}', "late"),
    ],
)
def test_responses_custom_tool_text_is_sent_as_it_arrives(size: int, arguments: str, text: str):
    reply = read(tools=[CUSTOM], stream=True)
    pieces = [arguments[start : start + size] for start in range(0, len(arguments), size)]
    calls = [call(0, "c", CUSTOM["name"]), *(call(0, arguments=piece) for piece in pieces)]
    events = events_of(stream(reply, *calls, done("tool")))
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == text and all(deltas)
    assert [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"] == [text]
    assert events[-1]["response"]["output"][0]["input"] == text
    if arguments.startswith('{"input"') and size < 7:
        assert len(deltas) > 2


# -- summaries

TRIGGER = {"type": "compaction_trigger"}


def test_responses_compaction_trigger_asks_for_a_summary():
    request = read(input=[{"role": "user", "content": "a"}, TRIGGER]).request
    assert isinstance(request.prompts[0], ChatPrompt)
    assert request.prompts[0].edits == [SummarizeContext(0, SUMMARY_REQUEST)]
    assert request.prompts[0].messages == [Message("user", "a")]
    for rules in (LENIENT, STRICT):
        late = refusal(rules, input=[{"role": "user", "content": "a"}, TRIGGER, {"role": "user", "content": "b"}])
        assert late.message == "An item of type 'compaction_trigger' must be the last one."


def test_responses_stream_a_summary_as_a_sealed_item():
    reply = read(input=[{"role": "user", "content": "a"}, TRIGGER], stream=True)
    events = events_of(stream(reply, ChoiceDelta(0, "hm", "reasoning"), ChoiceDelta(0, "They "), ChoiceDelta(0, "met."),
                              ChoiceDone(0, "stop", USAGE)))  # fmt: skip
    place = {"item_id": "cmp_0f0000", "output_index": 0}
    sealed = CONTEXT.seal_reasoning(b"\x1eThey met.")
    item = {"id": "cmp_0f0000", "type": "compaction", "encrypted_content": sealed}
    assert [event for event in events[2:-1] if event.pop("sequence_number")] == [
        {"type": "response.output_item.added", "output_index": 0, "item": item | {"encrypted_content": ""}},
        {"type": "response.compaction.compacting"} | place,
        {"type": "response.output_item.done", "output_index": 0, "item": item},
    ]
    assert events[-1]["response"]["output"] == [item]


def test_responses_summarize_a_conversation_above_the_threshold_before_the_answer():
    def edits(**members: Any) -> list[Any]:
        (prompt,) = read(context=context, **members).request.prompts
        assert isinstance(prompt, ChatPrompt)
        return prompt.edits

    entry, context = {"type": "compaction"}, replace(CONTEXT, context_length=4000)
    (edit,) = edits(context_management=[entry])
    assert (edit.threshold, edit.answer_heading) == (3200, "Summary of the conversation so far:")
    assert edits(context_management=[entry | {"compact_threshold": 1000}])[0].threshold == 1000
    assert edits(context_management=[entry | {"compact_threshold": 4000}]) == []
    assert edits(context_management=[]) == edits(context_management=[entry], generate=False) == []


def test_responses_stream_a_summary_before_the_answer():
    reply = read(input="a", stream=True, context_management=[{"type": "compaction"}])
    events = events_of(stream(reply, ChoiceDone(0, "stop", USAGE, summary="They met."), PromptAccepted(1, [5]),
                              ChoiceDelta(1, "b"), ChoiceDone(1, "stop", USAGE)))  # fmt: skip
    item = {"id": "cmp_0f0000", "type": "compaction", "encrypted_content": CONTEXT.seal_reasoning(b"\x1eThey met.")}
    assert [event["type"] for event in events].count("response.created") == 1
    assert [event for event in events[2:5] if event.pop("sequence_number")] == [
        {"type": "response.output_item.added", "output_index": 0, "item": item | {"encrypted_content": ""}},
        {"type": "response.compaction.compacting", "item_id": "cmp_0f0000", "output_index": 0},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
    ]
    shown, message = events[-1]["response"]["output"]
    assert shown == item and (message["id"], message["content"][0]["text"]) == ("msg_0f0001", "b")


@pytest.mark.parametrize(
    ("text", "reason", "status"),
    [("They", "length", "incomplete"), ("They", "cancelled", "incomplete"), ("They They", "repetition", "completed"),
     ("", "length", "incomplete"), ("", "stop", "completed"), (" \n", "stop", "completed")],
)  # fmt: skip
def test_responses_summary_that_is_cut_off_or_empty_replaces_nothing(text: str, reason: Any, status: str):
    deltas = [ChoiceDelta(0, "hm", "reasoning"), *([ChoiceDelta(0, text)] if text else [])]
    for streams in (False, True):
        reply = read(input=[{"role": "user", "content": "a"}, TRIGGER], stream=streams)
        if streams:
            *events, last = events_of(stream(reply, *deltas, done(reason)))
            assert "response.output_item.done" not in [event["type"] for event in events]
            response = last["response"]
        else:
            response = answer_body(reply, *deltas, done(reason))
        assert (response["status"], response["output"]) == (status, [])


def test_responses_summary_stands_for_all_items_before_it():
    def compaction(text: bytes) -> dict[str, Any]:
        return {"type": "compaction", "encrypted_content": CONTEXT.seal_reasoning(text)}

    early = [{"role": "developer", "content": "d"}, {"role": "user", "content": "a"},
             {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]  # fmt: skip
    heading = "Summary of the conversation so far:\n"
    for rules in (LENIENT, STRICT):
        body = read(rules, input=[*early, TRIGGER, compaction(b"\x1eThey met."), {"role": "user", "content": "b"}])
        assert isinstance(body.request.prompts[0], ChatPrompt)
        assert body.request.prompts[0].messages == [
            Message("system", "d"), Message("user", f"{heading}They met.\n\nb"),
        ]  # fmt: skip
    late_output = {"type": "function_call_output", "call_id": "c", "output": "r"}
    shell_call = {"type": "local_shell_call", "id": "s", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}}
    shell_output = {"type": "local_shell_call_output", "id": "s", "output": "r"}
    for call_item, output in ((early[2], late_output), (shell_call, shell_output)):
        assert messages_of(call_item, output)[1].content == "r"
        orphan = refusal(input=[call_item, compaction(b"\x1eThey met."), output])
        assert "No tool call found" in orphan.message and orphan.field == "input"
    # The older form, of /v1/responses/compact, stands after messages of the user that are kept.
    kept = messages_of({"role": "user", "content": "a"}, compaction(b"They met."))
    assert kept == [Message("user", f"a\n\n{heading}They met.")]
