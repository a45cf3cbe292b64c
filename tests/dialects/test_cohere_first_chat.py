"""Chat of Cohere's first version: meaning of bodies, refusals, and the exact bytes of events and answers."""

import dataclasses
import json
from typing import Any

import pytest
from test_cohere import CALLS, CONTEXT, COUNTS, ID, PLAIN, USAGE, answer_body

from parley.dialects.cohere import DIALECT, first_chat
from parley.dialects.cohere.api_rules import LENIENT_COHERE_RULES, STRICT_COHERE_RULES, CohereRules
from parley.dialects.cohere.first_conversation import schema_of_type
from parley.dialects.mounts import error_dialect, universal_mounts
from parley.dialects.request_context import RequestContext
from parley.errors import EngineDied, ParleyError, TimeLimitPassed
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    Grammar,
    Message,
    PromptAccepted,
    SamplingOptions,
    StopConditions,
    TextPrompt,
    ToolCall,
)

GENERATION_ID = b"dbef137d-bc67-53b9-ac19-849a52d0add5"
TOOL = {
    "name": "f",
    "description": "d",
    "parameter_definitions": {
        "a": {"description": "x", "type": "int", "required": True},
        "b": {"type": "List[str]", "required": False},
        "c": {"type": "datetime"},
    },
}
CALL = {"name": "f", "parameters": {"a": 1}}
RESULT = {"call": CALL, "outputs": [{"sky": "blue"}]}
META = b'"meta":{"api_version":{"version":"1"},' + COUNTS.removeprefix(b'"usage":{')
BOTH_RULES = pytest.mark.parametrize("rules", [LENIENT_COHERE_RULES, STRICT_COHERE_RULES])


def read_first(
    rules: CohereRules = LENIENT_COHERE_RULES, context: RequestContext = CONTEXT, **members: Any
) -> first_chat.FirstChatReply:
    return first_chat.read_first_chat(rules, json.dumps({"message": "Hello"} | members).encode(), context)


def chat_of(**members: Any) -> ChatPrompt:
    (prompt,) = read_first(**members).request.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refusal(**members: Any) -> tuple[int, str]:
    with pytest.raises(ParleyError) as caught:
        read_first(**members)
    status, data, _ = DIALECT.render_error(caught.value)
    return status, json.loads(data)["message"]


def stream(reply: Any, *events: Any, done: str = "stop") -> bytes:
    """Return a stream, each event of which comes in a step of its own."""
    batches = [PromptAccepted(0, [1]), *events, ChoiceDone(0, done, USAGE, None)]
    return b"".join(reply.render_chunk([event]) for event in batches) + reply.finish_stream(USAGE)


# -- bytes


def test_first_chat_stream_is_lines_of_json():
    reply = read_first(chat_history=[{"role": "User", "message": "Hm"}])
    assert reply.media_type == "application/stream+json"
    data = stream(reply, ChoiceDelta(0, "Thought", "reasoning"), ChoiceDelta(0, "Hé"), ChoiceDelta(0, "llo"))
    assert data.splitlines(keepends=True) == [
        b'{"is_finished":false,"event_type":"stream-start","generation_id":"%b"}\n' % GENERATION_ID,
        '{"is_finished":false,"event_type":"text-generation","text":"Hé"}\n'.encode(),
        b'{"is_finished":false,"event_type":"text-generation","text":"llo"}\n',
        b'{"is_finished":true,"event_type":"stream-end","response":{"response_id":"%b","text":"H\xc3\xa9llo",'
        b'"generation_id":"%b","chat_history":[{"role":"User","message":"Hm"},{"role":"USER","message":"Hello"},'
        b'{"role":"CHATBOT","message":"H\xc3\xa9llo"}],"finish_reason":"COMPLETE",%b},"finish_reason":"COMPLETE"}\n'
        % (ID, GENERATION_ID, META),
    ]


def test_first_chat_stream_has_pieces_of_calls_and_then_all_calls():
    events = stream(read_first(tools=[TOOL]), ChoiceDelta(0, "So."), *CALLS, done="tool").splitlines()
    calls = b'"tool_calls":[{"name":"f","parameters":{"a":1}},{"name":"g","parameters":{}}]'
    chunk = b'{"is_finished":false,"event_type":"tool-calls-chunk","tool_call_delta":{"index":%d,%b}}'
    assert events[2:-1] == [
        chunk % (0, b'"name":"f"'),
        chunk % (0, b'"parameters":"{\\"a\\""'),
        chunk % (0, b'"parameters":":1}"'),
        chunk % (1, b'"name":"g"'),
        b'{"is_finished":false,"event_type":"tool-calls-generation","text":"So.",' + calls + b"}",
    ]
    assert b'{"role":"CHATBOT","message":"So.",' + calls + b"}]" in events[-1]
    assert events[-1].endswith(META + b"," + calls + b'},"finish_reason":"COMPLETE"}')


@pytest.mark.parametrize("header", [b"accepts", b"accept"])
def test_first_chat_stream_is_server_sent_events_for_those_who_ask(header):
    reply = read_first(context=dataclasses.replace(CONTEXT, headers={header: b"text/event-stream"}))
    assert reply.media_type == "text/event-stream"
    start, text, end = stream(reply, ChoiceDelta(0, "Hi")).removesuffix(b"\n\n").split(b"\n\n")
    assert start.startswith(b'event: stream-start\ndata: {"is_finished":false,')
    assert text == (b'event: text-generation\ndata: {"is_finished":false,"event_type":"text-generation","text":"Hi"}')
    assert end.startswith(b'event: stream-end\ndata: {"is_finished":true,')


def test_failed_first_chat_stream_ends_with_the_error():
    reply = read_first()
    reply.render_chunk([ChoiceDelta(0, "Hi")])
    for error, reason in (
        (EngineDied("It ended."), b"ERROR"),
        (TimeLimitPassed("It ended.", limit="server"), b"TIMEOUT"),
    ):
        assert reply.fail_stream(error) == (
            b'{"is_finished":true,"event_type":"stream-end","response":{"response_id":"%b","text":"Hi",'
            b'"generation_id":"%b","finish_reason":"%b"},"finish_reason":"%b","error":"It ended."}\n'
            % (ID, GENERATION_ID, reason, reason)
        )


def test_whole_first_chat_answer_repeats_the_conversation():
    reply = read_first(tools=[TOOL], tool_results=[RESULT])
    body = answer_body(reply, ChoiceDelta(0, "Hm", "reasoning"), ChoiceDelta(0, "Blue."))
    assert body == (
        b'{"response_id":"%b","text":"Blue.","generation_id":"%b","chat_history":[{"role":"USER","message":"Hello"},'
        b'{"role":"TOOL","tool_results":[{"call":{"name":"f","parameters":{"a":1}},"outputs":[{"sky":"blue"}]}]},'
        b'{"role":"CHATBOT","message":"Blue."}],"finish_reason":"COMPLETE",%b}' % (ID, GENERATION_ID, META)
    )


def test_first_chat_leaves_out_a_call_that_was_cut_off():
    answer = json.loads(answer_body(read_first(tools=[TOOL]), CALLS[0], done="length"))
    assert "tool_calls" not in answer and answer["finish_reason"] == "MAX_TOKENS"


@pytest.mark.parametrize(
    ("done", "stop", "reason"),
    [
        ("stop", None, "COMPLETE"),
        ("stop", "END", "STOP_SEQUENCE"),
        ("length", None, "MAX_TOKENS"),
        ("tool", None, "COMPLETE"),
        ("cancel", None, "ERROR"),
    ],
)
def test_first_chat_finish_reasons(done, stop, reason):
    assert json.loads(answer_body(read_first(), done=done, stop=stop))["finish_reason"] == reason


# -- what bodies mean


def test_plain_first_chat_has_the_documented_defaults_and_needs_no_model():
    request = read_first().request
    assert request.sampling == SamplingOptions(temperature=0.3, top_p=0.75)
    assert request.stop_conditions == StopConditions(reserved_tokens=1)
    assert (request.model, request.stream, request.grammar, request.on_overflow) == ("", False, None, "refuse")
    assert request.prompts == [ChatPrompt([Message("user", "Hello")])]


@BOTH_RULES
def test_first_chat_members_steer_the_answer(rules):
    request = read_first(
        rules, model="m", temperature=0.5, p=0.9, k=7, seed=3, frequency_penalty=0.25, max_tokens=5,
        stop_sequences=["a", "b"], stream=True, response_format={"type": "json_object", "schema": {"type": "object"}},
        prompt_truncation="AUTO_PRESERVE_ORDER", force_single_step=True, citation_quality="off", connectors=[],
        conversation_id="", search_queries_only=False, max_input_tokens=None,
    ).request  # fmt: skip
    assert request.sampling == SamplingOptions(temperature=0.5, top_p=0.9, top_k=7, seed=3, frequency_penalty=0.25)
    assert request.stop_conditions == StopConditions(strings=["a", "b"], max_tokens=5, reserved_tokens=1)
    assert (request.model, request.stream, request.on_overflow) == ("m", True, "oldest_turns")
    assert request.grammar == Grammar("json", {"type": "object"}, field="response_format.schema")


@BOTH_RULES
def test_first_chat_history_is_the_conversation_before_the_message(rules):
    history = [
        {"role": "SYSTEM", "message": "Be brief."},
        {"role": "USER", "message": "Sky?"},
        {"role": "CHATBOT", "message": "I look.", "tool_calls": [CALL, CALL]},
        {"role": "TOOL", "tool_results": [RESULT, {"call": CALL, "outputs": [{"text": "x"}, {"y": 2}]}]},
        {"role": "CHATBOT", "message": "Blue."},
    ]
    assert chat_of(rules=rules, preamble="Be kind.", chat_history=history, tools=[TOOL]).messages == [
        Message("system", "Be kind."),
        Message("system", "Be brief."),
        Message("user", "Sky?"),
        Message("assistant", "I look.", tool_calls=[ToolCall("f_1", "f", '{"a":1}'), ToolCall("f_2", "f", '{"a":1}')]),
        Message("tool", '{"sky":"blue"}', "f", tool_call_id="f_1"),
        Message("tool", 'x\n{"y":2}', "f", tool_call_id="f_2"),
        Message("assistant", "Blue."),
        Message("user", "Hello"),
    ]


def test_first_chat_results_answer_the_calls_of_the_last_turn():
    history = [{"role": "USER", "message": "Sky?"}, {"role": "CHATBOT", "tool_calls": [CALL]}]
    prompt = chat_of(message="", chat_history=history, tools=[TOOL], tool_results=[RESULT])
    assert prompt.messages == [
        Message("user", "Sky?"),
        Message("assistant", None, tool_calls=[ToolCall("f_1", "f", '{"a":1}')]),
        Message("tool", '{"sky":"blue"}', "f", tool_call_id="f_1"),
    ]


def test_first_chat_results_of_other_calls_follow_a_turn_with_these_calls():
    prompt = chat_of(message="Sky?", tools=[TOOL], tool_results=[RESULT])
    assert prompt.messages == [
        Message("user", "Sky?"),
        Message("assistant", None, tool_calls=[ToolCall("f_1", "f", '{"a":1}')]),
        Message("tool", '{"sky":"blue"}', "f", tool_call_id="f_1"),
    ]


def test_first_chat_result_of_an_open_call_comes_before_other_calls():
    history = [{"role": "USER", "message": "Sky?"}, {"role": "CHATBOT", "message": "", "tool_calls": [CALL]}]
    other = {"call": {"name": "g", "parameters": {}}, "outputs": [{"text": "x"}]}
    prompt = chat_of(message="", chat_history=history, tools=[TOOL], tool_results=[other, RESULT])
    assert prompt.messages[1:] == [
        Message("assistant", None, tool_calls=[ToolCall("f_1", "f", '{"a":1}')]),
        Message("tool", '{"sky":"blue"}', "f", tool_call_id="f_1"),
        Message("assistant", None, tool_calls=[ToolCall("g_2", "g", "{}")]),
        Message("tool", "x", "g", tool_call_id="g_2"),
    ]


@BOTH_RULES
def test_first_chat_tools_have_types_of_python(rules):
    prompt = chat_of(rules=rules, tools=[TOOL, {"name": "g", "description": "e"}])
    parameters = {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "x"},
            "b": {"type": "array", "items": {"type": "string"}},
            "c": {},
        },
        "required": ["a"],
    }
    assert [tool["function"] for tool in prompt.tools] == [
        {"name": "f", "description": "d", "parameters": parameters},
        {"name": "g", "description": "e", "parameters": {"type": "object", "properties": {}}},
    ]
    assert prompt.schema_fields == {"f": "tools[0].parameter_definitions", "g": "tools[1].parameter_definitions"}


@pytest.mark.parametrize(
    ("type_name", "schema"),
    [
        ("str", {"type": "string"}),
        ("Float", {"type": "number"}),
        ("boolean", {"type": "boolean"}),
        ("dict", {"type": "object"}),
        ("Dict[str, int]", {"type": "object"}),
        ("list", {"type": "array"}),
        ("typing.List[List[bool]]", {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}}),
        ("Tuple[int, str]", {"type": "array"}),
        ("Optional[int]", {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        ("Literal['a']", {}),
        ("", {}),
    ],
)
def test_first_chat_types_of_python_as_schemas(type_name, schema):
    assert schema_of_type(type_name) == schema


def test_first_chat_documents_keep_excluded_members_from_the_model():
    documents = [{"id": "b", "title": "t", "secret": "s", "_excludes": ["secret"]}, {"text": "u"}]
    assert chat_of(documents=documents).options == {"documents": [{"id": "b", "title": "t"}, {"text": "u"}]}
    text = "Document b:\ntitle: t\n\nDocument 1:\ntext: u\n\nHello"
    assert chat_of(context=PLAIN, documents=documents).messages == [Message("user", text)]


def test_first_chat_safety_mode_is_a_variable_of_the_template():
    assert chat_of(safety_mode="NONE").options == {"safety_mode": "NONE"}
    assert chat_of(context=PLAIN, safety_mode="NONE").options == {}
    assert refusal(context=PLAIN, safety_mode="STRICT")[0] == 400


def test_first_chat_raw_prompt_is_no_conversation():
    assert read_first(raw_prompting=True).request.prompts == [TextPrompt("Hello", add_special_tokens=True)]


# -- refusals

WITH_RESULTS = {"tools": [TOOL], "message": ""}
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"message": None}, 400, "invalid request: required 'message' param is missing or empty."),
    ({"message": ""}, 400,
     "invalid request: message must be at least 1 token long or tool results must be specified."),
    ({"message": 5}, 422, "invalid type: parameter 'message' is of type number but should be of type string."),
    ({"chat_history": [{"role": "BOT", "message": "a"}]}, 400,
     "invalid request: chat_history[0].role must be one of 'USER' or 'CHATBOT' or 'SYSTEM' or 'TOOL', but got 'BOT'."),
    ({"chat_history": [{"message": "a"}]}, 400,
     "invalid request: required 'chat_history[0].role' param is missing or empty."),
    ({"chat_history": [{"role": "USER"}]}, 400,
     "invalid request: required 'chat_history[0].message' param is missing or empty."),
    ({"conversation_id": "a"}, 400, "invalid request: conversation_id 'a' is not supported by this server"),
    ({"connectors": [{"id": "web-search"}]}, 400, "invalid request: connectors [{'id': 'web-search'}] are not"),
    ({"search_queries_only": True}, 400, "invalid request: search_queries_only true is not supported"),
    ({"max_input_tokens": 5}, 400, "invalid request: max_input_tokens 5 is not supported"),
    ({"citation_quality": "accurate"}, 400, "invalid request: citation_quality 'accurate' is not supported"),
    ({"citation_quality": "good"}, 400, "invalid request: citation_quality must be one of 'ENABLED' or"),
    ({"prompt_truncation": "auto"}, 400, "invalid request: prompt_truncation must be one of 'OFF' or 'AUTO' or"),
    ({"tool_results": [RESULT]}, 400, "invalid request: tool_results are only allowed with tools."),
    (WITH_RESULTS | {"tool_results": [{"outputs": []}]}, 400,
     "invalid request: required 'tool_results[0].call' param is missing or empty."),
    (WITH_RESULTS | {"tool_results": [{"call": {"parameters": {}}}]}, 400,
     "invalid request: required 'tool_results[0].call.name' param is missing or empty."),
    ({"tools": [{"description": "d"}]}, 400, "invalid request: required 'tools[0].name' param is missing or empty."),
    ({"tools": [{"name": "a b", "description": "d"}]}, 400, "invalid request: tool names can only contain certain"),
    ({"tools": [TOOL, TOOL]}, 400, "invalid request: 'tools[1].name': two tools are called 'f'."),
    ({"tools": [{"name": "f", "parameter_definitions": {"a": {}}}]}, 400,
     "invalid request: required 'tools[0].parameter_definitions.a.type' param is missing or empty."),
    ({"documents": [{"id": "a"}]}, 400, "invalid request: document at index 0 cannot be empty."),
    ({"raw_prompting": True, "preamble": "a"}, 400, "invalid request: 'preamble': not allowed with 'raw_prompting'."),
    ({"response_format": {"type": "text", "schema": {}}}, 400, "invalid request: 'response_format.schema': only"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "status", "sentence"), REFUSED, ids=[str(members) for members, _, _ in REFUSED])
def test_first_chat_refusals_name_member_value_and_range(members, status, sentence):
    actual_status, actual_sentence = refusal(**members)
    assert actual_status == status and actual_sentence.startswith(sentence)


@pytest.mark.parametrize(
    ("members", "path"),
    [
        ({"messages": []}, "messages"),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"chat_history": [{"role": "USER", "message": "a", "name": "b"}]}, "chat_history[0].name"),
        ({"tools": [{"name": "f", "parameters": {}}]}, "tools[0].parameters"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
    ],
)
def test_strict_first_chat_refuses_members_that_the_original_lacks(members, path):
    status, sentence = refusal(rules=STRICT_COHERE_RULES, **members)
    assert status == 422 and sentence.startswith(f"unknown field: parameter '{path}' is not a valid field.")
    read_first(**members)


def test_paths_of_openais_chat_keep_its_errors():
    for path in ("/v1/chat/completions", "/v1/chat/completions/x/y"):
        assert error_dialect(universal_mounts(), path).name == "parley"
