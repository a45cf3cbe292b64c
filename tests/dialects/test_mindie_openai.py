"""MindIE's OpenAI interfaces: texts of refusals, and the exact bytes of answers in each profile."""

import json
from typing import Any

import pytest
from support.mindie_errors import validation_error

from parley.dialects.facts import ModelCard
from parley.dialects.mindie import STRICT
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces import chat, completions, openai
from parley.dialects.request_context import RequestContext
from parley.errors import ContextLength, EngineError, NoTokens, ParleyError, UnknownModel
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    Grammar,
    Message,
    PromptAccepted,
    PromptScored,
    TextPrompt,
    TokenCost,
    TokenInfo,
    TokensPrompt,
    ToolCall,
    ToolCallDelta,
    Usage,
)

STRICTLY, OLD, EXTENDED = MindieRules("strict"), MindieRules("strict-old"), MindieRules("extended")
CONTEXT = RequestContext("0f" * 14 + "00000010", 1762330491, "fp_1", context_length=100, headers={})
TURNS = [{"role": "user", "content": "a b"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ACCEPTED = PromptAccepted(0, [1, 2, 3])
ONE = TokenInfo(306, " I", b" I", -0.5, cost=TokenCost(2, 0.005149, 0.033))
TWO = TokenInfo(4966, " am", b" am", -0.25, cost=TokenCost(3, 0.00006, 0.026))
USAGE = Usage(prompt_tokens=3, completion_tokens=2)


def read_chat(rules: MindieRules = STRICTLY, **body: Any) -> chat.MindieChatReply:
    return chat.read_mindie_chat(rules, json.dumps({"model": "qwen", "messages": TURNS} | body).encode(), CONTEXT)


def read_completion(rules: MindieRules = STRICTLY, **body: Any) -> completions.MindieCompletionReply:
    return completions.read_mindie_completion(
        rules, json.dumps({"model": "qwen", "prompt": "a b"} | body).encode(), CONTEXT
    )


def refusal(read: Any = read_chat, rules: MindieRules = STRICTLY, **body: Any) -> str:
    with pytest.raises(ParleyError) as caught:
        read(rules, **body)
    return validation_error(caught.value)


def turn_refusal(**turn: Any) -> str:
    return refusal(messages=[turn])


def chat_prompt(rules: MindieRules = STRICTLY, **body: Any) -> ChatPrompt:
    (chat_request,) = read_chat(rules, **body).request.prompts
    assert isinstance(chat_request, ChatPrompt)
    return chat_request


# -- requests


def test_mindie_openai_reads_or_refuses_model():
    for read in (read_chat, read_completion):
        assert read().request.model == "qwen"
        assert refusal(read, model=None) == "Request contains not model or model null"
        assert refusal(read, model=5) == "Request param model must be string"
        assert refusal(read, model="") == "Request param model must be not empty"
        assert read(EXTENDED, model=None).request.model == ""
    missing = UnknownModel("", name="x")
    for reply, text in (
        (read_chat(), "Model not found"),
        (read_chat(MindieRules(vllm=False)), "Got model qwen, but not found in server"),
        (read_completion(), "Not found given model, please check modelName in config file."),
    ):
        answer = reply.render_refusal(missing)
        assert answer is not None and (answer.status, json.loads(answer.body)["error"]) == (422, text)


def test_mindie_openai_reads_messages():
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "", "tool_call_id": "c"},
        {"role": "assistant", "content": "x", "reasoning_content": "r"},
        {"role": "anything", "content": ""},
    ]
    assert chat_prompt(messages=turns).messages == [
        Message("system", "s"),
        Message("user", "ab"),
        Message("assistant", None, tool_calls=[ToolCall("c", "f", "{}")]),
        Message("tool", "", tool_call_id="c"),
        Message("assistant", "x", reasoning="r"),
        Message("anything", ""),
    ]


def test_mindie_openai_refuses_wrong_messages():
    assert refusal(messages=None) == "Request param contains not messages or messages null"
    assert refusal(messages=[]) == refusal(messages={}) == "Request param messages not arr or arr is empty"
    assert refusal(messages=None, tools=[TOOL]) == "Request param messages is null"
    assert refusal(messages=[], tools=[TOOL]) == "Request param messages is not arr or arr is empty"
    for turn in ({"content": "a"}, {"role": None}, {"role": 5}):
        assert turn_refusal(**turn) == "Request param contains not role or role null"
    assert refusal(messages=["x"]) == "Request param contains not role or role null"
    role = "Request param contains role must be system, assistant, user or tool"
    assert refusal(messages=[{"role": "x", "content": "a"}], tools=[TOOL]) == role
    assert (
        turn_refusal(role="user")
        == turn_refusal(role="assistant")
        == "Request param contains not content or content null"
    )
    assert turn_refusal(role="user", content=5) == "The type of inputs is abnormal"
    assert turn_refusal(role="assistant", content=5) == 'Request param "content" arguments expected to be a string'
    assert turn_refusal(role="assistant", content="") == 'Request param "content" should not be empty'
    empty = [{"role": "user", "content": ""}]
    assert refusal(messages=empty, tools=[TOOL]) == "Request param content len should not be 0"
    assert chat_prompt(messages=empty).messages == [Message("user", "")]
    assert turn_refusal(role="user", content=[]) == "Inputs arr is empty"
    assert turn_refusal(role="user", content=[{"type": "text", "text": 5}]) == "Request param text must be string"
    assert (
        turn_refusal(role="user", content=[{"type": "image_url", "image_url": None}]) == "Request param image_url null"
    )
    assert "not available" in turn_refusal(role="user", content=[{"type": "image_url", "image_url": "/x.png"}])
    many = [{"type": "video_url", "video_url": "x"}] * 21
    assert turn_refusal(role="user", content=many) == "The number of multimodal url should be no more than 20"
    long = {"role": "user", "content": "é" * 600_000}
    text = "Messages len not in (0, 1048576], but the length of inputs is 1200000"
    assert refusal(rules=MindieRules(body_megabytes=1), messages=[long, long]) == text


def test_mindie_openai_refuses_wrong_tool_calls_in_messages():
    no_id = "Request param contains not tool_call_id or tool_call_id null while role is tool"
    assert turn_refusal(role="tool", content="a") == no_id
    assert turn_refusal(role="tool", content="a", tool_call_id=5) == "The type of tool_call_id is abnormal"
    empty_id = "Request param tool_call_id len should not be 0 while role is tool"
    assert turn_refusal(role="tool", content="a", tool_call_id="") == empty_id

    def call(**changed: Any) -> str:
        return turn_refusal(role="assistant", tool_calls=[CALL | changed])

    def function(**changed: Any) -> str:
        return call(function={"name": "f", "arguments": "{}"} | changed)

    assert call(id=None) == "Tool call param contains no id."
    assert call(id=5) == 'Tool call param "id" arguments expected to be a string'
    wrong_type = "The type of the tool. Currently, only function is supported."
    assert call(type="x") == call(type=None) == wrong_type
    assert call(function=None) == call(function=5) == "Tool call param contains no function that the model called."
    assert function(name=None) == "Tool call param contains no function name"
    assert function(name=5) == "Tool call param function name expected to be a string"
    assert function(arguments=None) == "Tool call param contains no function arguments"
    assert function(arguments={}) == "Tool call param function arguments expected to be a string"
    assert turn_refusal(role="assistant", tool_calls=[5]) == "Tool call param contains no id."
    assert turn_refusal(role="assistant", tool_calls=5) == "Tool call param contains no id."


def test_mindie_openai_reads_tools_and_tool_choice():
    assert chat_prompt(tools=[TOOL]).tools == [TOOL]
    assert chat_prompt(tools=[TOOL], tool_choice="auto").tools == [TOOL]
    assert chat_prompt(tools=[TOOL], tool_choice="none").tools == chat_prompt(tools=[]).tools == []
    named = {"type": "function", "function": {"name": "天气_a-1"}}
    assert chat_prompt(tools=[named]).tools == [
        {"type": "function", "function": {"name": "天气_a-1", "parameters": {}}}
    ]
    for choice, only in (("required", None), (named, "天气_a-1")):
        forced = chat_prompt(tools=[TOOL, named], tool_choice=choice)
        assert (forced.tool_choice, forced.forced_tool) == ("required", only)
        assert chat_prompt(tool_choice=choice).tools == []
    assert refusal(tools=[TOOL], tool_choice=named) == "Parameter tool_choice function 天气_a-1 not in tools"
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    assert chat_prompt(tools=[strict]).tools == [strict]
    single_call = {"tools": [TOOL], "parallel_tool_calls": False}
    assert (
        chat_prompt(**single_call).parallel_calls
        and not chat_prompt(MindieRules(profile="extended"), **single_call).parallel_calls
    )
    assert refusal(tool_choice="x") == "Parameter tool_choice string not in [none, auto, required]"
    assert refusal(tool_choice=5) == "Parameter tool_choice not string or object"
    assert refusal(tools="x") == "Tools not array"


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ({}, "Tool param invalid, tool type not exist"),
        ({"type": None}, "Tool param invalid tool type"),
        ({"type": 5}, "Tool param invalid tool string type"),
        ({"type": "x"}, "Tool param not function type"),
        ({"type": "function"}, "Tool param invalid, tool function not exist"),
        ({"type": "function", "function": None}, "Tool param invalid function object"),
        ({"type": "function", "function": {}}, "Function object invalid, function name not exist"),
        ({"type": "function", "function": {"name": None}}, "Function object invalid name type"),
        *(
            ({"type": "function", "function": {"name": name}}, "The name of function must be a-z, A-Z, 0-9, common "
             "chinese characters, underscores and dashe within max length of 64, unexpected function name: " + name)
            for name in ("", "a b", "a" * 65, "é")
        ),
    ],
)  # fmt: skip
def test_mindie_openai_refuses_wrong_tool(tool, text):
    assert refusal(tools=[tool]) == refusal(tool_choice=tool) == text


def test_mindie_openai_reads_chat_template_kwargs():
    for rules in (STRICTLY, MindieRules(vllm=False)):
        with_options = chat_prompt(rules, chat_template_kwargs={"enable_thinking": False, "thinking_budget": 5, "x": 1})
        assert with_options.options == {"enable_thinking": False, "x": 1}
    for wrong in (None, [], "x", 5):
        assert refusal(chat_template_kwargs=wrong) == "chat_template_kwargs must be a JSON object"
    for wrong, kind in ((None, "null"), (1, "number"), ("x", "string"), ([], "array"), ({}, "object")):
        text = refusal(chat_template_kwargs={"enable_thinking": wrong})
        assert text == f"enable_thinking must be boolean, got {kind}"
    for wrong in ("x", 1.5, True):
        text = refusal(chat_template_kwargs={"thinking_budget": wrong})
        assert text == "thinking_budget must be integer type."
    for wrong in (0, 2**31):
        text = refusal(chat_template_kwargs={"thinking_budget": wrong})
        assert text == f"Parameter thinking_budget must be in [1,2147483647], got {wrong}"
    assert read_chat(chat_template_kwargs={"enable_thinking": True, "thinking_budget": 5}).request.thinking_budget == 5
    assert (
        read_chat(chat_template_kwargs={"enable_thinking": False, "thinking_budget": 5}).request.thinking_budget is None
    )
    assert "cannot be set" in refusal(chat_template_kwargs={"messages": []})
    assert refusal(chat_template=5) == "Parameter chat_template not string"
    assert refusal(chat_template="") == "Parameter chat_template is not valid"
    assert "not available" in refusal(chat_template="{{ messages }}")


FORMAT = "Parameter response_format"
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}


def json_schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@pytest.mark.parametrize(
    ("response_format", "text"),
    [
        (5, f"{FORMAT} must be an object"),
        ({}, f"{FORMAT} must contain 'type' field"),
        ({"type": 5}, f"{FORMAT}.type must be a string"),
        ({"type": "x"}, f"{FORMAT}.type must be 'json_object', 'json_schema' or 'text', got 'x'"),
        ({"type": "json_schema"}, f"{FORMAT}.json_schema is required when type is 'json_schema'"),
        ({"type": "json_schema", "json_schema": 5}, f"{FORMAT}.json_schema must be an object"),
        ({"type": "json_schema", "json_schema": {}}, f"{FORMAT}.json_schema.name is required"),
        ({"type": "json_schema", "json_schema": {"name": 5}}, f"{FORMAT}.json_schema.name must be a string"),
        ({"type": "json_schema", "json_schema": {"name": ""}}, f"{FORMAT}.json_schema.name must be 1-64 characters"),
        (
            {"type": "json_schema", "json_schema": {"name": "n"}},
            f"{FORMAT}.json_schema.schema is required when type is 'json_schema'",
        ),
        (json_schema_format(5), f"{FORMAT}.json_schema.schema must be an object"),
        (json_schema_format({"type": 5}), "Invalid json_schema: 'type' at 'schema' must be a string"),
        (json_schema_format({"type": "x"}), "Invalid json_schema: unsupported type 'x' at 'schema'"),
        (json_schema_format({"properties": 5}), "Invalid json_schema: 'properties' at 'schema' must be an object"),
        (
            json_schema_format({"properties": {"x": {"items": 5}}}),
            "Invalid json_schema: 'items' at 'schema.properties.x' must be an object",
        ),
        (
            json_schema_format({"items": {"required": 5}}),
            ("Invalid json_schema: 'required' at 'schema.items' must be an array"),
        ),
        (
            json_schema_format({"required": [5]}),
            "Invalid json_schema: elements of 'required' at 'schema' must be strings",
        ),
    ],
)
def test_mindie_openai_refuses_wrong_response_format(response_format, text):
    assert refusal(response_format=response_format) == refusal(read_completion, response_format=response_format) == text
    assert read_chat(
        MindieRules(vllm=False), response_format=response_format
    ).request  # MindIE's own flavour ignores response_format


def test_mindie_openai_response_format_sets_grammar():
    json_schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    for read in (read_chat, read_completion):
        for nothing in ({"type": "text"}, None):
            assert read(response_format=nothing).request.grammar is None
        assert read(response_format={"type": "json_object"}).request.grammar == Grammar("json", {"type": "object"})
        assert read(response_format=json_schema_format(json_schema)).request.grammar == Grammar("json", json_schema)
    assert read_chat(MindieRules(vllm=False), response_format=json_schema_format(json_schema)).request.grammar is None
    assert (
        read_chat(MindieRules("extended", vllm=False), response_format=json_schema_format(json_schema)).request.grammar
        is not None
    )


def test_mindie_openai_reads_completion_bodies():
    assert read_completion().request.prompts == [TextPrompt("a b")]
    assert read_completion(prompt=[5, 6]).request.prompts == [TokensPrompt([5, 6])]
    assert refusal(read_completion, prompt=None) == "Contains not prompt or prompt null"
    assert refusal(read_completion, prompt=[]) == "Prompt array cannot be empty."
    for wrong in ([1.5], [True], ["a", 1], [[1]], [-1], [2**31]):
        assert refusal(read_completion, prompt=wrong) == "All elements of the prompt array must be integers."
    text = "The type of prompt is abnormal,prompt must be str or integer list."
    assert refusal(read_completion, prompt=5) == refusal(read_completion, prompt={}) == text
    length = "Length of Prompt text should be greater than 0 and less than or equal to 41943040, but got 0"
    assert refusal(read_completion, prompt="") == length
    empty_prompt = read_completion().render_refusal(NoTokens("", field="prompt"))
    token = "Length of Prompt token should be greater than 0 and less than or equal to 1048576, but got 0"
    assert empty_prompt is not None and json.loads(empty_prompt.body)["error"] == token
    assert refusal(read_completion, prompt=["a", "b"]) == "All elements of the prompt array must be integers."
    assert read_completion(EXTENDED, prompt=["a", "b"]).request.prompts == [TextPrompt("a"), TextPrompt("b")]
    assert read_completion(EXTENDED, prompt=[[5], [6]]).request.prompts == [TokensPrompt([5]), TokensPrompt([6])]
    assert "not available" in refusal(read_completion, EXTENDED, suffix="x") and read_completion(suffix="x").request
    assert read_completion(EXTENDED, echo=True, logprobs=2).request.output_options.prompt_logprobs == 2
    assert not read_completion(echo=True).request.output_options.echo


def test_mindie_openai_refuses_body_that_is_not_a_json_object():
    for read in (chat.read_mindie_chat, completions.read_mindie_completion):
        for body in (b"", b"{", b"[]", b"\xff"):
            with pytest.raises(ParleyError) as caught:
                read(STRICTLY, body, CONTEXT)
            assert (
                json.loads(STRICT.render_error(caught.value).body)["error"] == "Failed to parse request context to json"
            )


# -- answers


def answer_body(reply: Any, *events: Any, usage: Usage = USAGE) -> str:
    reply.request.model = reply.request.model or "qwen"
    reply.add_events([ACCEPTED])
    reply.add_events(events)
    return reply.render_body(usage).decode()


def stream_events(reply: Any, *batches: list[Any]) -> list[str]:
    parts = [
        reply.render_chunk([ACCEPTED]),
        *(reply.render_chunk(batch) for batch in batches),
        reply.finish_stream(USAGE),
    ]
    lines = b"".join(parts).decode().split("\n\n")
    assert lines.pop() == "" and lines[-1] == "data: [DONE]"
    return [line.removeprefix("data: ") for line in lines[:-1]]


ANSWER_EVENTS = (ChoiceDelta(0, " I", tokens=[ONE]), ChoiceDelta(0, " am", tokens=[TWO]), ChoiceDone(0, "stop", USAGE))
START = '{"id":"endpoint_common_16","object":"%s","created":1762330491,"model":"qwen",'
WHOLE, PIECE = START % "chat.completion", START % "chat.completion.chunk"
COUNTS = '"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens":2,"total_tokens":5'
FIGURES = ',"batch_size":[2,3],"queue_wait_time":[5149,60]'


def test_mindie_openai_writes_chat_body_per_profile():
    new = '"message":{"role":"assistant","content":" I am","tool_calls":[]},"logprobs":null,"finish_reason":"stop"'
    old = '"message":{"role":"assistant","content":" I am"},"finish_reason":"stop"'
    figures = f'"usage":{{{COUNTS}{FIGURES}}},"prefill_time":38,"decode_time_arr":[26]}}'
    assert answer_body(read_chat(), *ANSWER_EVENTS) == f'{WHOLE}"choices":[{{"index":0,{new}}}],{figures}'
    assert answer_body(read_chat(OLD), *ANSWER_EVENTS) == f'{WHOLE}"choices":[{{"index":0,{old}}}],{figures}'
    assert answer_body(read_chat(EXTENDED), *ANSWER_EVENTS) == f'{WHOLE}"choices":[{{"index":0,{new}}}],{figures}'
    plain = read_chat(MindieRules("strict", token_costs=False))
    assert not plain.request.output_options.token_costs and read_chat().request.output_options.token_costs
    assert answer_body(plain, *ANSWER_EVENTS) == f'{WHOLE}"choices":[{{"index":0,{new}}}],"usage":{{{COUNTS}}}}}'


def test_mindie_openai_writes_chat_stream_per_profile():
    """Profiles differ in the opening chunk and in logprobs."""

    def piece(delta: str, finish: str = "null", usage: str = "", logprobs: str = ',"logprobs":null') -> str:
        choice = f'"index":0,"delta":{{"role":"assistant",{delta}}}{logprobs},"finish_reason":{finish}'
        return f'{PIECE}{usage}"choices":[{{{choice}}}]}}'

    usage = f'"usage":{{{COUNTS}{FIGURES}}},'
    batches: list[list[Any]] = [[ANSWER_EVENTS[0]], list(ANSWER_EVENTS[1:])]
    pieces = [piece('"content":" I"'), piece('"content":" am"', '"stop"', usage)]
    opening = piece('"content":""')
    assert stream_events(read_chat(stream=True), *batches) == [opening, *pieces]
    assert stream_events(read_chat(EXTENDED, stream=True), *batches) == [opening, *pieces]
    old = [piece('"content":" I"', logprobs=""), piece('"content":" am"', '"stop"', usage, "")]
    assert stream_events(read_chat(OLD, stream=True), *batches) == old
    separate_end = stream_events(
        read_chat(stream=True), [ANSWER_EVENTS[0], ANSWER_EVENTS[1]], [ANSWER_EVENTS[2]]
    )  # the end may arrive without a token
    assert separate_end == [opening, pieces[0], piece('"content":" am"'), piece('"content":""', '"stop"', usage)]
    full_text = stream_events(read_chat(MindieRules(full_text=True), stream=True), *batches)
    assert full_text == [opening, pieces[0], piece('"content":" I am"', '"stop"', '"full_text":" I am",' + usage)]


def test_mindie_openai_writes_reasoning():
    spent = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1, reasoning_tokens=1)
    reasoning_events = (
        ChoiceDelta(0, "hm", "reasoning", [ONE]),
        ChoiceDelta(0, "so", tokens=[TWO]),
        ChoiceDone(0, "length", spent),
    )
    body = json.loads(answer_body(read_chat(), *reasoning_events, usage=spent))
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [],
    }
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert list(body["usage"])[:5] == [
        "prompt_tokens", "prompt_tokens_details", "completion_tokens", "completion_tokens_details", "total_tokens",
    ]  # fmt: skip
    chunks = [
        json.loads(chunk)
        for chunk in stream_events(read_chat(stream=True), list(reasoning_events[:2]), [reasoning_events[2]])
    ]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[1:3] == [
        {"role": "assistant", "reasoning_content": "hm"},
        {"role": "assistant", "content": "so"},
    ]


def test_mindie_openai_writes_tool_calls():
    call_events = (
        ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, "c1", "f", "{")),
        ChoiceDelta(0, "", "tool", tool_call=ToolCallDelta(0, arguments="}")),
        ChoiceDone(0, "tool", USAGE),
    )
    body = json.loads(answer_body(read_chat(tools=[TOOL]), *call_events))
    assert body["choices"][0] == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
    }
    old = json.loads(answer_body(read_chat(OLD, tools=[TOOL]), *ANSWER_EVENTS))
    assert old["choices"][0]["message"]["tool_calls"] == []
    chunks = [
        json.loads(chunk)["choices"][0]
        for chunk in stream_events(read_chat(tools=[TOOL], stream=True), *([e] for e in call_events))
    ]
    assert [chunk["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "tool_calls": [{"index": 0, "id": "c1", "type": "function",
                                              "function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {"role": "assistant", "content": ""},
    ]  # fmt: skip
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_mindie_openai_writes_logprobs():
    top = TokenInfo(
        306, " I", b" I", -0.5, top_tokens=[TokenInfo(9, "\ufffd", b"\xff", float("-inf"))], cost=TokenCost(1, 0, 0)
    )
    expected = {
        "content": [
            {
                "token": " I",
                "logprob": -0.5,
                "bytes": [32, 73],
                "top_logprobs": [{"token": "\ufffd", "logprob": -9999.0, "bytes": [255]}],
            }
        ]
    }
    events = [ChoiceDelta(0, " I", tokens=[top]), ChoiceDone(0, "stop", USAGE)]
    for rules in (STRICTLY, OLD):
        assert json.loads(answer_body(read_chat(rules, top_logprobs=1), *events))["choices"][0]["logprobs"] == expected
        assert (
            json.loads(stream_events(read_chat(rules, top_logprobs=1, stream=True), events)[-1])["choices"][0][
                "logprobs"
            ]
            == expected
        )
    completed = json.loads(answer_body(read_completion(logprobs=1), *events))["choices"][0]["logprobs"]
    assert list(completed) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert completed["token_logprobs"] == [-0.5] and completed["tokens"] == [" I"]


def test_mindie_openai_writes_n_choices_of_best_of():
    three = [
        ChoiceDelta(0, "a", tokens=[TokenInfo(1, "a", b"a", -3.0, cost=TokenCost(3, 0.001, 0.001))]),
        ChoiceDelta(1, "b", tokens=[TokenInfo(1, "b", b"b", -1.0, cost=TokenCost(3, 0.001, 0.001)), TWO]),
        ChoiceDelta(2, "c", tokens=[TokenInfo(1, "c", b"c", -2.0, cost=TokenCost(3, 0.001, 0.001))]),
        *(ChoiceDone(index, "stop", USAGE) for index in range(3)),
    ]
    for read, text in (
        (read_chat, lambda choice: choice["message"]["content"]),
        (read_completion, lambda choice: choice["text"]),
    ):
        reply = read(n=2, best_of=3, temperature=1)
        assert (reply.request.n, reply.request.best_of, reply.request.output_options.logprobs) == (2, 3, None)
        body = json.loads(answer_body(reply, *three[:2], *three[3:5]))
        assert [(choice["index"], text(choice)) for choice in body["choices"]] == [(0, "a"), (1, "b")]
        assert body["choices"][0]["logprobs"] is None and body["usage"]["batch_size"] == [3, 3]
        body = json.loads(answer_body(read(n=3, temperature=1), *three))
        assert [text(choice) for choice in body["choices"]] == ["a", "b", "c"]


def test_mindie_openai_writes_completion_per_profile():
    start = START % "text_completion"
    choice = '"choices":[{"index":0,"text":"%s","logprobs":null,"stop_reason":%s,"finish_reason":%s}]'
    usage = f',"usage":{{{COUNTS}{FIGURES}}}}}'
    for rules in (STRICTLY, OLD):
        assert (
            answer_body(read_completion(rules), *ANSWER_EVENTS) == start + choice % (" I am", "null", '"stop"') + usage
        )
        chunks = stream_events(read_completion(rules, stream=True), [ANSWER_EVENTS[0]], list(ANSWER_EVENTS[1:]))
        assert chunks == [
            start + choice % (" I", "null", "null") + "}",
            start + choice % (" am", "null", '"stop"') + usage,
        ]
    stopped = (*ANSWER_EVENTS[:2], ChoiceDone(0, "stop", USAGE, "x"))
    assert answer_body(read_completion(EXTENDED), *stopped) == start + choice % (" I am", '"x"', '"stop"') + usage
    full_text = stream_events(
        read_completion(MindieRules(full_text=True), stream=True), [ANSWER_EVENTS[0]], list(ANSWER_EVENTS[1:])
    )
    assert [json.loads(chunk)["choices"][0]["text"] for chunk in full_text] == [" I", " I am"]
    assert json.loads(full_text[1])["full_text"] == " I am"


def test_mindie_openai_extended_echoes_prompt():
    scored = PromptScored(0, [TokenInfo(1, "a", b"a"), TokenInfo(2, " b", b" b", -1.0)], "a b")
    body = json.loads(answer_body(read_completion(EXTENDED, echo=True, logprobs=0), scored, *ANSWER_EVENTS))
    assert body["choices"][0]["text"] == "a b I am"
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", " b", " I", " am"]
    assert body["usage"]["batch_size"] == [2, 3]
    chunks = stream_events(read_completion(EXTENDED, echo=True, stream=True), [scored], list(ANSWER_EVENTS))
    assert [json.loads(chunk)["choices"][0]["text"] for chunk in chunks] == ["a b", " I", " am"]


def test_mindie_openai_stream_ends_with_error():
    assert read_chat(stream=True).fail_stream(EngineError("It broke.")) == b"It broke."
    assert (
        read_chat(EXTENDED, stream=True).fail_stream(EngineError("It broke.")).startswith(b'data: {"error":"It broke."')
    )


def test_mindie_context_length_error_has_status_424():
    error = ContextLength("", field="prompt", limit=101, prompt=200)
    response = STRICT.render_error(error)
    assert response.status == 424 and b"cannot be greater than 100,the input ids length is 200" in response.body


def test_mindie_openai_answers_with_id_of_req_id_header():
    named = RequestContext("0f", 1, "fp_1", headers={b"req-id": b"mine"})
    reply = chat.read_mindie_chat(STRICTLY, json.dumps({"model": "qwen", "messages": TURNS}).encode(), named)
    assert json.loads(answer_body(reply, *ANSWER_EVENTS))["id"] == "mine"


def test_mindie_openai_lists_models():
    cards = [ModelCard("qwen", 5, 100)]
    assert openai.write_mindie_models(MindieRules(model_folder_name="w"), cards) == (
        b'{\n    "data": [\n        {\n            "id": "qwen",\n            "object": "model",\n'
        b'            "owned_by": "MindIE Server",\n            "parent": "null",\n            "root": "w"\n        }\n'
        b'    ],\n    "object": "list"\n}'
    )
    assert json.loads(openai.write_mindie_models(EXTENDED, cards))["data"][0]["created"] == 5
    assert (
        openai.write_mindie_model(cards[0]) == b'{"id":"qwen","object":"model","created":5,"owned_by":"MindIE Server"}'
    )
