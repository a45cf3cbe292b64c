"""Databricks requests: each parameter of its documented tables, the exact bytes of answers, and refusals."""

import json
import struct
from functools import partial
from typing import Any

import pytest

from parley.dialects.databricks import DIALECT, STRICT, chat, completions, embeddings, read_databricks_invocation
from parley.dialects.databricks.api_rules import LENIENT_DATABRICKS_RULES, STRICT_DATABRICKS_RULES, DatabricksRules
from parley.dialects.request_context import RequestContext
from parley.errors import (
    ContextLength,
    EngineDied,
    EngineError,
    NotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    ParleyError,
    TooLarge,
    Unauthorized,
    UnknownModel,
)
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    Grammar,
    Message,
    OutputOptions,
    PromptAccepted,
    PromptScored,
    PromptVector,
    SamplingOptions,
    StopConditions,
    TextPrompt,
    TokenInfo,
    TokensPrompt,
    ToolCall,
    ToolCallDelta,
    Usage,
)

CONTEXT = RequestContext(
    "0123456789abcdef0123456789abcdef", 1700000000, "fp", context_length=100, path_parts={"endpoint": "m"}
)
ID = "01234567-89ab-cdef-0123-456789abcdef"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
MANY_TOOLS = [{"type": "function", "function": TOOL["function"] | {"name": f"f{number}"}} for number in range(33)]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USAGE = Usage(prompt_tokens=3, completion_tokens=2)
READERS = {
    "chat": (chat.read_databricks_chat, {"messages": MESSAGES}),
    "completion": (completions.read_databricks_completion, {"prompt": "Hi"}),
    "embedding": (embeddings.read_databricks_embedding, {"input": "Hi"}),
}


def read_task(task: str, rules: DatabricksRules = STRICT_DATABRICKS_RULES, **members: Any) -> Any:
    read, base = READERS[task]
    reply = read(rules, json.dumps(base | members).encode(), CONTEXT)
    reply.request.model = "m-1"  # as the server does
    return reply


talk, complete, embed = partial(read_task, "chat"), partial(read_task, "completion"), partial(read_task, "embedding")


def refusal_message(call: Any, *args: Any, **members: Any) -> str:
    """Return the message of the 400 response to a refused body."""
    with pytest.raises(ParleyError) as caught:
        call(*args, **members)
    status, body, kind = STRICT.render_error(caught.value)
    error_body = json.loads(body)
    assert (status, kind, list(error_body)) == (400, b"application/json", ["error_code", "message"])
    assert error_body["error_code"] in ("BAD_REQUEST", "INVALID_PARAMETER_VALUE")
    return error_body["message"]


# -- the tables: member, meaning of null and absence, values and their effects, values out of range, wrong types

Sample = partial(SamplingOptions)
OUT_OF_RANGE = 'Bad request: parameter "{}" must be {}, but got {}'
SAMPLING_ROWS: dict[str, tuple[Any, list[tuple[Any, Any]], list[tuple[Any, str]], str]] = {
    "max_tokens": (
        lambda request: request.stop_conditions.max_tokens,
        [(None, None), (1, 1), (7, 7), (4096.0, 4096)],
        [(0, "at least 1"), (-1, "at least 1")],
        "integer",
    ),
    "stream": (lambda request: request.stream, [(None, False), (True, True), (False, False)], [], "boolean"),
    "temperature": (
        lambda request: request.sampling.temperature,
        [(None, 1.0), (0, 0.0), (0.5, 0.5), (2, 2.0)],
        [(-0.1, "at least 0 and at most 2"), (2.1, "at least 0 and at most 2")],
        "number",
    ),
    "top_p": (
        lambda request: request.sampling.top_p,
        [(None, 1.0), (0.01, 0.01), (1, 1.0)],
        [(0, "greater than 0 and at most 1"), (1.1, "greater than 0 and at most 1")],
        "number",
    ),
    "top_k": (
        lambda request: request.sampling.top_k,
        [(None, 0), (1, 1), (50, 50)],
        [(0, "at least 1"), (-1, "at least 1")],
        "integer",
    ),
    "stop": (
        lambda request: request.stop_conditions.strings,
        [(None, []), ([], []), ("a", ["a"]), (["a", "bc"], ["a", "bc"])],
        [],
        "a string or an array of strings",
    ),
    "n": (
        lambda request: request.n,
        [(None, 1), (1, 1), (3, 3)],
        [(0, "at least 1 and at most 128"), (-2, "at least 1 and at most 128")],
        "integer",
    ),
}
COMPLETION_ROWS: dict[str, tuple[Any, list[tuple[Any, Any]], list[tuple[Any, str]], str]] = {
    "error_behavior": (
        lambda request: request.stop_conditions.reserved_tokens,
        [(None, None), ("error", None), ("truncate", 1)],
        [("ignore", 'one of "error", "truncate"')],
        "string",
    ),
    "echo": (lambda request: request.output_options.echo, [(None, False), (True, True), (False, False)], [], "boolean"),
    "use_raw_prompt": (
        lambda request: request.prompts[0].as_user_turn,
        [(None, True), (True, False), (False, True)],
        [],
        "boolean",
    ),
}
CHAT_ROWS: dict[str, tuple[Any, list[tuple[Any, Any]], list[tuple[Any, str]], str]] = {
    "logprobs": (
        lambda request: request.output_options.logprobs,
        [(None, None), (True, 0), (False, None)],
        [],
        "boolean",
    ),
    "tools": (
        lambda request: [tool["function"]["name"] for tool in request.prompts[0].tools],
        [(None, []), ([], []), ([TOOL], ["f"]), (MANY_TOOLS[:32], [f"f{number}" for number in range(32)])],
        [],
        "array",
    ),
    "reasoning_effort": (
        lambda request: request.prompts[0].reasoning_effort,
        [(None, None), ("low", "low"), ("medium", "medium"), ("high", "high")],
        [("max", 'one of "low", "medium", "high"')],
        "string",
    ),
    "response_format": (lambda request: request.n, [(None, 1), ({"type": "text"}, 1)], [], "object"),
}
EMBEDDING_ROWS: dict[str, tuple[Any, list[tuple[Any, Any]], list[tuple[Any, str]], str]] = {
    "instruction": (
        lambda request: request.prompts[0].text,
        [(None, "Hi"), ("", "Hi"), ("Represent this:", "Represent this: Hi"), ("Query:\n", "Query:\nHi")],
        [],
        "string",
    ),
}
ROWS = [(task, name, *row) for task in ("chat", "completion") for name, row in SAMPLING_ROWS.items()]
ROWS += [("embedding", name, *row) for name, row in EMBEDDING_ROWS.items()]
ROWS += [("completion", name, *row) for name, row in COMPLETION_ROWS.items()]
ROWS += [("chat", name, *row) for name, row in CHAT_ROWS.items()]
WRONG_TYPES = {
    "boolean": ["true", 1, [True]],
    "integer": ["1", True, 1.5, [1]],
    "number": ["1", True, [1]],
    "string": [1, True, ["a"]],
    "array": ["a", 1, {}],
    "object": ["text", 1, []],
    "a string or an array of strings": [1, {"a": 1}],
}


@pytest.mark.parametrize(
    ("task", "name", "look", "good", "bad", "kind"), ROWS, ids=[f"{task}-{name}" for task, name, *_ in ROWS]
)
def test_databricks_parameter_is_read_or_refused(task, name, look, good, bad, kind):
    assert look(read_task(task).request) == good[0][1], "absent"
    for rules in (STRICT_DATABRICKS_RULES, LENIENT_DATABRICKS_RULES):
        for value, effect in good:
            assert look(read_task(task, rules, **{name: value}).request) == effect, value
        for value in WRONG_TYPES[kind]:
            where = f"Unable to parse json body for request, field '{name}' expects input with json type '"
            assert refusal_message(read_task, task, rules, **{name: value}).startswith(where), value
    for value, allowed in bad:
        assert refusal_message(read_task, task, **{name: value}) == OUT_OF_RANGE.format(name, allowed, repr(value))


def test_databricks_accepts_prediction_only_when_lenient():
    assert talk(LENIENT_DATABRICKS_RULES, prediction={"type": "content", "content": "a"}).request.prediction == "a"
    assert "prediction" in refusal_message(talk, prediction={"content": "a"})


def test_databricks_type_error_names_expected_and_actual_type():
    message = refusal_message(talk, temperature="hot")
    assert message.endswith("field 'temperature' expects input with json type 'number' but got 'string'")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert refusal_message(talk, messages=parts) == (
        "Unable to parse json body for request, field 'messages.content' expects input with json type 'string' "
        "but got 'array'"
    )
    assert talk(LENIENT_DATABRICKS_RULES, messages=parts).request.prompts == talk().request.prompts


@pytest.mark.parametrize("value", [0, 5, 20])
def test_databricks_refuses_top_logprobs_without_logprobs(value):
    assert talk(logprobs=True, top_logprobs=value).request.output_options.logprobs == value
    if value:
        assert "needs 'logprobs' to be true" in refusal_message(talk, top_logprobs=value)
    for outside in (-1, 21):
        message = refusal_message(talk, logprobs=True, top_logprobs=outside)
        assert message == OUT_OF_RANGE.format("top_logprobs", "at least 0 and at most 20", outside)


def test_databricks_reports_missing_required_parameter():
    for task, name, label in (
        ("chat", "messages", "Chat"),
        ("completion", "prompt", "Completion"),
        ("embedding", "input", "Embedding"),
    ):
        assert refusal_message(read_task, task, **{name: None}) == f"Missing required {label} parameter: '{name}'"
        assert refusal_message(read_task, task, **{name: []}) == f'Bad request: parameter "{name}" must not be empty'
    assert (
        refusal_message(read_databricks_invocation, STRICT_DATABRICKS_RULES, b"{}", CONTEXT)
        == "Missing required Chat parameter: 'messages'"
    )
    assert refusal_message(talk, messages=[{"content": "a"}]) == (
        'Bad request: "role" is a required property for an object in parameter "messages"'
    )
    assert refusal_message(talk, messages=[{"role": "user"}]) == (
        'Bad request: "content" is a required property for an object in parameter "messages"'
    )
    assert "must be one of" in refusal_message(talk, messages=[{"role": "developer", "content": "a"}])
    assert talk(LENIENT_DATABRICKS_RULES, messages=[{"role": "developer", "content": "a"}]).request


@pytest.mark.parametrize(
    ("roles", "wrong"),
    [
        ("u", ""),
        ("su", ""),
        ("uau", ""),
        ("uct", ""),
        ("ucttau", ""),
        ("uu", 'must not be "user" after "user"'),
        ("us", 'must not be "system" after "user"'),
        ("ssu", 'must not be "system" after "system"'),
        ("a", 'must not be "assistant" at the beginning'),
        ("ua", 'must end with a message of role "user"'),
        ("ut", 'must not be "tool" after "user"'),
        ("ucu", 'must not be "user" after "assistant"'),
        ("s", 'must end with a message of role "user"'),
    ],
)
def test_databricks_strict_requires_alternating_roles(roles, wrong):
    turns = {
        "s": {"role": "system", "content": "s"},
        "u": {"role": "user", "content": "u"},
        "a": {"role": "assistant", "content": "a"},
        "c": {"role": "assistant", "content": None, "tool_calls": [CALL]},
        "t": {"role": "tool", "content": "t", "tool_call_id": "c"},
    }
    messages = [turns[role] for role in roles]
    assert len(talk(LENIENT_DATABRICKS_RULES, messages=messages).request.prompts[0].messages) == len(roles)
    if wrong:
        assert refusal_message(talk, messages=messages).endswith(wrong)
    else:
        assert len(talk(messages=messages).request.prompts[0].messages) == len(roles)


def test_databricks_validates_message_members():
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    assert talk(messages=messages).request.prompts[0].messages == [
        Message("user", "Hi"),
        Message("assistant", None, tool_calls=[ToolCall("c", "f", "{}")]),
        Message("tool", "1", tool_call_id="c"),
    ]
    conversation = [*MESSAGES, {"role": "assistant", "content": "a", "tool_calls": [CALL]}, messages[2]]
    assert refusal_message(talk, messages=conversation).endswith('must not be used together with "tool_calls"')
    conversation = [{"role": "user", "content": "a", "tool_calls": [CALL]}]
    assert refusal_message(talk, messages=conversation).endswith('is only for messages with role "assistant"')
    conversation = [{"role": "user", "content": "a", "tool_call_id": "c"}]
    assert refusal_message(talk, messages=conversation).endswith('is only for messages with role "tool"')
    for missing in ("id", "function"):
        calls = [{name: value for name, value in CALL.items() if name != missing}]
        conversation = [*MESSAGES, {"role": "assistant", "tool_calls": calls}, messages[2]]
        assert f'"{missing}" is a required property for "tool_calls" object in parameter "messages"' in refusal_message(
            talk, messages=conversation
        )
    conversation = [*MESSAGES, messages[1], {"role": "tool", "content": "1"}]
    assert '"tool_call_id" is a required property' in refusal_message(talk, messages=conversation)


def test_databricks_validates_tool_functions():
    def tool(**members: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "description": "d"} | members}

    assert talk(tools=[tool()]).request.prompts[0].tools[0]["function"]["parameters"]["properties"] == {}
    keys = {f"k{number}": {"type": "string"} for number in range(16)}
    schema = {"type": "object", "properties": keys}
    assert "must have at most 15 keys in properties, but has 16" in refusal_message(
        talk, tools=[tool(parameters=schema)]
    )
    assert talk(LENIENT_DATABRICKS_RULES, tools=[tool(parameters=schema)]).request
    keys.popitem()
    assert talk(tools=[tool(parameters=schema)]).request
    assert "additionalProperties" in refusal_message(talk, tools=[tool(parameters=schema, strict=True)])
    strict_schema = schema | {"required": list(keys), "additionalProperties": False}
    assert talk(tools=[tool(parameters=strict_schema, strict=True)]).request.prompts[0].tools[0]["function"]["strict"]
    for name in ("name", "description"):
        message = refusal_message(talk, tools=[tool(**{name: None})])
        assert message == f'Bad request: "{name}" is a required property for "function" object in parameter "tools"'
    assert refusal_message(talk, tools=MANY_TOOLS).endswith(
        'parameter "tools" must have at most 32 members, but has 33'
    )
    assert talk(LENIENT_DATABRICKS_RULES, tools=MANY_TOOLS).request
    assert 'must be one of "function"' in refusal_message(talk, tools=[TOOL | {"type": "x"}])
    assert refusal_message(talk, tools=[{"type": "function"}]).endswith('for an object in parameter "tools"')


def test_databricks_refuses_tool_choice_without_tools():
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        assert refusal_message(talk, tool_choice=choice).endswith('can only be used together with "tools"')
    assert talk(tool_choice="none").request.prompts[0].tools == []
    assert talk(tools=[TOOL], tool_choice="auto").request.prompts[0].tools
    assert talk(tools=[TOOL], tool_choice="none").request.prompts[0].tools == []
    named = {"type": "function", "function": {"name": "f"}}
    for choice, only in (("required", None), (named, "f")):
        (chat,) = talk(tools=[TOOL], tool_choice=choice).request.prompts
        assert (chat.tool_choice, chat.forced_tool) == ("required", only)
    named["function"]["name"] = "g"
    assert 'parameter "tool_choice.function.name"' in refusal_message(talk, tools=[TOOL], tool_choice=named)


def test_databricks_response_format_sets_grammar():
    assert talk(response_format={"type": "json_object"}).request.grammar == Grammar("json", {"type": "object"})
    schema = {"name": "n", "schema": {"type": "array"}, "description": "d"}
    form = {"type": "json_schema", "json_schema": schema}
    assert talk(response_format=form).request.grammar == Grammar("json", {"type": "array"})
    assert "'type: \"object\"', got" in refusal_message(
        talk, response_format=form | {"json_schema": schema | {"strict": True}}
    )
    for missing in ("name", "schema"):
        schema = {name: value for name, value in (("name", "n"), ("schema", {})) if name != missing}
        message = refusal_message(talk, response_format={"type": "json_schema", "json_schema": schema})
        assert f'"{missing}" is a required property for "json_schema" object' in message
    assert '"json_schema" is a required' in refusal_message(talk, response_format={"type": "json_schema"})


def test_databricks_thinking_sets_budget():
    assert talk(thinking={"type": "disabled"}).request.prompts[0].thinking is False
    request = talk(thinking={"type": "enabled", "budget_tokens": 9}, max_tokens=10).request
    assert (request.prompts[0].thinking, request.thinking_budget) == (True, 9)
    message = refusal_message(talk, thinking={"type": "enabled", "budget_tokens": 9}, max_tokens=9)
    assert "must be less than max_tokens, which is 9, but got 9" in message
    assert '"budget_tokens" is a required' in refusal_message(talk, thinking={"type": "enabled"})
    assert '"type" is a required' in refusal_message(talk, thinking={})


@pytest.mark.parametrize("task", ["chat", "completion"])
def test_databricks_strict_refuses_undocumented_members(task):
    message = refusal_message(read_task, task, inputs=["a"])
    assert message == 'Bad request: json: unknown field "inputs"\n'
    undocumented = {"inputs": ["a"], "seed": 5, "frequency_penalty": 1, "logit_bias": {"5": -1}}
    sampling = read_task(task, LENIENT_DATABRICKS_RULES, **undocumented).request.sampling
    assert sampling == SamplingOptions(seed=5, frequency_penalty=1.0, logit_bias={5: -1.0})
    context = {"extra_params": {"a": "b"}, "usage_context": {"a": "b"}, "client_request_id": "1", "model": "other"}
    assert read_task(task, **context).request.sampling == SamplingOptions()
    nested = [{"role": "user", "content": "a", "mood": 1}]
    if task == "chat":
        assert refusal_message(talk, messages=nested).endswith('unknown field "mood"\n')


@pytest.mark.parametrize("task", ["chat", "completion"])
def test_databricks_strict_refuses_several_choices_in_streams(task):
    assert refusal_message(read_task, task, n=2, stream=True) == (
        'Bad request: parameter "n" must be equal to 1 for streaming mode'
    )
    assert read_task(task, LENIENT_DATABRICKS_RULES, n=2, stream=True).request.n == 2


@pytest.mark.parametrize("task", ["chat", "completion", "embedding"])
@pytest.mark.parametrize("body", [b"", b"x", b"[]", b"\xff", b"[" * 100_000, b'{"a": 1}}'])
def test_databricks_refuses_body_that_is_not_a_json_object(task, body):
    for rules in (STRICT_DATABRICKS_RULES, LENIENT_DATABRICKS_RULES):
        assert refusal_message(READERS[task][0], rules, body, CONTEXT).startswith("Bad request: The ")


def test_databricks_reads_completion_prompts():
    assert complete(prompt=["a", "b"], use_raw_prompt=True).request.prompts == [TextPrompt("a"), TextPrompt("b")]
    assert complete().request.prompts == [TextPrompt("Hi", as_user_turn=True)]
    assert complete().request.output_options == OutputOptions(ids=True, unparsed=True)
    assert complete(max_tokens=3).request.stop_conditions == StopConditions(max_tokens=3)
    assert complete(max_tokens=3, error_behavior="truncate").request.stop_conditions == StopConditions(
        max_tokens=3, reserved_tokens=1
    )
    assert "must not be empty" in refusal_message(complete, prompt=[""])
    for wrong in (1, {"a": 1}):
        assert refusal_message(complete, prompt=wrong).startswith("Unable to parse json body")
    assert refusal_message(complete, suffix=1).endswith("json type 'string' but got 'integer'")


def test_databricks_invocations_choose_task_by_body():
    """/invocations has one path for chat, completions and embeddings; null members do not count."""
    for body, kind, prompt in (
        ({"messages": MESSAGES}, chat.DatabricksChatReply, ChatPrompt([Message("user", "Hi")])),
        ({"prompt": "Hi"}, completions.DatabricksCompletionReply, TextPrompt("Hi", as_user_turn=True)),
        ({"input": ["Hi"]}, embeddings.DatabricksEmbeddingReply, TextPrompt("Hi")),
        ({"prompt": None, "messages": MESSAGES}, chat.DatabricksChatReply, ChatPrompt([Message("user", "Hi")])),
    ):
        reply = read_databricks_invocation(LENIENT_DATABRICKS_RULES, json.dumps(body).encode(), CONTEXT)
        assert type(reply) is kind and reply.request.prompts == [prompt]


# -- answers


def token(token_id: int, text: str) -> TokenInfo:
    return TokenInfo(token_id, text, text.encode(), -0.5, 1)


def hello_events(index: int = 0) -> list[Any]:
    return [
        ChoiceDelta(index, "Hel", tokens=[token(5, "Hel")]),
        ChoiceDelta(index, "lo", tokens=[token(6, "lo")]),
        ChoiceDone(index, "stop", Usage(3, 2)),
    ]


def stream_events(reply: Any, *batches: list[Any]) -> list[Any]:
    text = b"".join(reply.render_chunk(batch) for batch in batches) + reply.finish_stream(USAGE)
    *events, last = text.decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events), "MLflow's client knows nothing else"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_databricks_writes_chat_body():
    reply = talk()
    reply.add_events([PromptAccepted(0, [1, 2, 3]), *hello_events()])
    assert reply.render_body(USAGE) == (
        b'{"id":"chatcmpl_' + ID.encode() + b'","object":"chat.completion","created":1700000000,"model":"m-1",'
        b'"choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop",'
        b'"logprobs":null}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}'
    )
    assert reply.answer_headers(None) == []
    reply.served_model = "other 50 % ü"
    assert reply.answer_headers(None) == [(b"served-model-name", b"other 50 % ??")]


def test_databricks_chat_stream_reports_usage_in_every_chunk():
    reply = talk(stream=True)
    start = b'data: {"id":"chatcmpl_' + ID.encode() + (
        b'","object":"chat.completion.chunk","created":1700000000,"model":"m-1","choices":['
    )  # fmt: skip
    assert reply.render_chunk([PromptAccepted(0, [1, 2, 3]), hello_events()[0]]) == (
        start + b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],'
        b'"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\n'
        + start + b'{"index":0,"delta":{"content":"Hel"},"finish_reason":null}],'
        b'"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\n'
    )  # fmt: skip
    chunks = stream_events(reply, hello_events()[1:])
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 2]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]
    assert chunks[-1]["choices"][0]["delta"] == {"content": ""}
    quiet = talk(stream=True, stream_options={"include_usage": False})
    assert all("usage" not in chunk for chunk in stream_events(quiet, [PromptAccepted(0, [1]), *hello_events()]))


def test_databricks_stream_usage_sums_tokens_of_all_choices():
    reply = talk(LENIENT_DATABRICKS_RULES, stream=True, n=2)
    chunks = stream_events(reply, [PromptAccepted(0, [1, 2, 3]), *hello_events(0), *hello_events(1)])
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_databricks_writes_tool_calls():
    call_events = [
        ChoiceDelta(0, "", "tool", [token(5, "x")], ToolCallDelta(0, "call_1", "f")),
        ChoiceDelta(0, "", "tool", [token(6, "y")], ToolCallDelta(0, arguments='{"a":1}')),
        ChoiceDone(0, "tool", Usage(3, 2)),
    ]
    reply = talk(tools=[TOOL])
    reply.add_events([PromptAccepted(0, [1]), *call_events])
    (choice,) = json.loads(reply.render_body(USAGE))["choices"]
    written_call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": [written_call]}
    assert choice["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in stream_events(talk(tools=[TOOL], stream=True), call_events)]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": None, "tool_calls": [written_call | {"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": '{"a":1}'}}]},
        {"content": ""},
    ]


def test_databricks_writes_reasoning_as_content_part_when_strict():
    """Lenient answers carry reasoning in reasoning_content instead."""
    reasoning_events = [ChoiceDelta(0, "Hm", "reasoning", [token(4, "Hm")]), *hello_events()]
    part = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}
    reply = talk()
    reply.add_events(reasoning_events)
    message = json.loads(reply.render_body(USAGE))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": [part, {"type": "text", "text": "Hello"}]}
    assert stream_events(talk(stream=True), reasoning_events)[1]["choices"][0]["delta"] == {"content": [part]}
    reply = talk(LENIENT_DATABRICKS_RULES)
    reply.add_events(reasoning_events)
    choice = json.loads(reply.render_body(USAGE))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "reasoning_content": "Hm"}
    assert choice["finishReason"] == choice["finish_reason"] == "stop"
    delta = stream_events(talk(LENIENT_DATABRICKS_RULES, stream=True), reasoning_events)[1]["choices"][0]["delta"]
    assert (delta["reasoning_content"], delta["content"]) == ("Hm", None)


def test_databricks_writes_logprobs():
    reply = talk(logprobs=True)
    reply.add_events([PromptAccepted(0, [1]), *hello_events()])
    logprobs = json.loads(reply.render_body(USAGE))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in logprobs] == ["Hel", "lo"]
    chunks = stream_events(talk(logprobs=True, stream=True), [PromptAccepted(0, [1]), *hello_events()])
    scored = [chunk["choices"][0].get("logprobs") for chunk in chunks]
    assert [entry["content"][0]["token"] for entry in scored if entry] == ["Hel", "lo"]


def test_databricks_refuses_stream_options_without_stream():
    for task in ("chat", "completion"):
        message = refusal_message(read_task, task, stream_options={"include_usage": True})
        assert "only allowed when" in message


def test_databricks_writes_completion_body():
    reply = complete(prompt=["a", "b"], n=2, suffix="!", echo=True)
    reply.add_events(
        [PromptAccepted(0, [1]), PromptScored(0, [], "a"), PromptAccepted(1, [2]), PromptScored(1, [], "b")]
    )
    for index in range(4):
        reply.add_events(hello_events(index))
    choices = b",".join(
        b'{"index":%d,"text":"%bHello!","finish_reason":"stop"}' % (prompt, text)
        for prompt, text in ((0, b"a"), (0, b"a"), (1, b"b"), (1, b"b"))
    )
    assert reply.render_body(Usage(2, 8)) == (
        b'{"id":"cmpl_' + ID.encode() + b'","object":"text_completion","created":1700000000,"choices":['
        + choices + b'],"usage":{"prompt_tokens":2,"completion_tokens":8,"total_tokens":10}}'
    )  # fmt: skip
    reply = complete(LENIENT_DATABRICKS_RULES, n=2)
    reply.add_events([*hello_events(0), *hello_events(1)])
    lenient_body = json.loads(reply.render_body(USAGE))
    assert lenient_body["model"] == "m-1"
    assert [choice["index"] for choice in lenient_body["choices"]] == [0, 1]


def test_databricks_writes_completion_stream():
    reply = complete(stream=True, suffix="!", echo=True)
    chunks = stream_events(reply, [PromptAccepted(0, [1, 2]), PromptScored(0, [], "Hi"), *hello_events()])
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": "Hi", "finish_reason": None}],
        [{"index": 0, "text": "Hel", "finish_reason": None}],
        [{"index": 0, "text": "lo", "finish_reason": None}],
        [{"index": 0, "text": "!", "finish_reason": "stop"}],
    ]
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [2, 3, 4, 4]
    assert list(chunks[0]) == ["id", "object", "created", "choices", "usage"]


def test_databricks_writes_embeddings_with_instruction():
    reply = embed(input=["a", "b"], instruction="Find:", usage_context={"a": "b"}, encoding_format="base64")
    assert reply.request.prompts == [TextPrompt("Find: a"), TextPrompt("Find: b")]
    values = struct.pack("<2f", 0.5, -1.0)
    reply.add_events([PromptAccepted(0, [1]), PromptVector(0, values), PromptVector(1, values)])
    assert reply.render_body(Usage(2)) == (
        b'{"id":"' + ID.encode() + b'","object":"list","model":"m-1","data":['
        b'{"object":"embedding","index":0,"embedding":[0.5,-1.0]},'
        b'{"object":"embedding","index":1,"embedding":[0.5,-1.0]}],'
        b'"usage":{"prompt_tokens":2,"total_tokens":2}}'
    )
    reply.served_model = "a"
    assert reply.answer_headers(None) == [(b"served-model-name", b"a")]


def test_databricks_lenient_embeddings_take_openai_members():
    reply = embed(LENIENT_DATABRICKS_RULES, encoding_format="base64", dimensions=2)
    reply.add_events([PromptVector(0, struct.pack("<2f", 0.5, -1.0))])
    assert json.loads(reply.render_body(USAGE))["data"][0]["embedding"] == "AAAAPwAAgL8="
    assert refusal_message(embed, dimensions=2) == 'Bad request: json: unknown field "dimensions"\n'
    assert refusal_message(embed, input=[1, 2]).startswith("Unable to parse json body for request, field 'input")
    assert embed(LENIENT_DATABRICKS_RULES, input=[1, 2]).request.prompts == [TokensPrompt([1, 2])]
    assert "can only be used with texts" in refusal_message(
        embed, LENIENT_DATABRICKS_RULES, input=[1, 2], instruction="a"
    )


# -- errors


@pytest.mark.parametrize(
    ("error", "status", "code", "message"),
    [
        (ContextLength("Too long."), 400, "BAD_REQUEST", "Bad request: Too long."),
        (
            Unauthorized("No key.", code=""),
            401,
            "UNAUTHENTICATED",
            "Credential was not sent or was of an unsupported type for this API.",
        ),
        (Unauthorized("Wrong key."), 403, "PERMISSION_DENIED", "Invalid access token."),
        (UnknownModel("?", name="x"), 404, "RESOURCE_DOES_NOT_EXIST", "Endpoint with name 'x' does not exist."),
        (NotFound("No such path."), 404, "ENDPOINT_NOT_FOUND", "No such path."),
        (NotAllowed("Not so."), 405, "BAD_REQUEST", "Bad request: Not so."),
        (TooLarge("Too large."), 413, "BAD_REQUEST", "Bad request: Too large."),
        (Overloaded("Full."), 429, "REQUEST_LIMIT_EXCEEDED", "Full."),
        (NotReady("Loading."), 503, "TEMPORARILY_UNAVAILABLE", "Loading."),
        (EngineDied("Gone."), 503, "TEMPORARILY_UNAVAILABLE", "Gone."),
        (EngineError("Broken."), 500, "INTERNAL_ERROR", "Broken."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_databricks_error_has_code_and_message(error, status, code, message):
    for dialect in (DIALECT, STRICT):
        answer = dialect.render_error(error)
        assert (answer.status, json.loads(answer.body)) == (status, {"error_code": code, "message": message})


def test_databricks_stream_error_has_openai_error_object():
    """Without an error object, OpenAI clients would take a failed stream for a complete one."""
    for reply in (talk(stream=True), complete(stream=True)):
        event, end, rest = reply.fail_stream(EngineError("Broken.")).decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        error_event = json.loads(event.removeprefix("data: "))
        assert (error_event["error_code"], error_event["message"]) == ("INTERNAL_ERROR", "Broken.")
        assert error_event["error"]["message"] == "Broken."
