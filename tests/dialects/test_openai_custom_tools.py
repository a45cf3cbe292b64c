"""Custom tools of chat completions: what the model sees, the exact form of calls, and who refuses them."""

import json
from functools import partial
from typing import Any

import pytest

from parley.dialects.databricks import chat as databricks_chat
from parley.dialects.databricks.api_rules import LENIENT_DATABRICKS_RULES, STRICT_DATABRICKS_RULES
from parley.dialects.openai import chat, tokens
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import chat as vllm_chat
from parley.errors import BadRequest, InvalidValue, Unsupported
from parley.types import ChoiceDelta, ChoiceDone, Message, PromptAccepted, TokenInfo, ToolCall, ToolCallDelta, Usage

CONTEXT = RequestContext("0f", 1700000000, "fp_1", headers={b"content-type": b"application/json"})
USAGE = Usage(prompt_tokens=9, completion_tokens=3)
FUNCTION = {"type": "function", "function": {"name": "f", "description": "Adds.", "parameters": {"type": "object"}}}
CUSTOM = {"type": "custom", "custom": {"name": "raw", "description": "Raw text."}}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}
CUSTOM_CHOICE = {"type": "custom", "custom": {"name": "raw"}}


def body_of(**members: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | members).encode()


def read_chat(**members: Any) -> chat.ChatReply:
    return chat.read_chat_request(body_of(**members), CONTEXT)


def custom_with(form: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": CUSTOM["custom"] | {"format": form}}


def frames(data: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in data.split(b"\n\n") if line and line != b"data: [DONE]"]


def call_delta(index: int, call_id: str | None = None, name: str | None = None, arguments: str = "") -> ChoiceDelta:
    return ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(index, call_id, name, arguments))


def test_custom_tool_is_a_strict_function_with_one_text():
    tools = read_chat(tools=[FUNCTION, CUSTOM]).request.prompts[0].tools
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    function = {"name": "raw", "description": "Raw text.", "parameters": schema, "strict": True}
    assert tools == [FUNCTION, {"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("form", "text_schema"),
    [
        (None, {}),
        ({"type": "text"}, {}),
        (GRAMMAR, {"x-lark": "start: /a+/"}),
        ({"type": "grammar", "grammar": {"syntax": "regex", "definition": "a|b"}}, {"pattern": "^(?:a|b)$"}),
    ],
)
def test_custom_format_becomes_the_schema_of_the_text(form: Any, text_schema: dict[str, str]):
    (tool,) = read_chat(tools=[custom_with(form)]).request.prompts[0].tools
    assert tool["function"]["parameters"]["properties"]["input"] == {"type": "string"} | text_schema


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "custom"}]}, "tools[0].custom", "missing_required_parameter"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name", "missing_required_parameter"),
    ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name", "invalid_value"),
    ({"tools": [custom_with({"type": "peg"})]}, "tools[0].custom.format.type", "invalid_value"),
    ({"tools": [custom_with({"type": "grammar"})]}, "tools[0].custom.format.grammar", "missing_required_parameter"),
    ({"tools": [custom_with({"type": "grammar", "grammar": {}})]},
     "tools[0].custom.format.grammar.syntax", "missing_required_parameter"),
    ({"tools": [custom_with({"type": "grammar", "grammar": {"syntax": "peg", "definition": "a"}})]},
     "tools[0].custom.format.grammar.syntax", "invalid_value"),
    ({"tools": [custom_with({"type": "grammar", "grammar": {"syntax": "lark"}})]},
     "tools[0].custom.format.grammar.definition", "missing_required_parameter"),
    ({"tools": [FUNCTION, {"type": "custom", "custom": {"name": "f"}}]}, "tools[1].custom.name", "invalid_value"),
    ({"tool_choice": CUSTOM_CHOICE}, "tool_choice", "invalid_value"),
    ({"tools": [CUSTOM], "tool_choice": {"type": "custom"}}, "tool_choice.custom", "missing_required_parameter"),
    ({"tools": [CUSTOM], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
     "tool_choice.custom.name", "invalid_value"),
    ({"tools": [CUSTOM], "tool_choice": {"type": "function", "function": {"name": "raw"}}},
     "tool_choice.function.name", "invalid_value"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
     "messages[0].tool_calls[0].custom", "missing_required_parameter"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f"}}]}]},
     "messages[0].tool_calls[0].custom.input", "missing_required_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "field", "code"), CASES, ids=[case[1] for case in CASES])
def test_custom_tool_error_names_wrong_field(members: dict[str, Any], field: str, code: str):
    with pytest.raises(BadRequest) as caught:
        read_chat(**members)
    assert (caught.value.field, caught.value.code, caught.value.status) == (field, code, 400)


def test_custom_tool_may_be_chosen_alone_or_among_others():
    def choice(value: Any) -> tuple[str, str | None, list[str]]:
        prompt = read_chat(tools=[FUNCTION, CUSTOM], tool_choice=value).request.prompts[0]
        return prompt.tool_choice, prompt.forced_tool, prompt.allowed_tools

    assert choice(CUSTOM_CHOICE) == ("required", "raw", [])
    allowed = [{"type": "function", "function": {"name": "f"}}, CUSTOM_CHOICE]
    inner = {"mode": "required", "tools": allowed}
    assert choice({"type": "allowed_tools", "allowed_tools": inner}) == ("required", None, ["f", "raw"])


def test_custom_calls_of_earlier_turns_reach_the_template():
    call = {"id": "c1", "type": "custom", "custom": {"name": "raw", "input": 'say "é"\n'}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "4", "tool_call_id": "c1"}]
    expected = [
        Message("assistant", None, tool_calls=[ToolCall("c1", "raw", '{"input":"say \\"é\\"\\n"}')]),
        Message("tool", "4", tool_call_id="c1"),
    ]
    assert read_chat(messages=turns).request.prompts[0].messages == expected
    assert tokens.read_openai_tokenize(body_of(messages=turns), CONTEXT).prompt.messages == expected


CALLS = [
    ChoiceDelta(0, "See."),
    call_delta(0, "call_1", "raw"),
    call_delta(0, arguments='{"inp'),
    call_delta(0, arguments='ut": "a\\"'),
    call_delta(0, arguments='b\\u00e9"}'),
    call_delta(1, "call_2", "f", "{}"),
    call_delta(2, "call_3", "raw", "odd"),
    ChoiceDone(0, "tool", USAGE),
]


def test_custom_calls_in_one_answer_have_these_bytes():
    reply = read_chat(tools=[FUNCTION, CUSTOM])
    reply.add_events(CALLS)
    assert (
        b'"content":"See.","refusal":null,"annotations":[],"tool_calls":['
        b'{"id":"call_1","type":"custom","custom":{"name":"raw","input":"a\\"b\xc3\xa9"}},'
        b'{"id":"call_2","type":"function","function":{"name":"f","arguments":"{}"}},'
        b'{"id":"call_3","type":"custom","custom":{"name":"raw","input":"odd"}}],'
        b'"reasoning_content":null,"reasoning":null},"logprobs":null,"finish_reason":"tool_calls"'
    ) in reply.render_body(USAGE)


STREAMED_CALLS = [
    {"index": 0, "id": "call_1", "type": "custom", "custom": {"name": "raw", "input": ""}},
    {"index": 0, "custom": {"input": 'a"'}},
    {"index": 0, "custom": {"input": "bé"}},
    {"index": 1, "id": "call_2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    {"index": 2, "id": "call_3", "type": "custom", "custom": {"name": "raw", "input": ""}},
    {"index": 2, "custom": {"input": "odd"}},
]


@pytest.mark.parametrize("at_once", [True, False])
def test_custom_calls_are_streamed_as_they_arrive(at_once: bool):
    reply = read_chat(tools=[FUNCTION, CUSTOM], stream=True)
    steps = [CALLS] if at_once else [[event] for event in CALLS]
    choices = [frame["choices"][0] for step in steps for frame in frames(reply.render_chunk(step))]
    assert [choice["delta"]["tool_calls"][0] for choice in choices if "tool_calls" in choice["delta"]] == STREAMED_CALLS
    assert choices[-1]["finish_reason"] == "tool_calls" and choices[-1]["delta"] == {}


def test_custom_call_chunk_has_these_bytes():
    reply = read_chat(tools=[CUSTOM], stream=True)
    reply.render_chunk([ChoiceDelta(0, "See.")])
    start = (
        b'data: {"id":"chatcmpl-0f","object":"chat.completion.chunk","created":1700000000,"model":"m",'
        b'"service_tier":"default","system_fingerprint":"fp_1","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,'
    )
    end = b'}]},"logprobs":null,"finish_reason":null}]}\n\n'
    assert reply.render_chunk([call_delta(0, "c", "raw", '{"input": "a')]) == (
        start + b'"id":"c","type":"custom","custom":{"name":"raw","input":"a"}' + end
    )
    assert reply.render_chunk([call_delta(0, arguments="b")]) == start + b'"custom":{"input":"b"}' + end


def test_custom_call_that_is_cut_off_keeps_what_arrived():
    for arguments, text in (('{"input": "half', "half"), ('{"in', '{"in'), ("", "")):
        reply = read_chat(tools=[CUSTOM])
        reply.add_events(
            [call_delta(0, "c", "raw"), call_delta(0, arguments=arguments), ChoiceDone(0, "length", USAGE)]
        )
        choice = json.loads(reply.render_body(USAGE))["choices"][0]
        assert choice["message"]["tool_calls"][0]["custom"] == {"name": "raw", "input": text}
        assert choice["finish_reason"] == "length"


def test_custom_calls_of_several_choices_do_not_mix():
    reply = read_chat(tools=[CUSTOM], n=2)
    for piece in ('{"input": "a', 'b"}'):
        name = "raw" if piece[0] == "{" else None
        for index in (0, 1):
            call = ToolCallDelta(0, f"c{index}" if name else None, name, piece.replace("a", "xy"[index]))
            reply.add_events([ChoiceDelta(index, "", "tool", tool_call=call)])
    reply.add_events([ChoiceDone(0, "tool", USAGE), ChoiceDone(1, "tool", USAGE)])
    choices = json.loads(reply.render_body(USAGE))["choices"]
    assert [choice["message"]["tool_calls"][0]["custom"]["input"] for choice in choices] == ["xb", "yb"]


def test_tokens_of_a_custom_call_are_sent_even_if_its_text_is_not():
    reply = read_chat(tools=[CUSTOM], stream=True, logprobs=True, return_token_ids=True)
    delta = call_delta(0, "c", "raw")
    reply.render_chunk([PromptAccepted(0, [1]), delta])
    quiet = call_delta(0, arguments='{"input": ')
    quiet.tokens = [TokenInfo(7, "{", b"{", logprob=-1.0)]
    (chunk,) = frames(reply.render_chunk([quiet]))
    assert chunk["choices"][0]["delta"] == {"content": ""} and chunk["choices"][0]["token_ids"] == [7]


def test_databricks_takes_custom_tools_only_when_lenient():
    reply = databricks_chat.read_databricks_chat(
        LENIENT_DATABRICKS_RULES, body_of(tools=[CUSTOM], stream=True), CONTEXT
    )
    deltas = [
        frame["choices"][0]["delta"] for frame in frames(reply.render_chunk([PromptAccepted(0, [1]), *CALLS[1:5]]))
    ]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls == STREAMED_CALLS[:3] and deltas[1]["content"] is None
    with pytest.raises(BadRequest, match="custom"):
        databricks_chat.read_databricks_chat(STRICT_DATABRICKS_RULES, body_of(tools=[CUSTOM]), CONTEXT)


def test_vllm_refuses_custom_tools_as_its_own_server_does():
    read = partial(vllm_chat.read_vllm_chat, context=CONTEXT)
    with pytest.raises(Unsupported):
        read(body_of(tools=[CUSTOM]))
    with pytest.raises(InvalidValue, match=r"^Invalid value for `function`: `None` in `tool_choice`! Correct usage: "):
        read(body_of(tools=[FUNCTION], tool_choice=CUSTOM_CHOICE))
    call = {"id": "c1", "type": "custom", "custom": {"name": "raw", "input": "a"}}
    with pytest.raises(BadRequest, match="type"):
        read(body_of(messages=[{"role": "assistant", "tool_calls": [call]}]))


def test_openai_chat_names_the_members_with_schemas_of_tools():
    function, custom = {"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "c"}}
    fields = {"f": "tools[0].function.parameters", "c": "tools[1].custom.format.grammar.definition"}
    assert read_chat(tools=[function, custom]).request.prompts[0].schema_fields == fields
    assert read_chat(functions=[{"name": "f"}]).request.prompts[0].schema_fields == {"f": "functions[0].parameters"}
