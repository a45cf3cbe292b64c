"""The limits that OpenAI's service has for chats and completions, and where parley has them: below its prefix."""

import json
from typing import Any

import pytest

from parley.dialects.openai import chat, completions
from parley.dialects.request_context import RequestContext
from parley.errors import BadRequest
from parley.types import Grammar

CONTEXT = RequestContext("0f", 1700000000, "fp_1", context_length=256)
USER = [{"role": "user", "content": "Hi"}]


def read_chat(**members: Any) -> Any:
    return chat.read_chat_request(json.dumps({"messages": USER} | members).encode(), CONTEXT)


def read_completion(**members: Any) -> Any:
    return completions.read_completion_request(json.dumps({"prompt": "Hi"} | members).encode(), CONTEXT)


def read_strict_chat(**members: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]} | members
    return chat.read_strict_chat_request(json.dumps(body).encode(), CONTEXT)


def read_strict_completion(**members: Any) -> Any:
    body = {"model": "m", "prompt": "Hi"} | members
    return completions.read_strict_completion_request(json.dumps(body).encode(), CONTEXT)


@pytest.fixture(params=[read_chat, read_completion], ids=["chat", "text"])
def read(request) -> Any:
    return request.param


def refusal(read, **members) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(**members)
    return caught.value


PAIR = {"a": {"type": "string"}, "b": {"$ref": "#/$defs/x"}}
STRICT: dict[str, Any] = {"type": "object", "properties": PAIR, "required": ["a", "b"], "additionalProperties": False}
DEFINED = STRICT | {"$defs": {"x": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}}}
NOT_STRICT: list[tuple[dict[str, Any], str]] = [
    ({"type": "array"}, "In context=(), schema must be a JSON Schema of 'type: \"object\"', got 'type: 'array''."),
    ({}, "In context=(), schema must be a JSON Schema of 'type: \"object\"', got none."),
    (STRICT | {"anyOf": []}, "In context=(), 'anyOf' is not permitted at the root."),
    (STRICT | {"additionalProperties": True}, "'additionalProperties' is required to be supplied and to be false."),
    (STRICT | {"required": ["a"]}, "an array including every key in properties. Missing 'b'."),
    (STRICT | {"required": "a"}, "an array including every key in properties. Missing 'a'."),
    (STRICT | {"required": ["a", "b", "c"]}, "'required' has 'c', which is not in 'properties'."),
    (STRICT | {"properties": 5}, "In context=(), 'properties' must be an object."),
    (STRICT | {"properties": PAIR | {"a": True}}, "In context=('properties', 'a'), schema must be an object."),
    (STRICT | {"properties": PAIR | {"a": {}}}, "In context=('properties', 'a'), schema must have a 'type' key."),
    (STRICT | {"properties": PAIR | {"a": {"oneOf": []}}}, "In context=('properties', 'a'), 'oneOf' is not permitted."),
    (STRICT | {"properties": PAIR | {"a": {"type": "array"}}}, "('properties', 'a'), array schema missing items."),
    (
        STRICT | {"properties": PAIR | {"a": {"type": ["array", "null"], "items": {"type": "object"}}}},
        "In context=('properties', 'a', 'items'), 'additionalProperties' is required",
    ),
    (STRICT | {"properties": PAIR | {"a": {"type": "string", "format": "x"}}}, "'format' 'x' is not permitted"),
    (STRICT | {"$defs": {"x": {"anyOf": [{"allOf": []}]}}}, "In context=('$defs', 'x', 'anyOf', '0'), 'allOf' is not"),
]


def json_schema_format(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}
    }


def test_openai_accepts_strict_schema(read):
    assert read(**json_schema_format(DEFINED, True)).request.grammar == Grammar("json", DEFINED)


@pytest.mark.parametrize(("schema", "text"), NOT_STRICT, ids=str)
def test_openai_refuses_loose_schema_of_strict_format_below_the_prefix(schema, text):
    error = refusal(read_strict_chat, **json_schema_format(schema, True))
    assert (error.field, error.code) == ("response_format", "invalid_value")
    assert error.message.startswith("Invalid schema for response_format 'n': In context=(") and text in error.message
    for strict in (None, False):
        assert read_strict_chat(**json_schema_format(schema, strict)).request.grammar == Grammar("json", schema)


@pytest.mark.parametrize("schema", [schema for schema, _ in NOT_STRICT])
def test_openai_follows_loose_schema_of_strict_format_at_the_root(read, schema):
    """Clients of other servers send them, which enforce the schema as it is."""
    assert read(**json_schema_format(schema, True)).request.grammar == Grammar("json", schema)


CALLING = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "a"}
BEYOND_THE_SERVICE: list[tuple[dict[str, Any], str]] = [
    ({"stop": list("abcde")}, "stop"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"tools": []}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "messages"),
    ({"messages": [*USER, RESULT]}, "messages[1].role"),
    ({"messages": [*USER, CALLING, RESULT, RESULT]}, "messages[3].role"),
    ({"messages": [*USER, CALLING, *USER]}, "messages[2].role"),
    ({"messages": [*USER, CALLING]}, "messages"),
]


@pytest.mark.parametrize(("members", "field"), BEYOND_THE_SERVICE, ids=str)
def test_openai_chat_has_the_limits_of_the_service_below_the_prefix_only(members, field):
    assert refusal(read_strict_chat, **members).field == field
    assert read_chat(**members)


def test_openai_chat_below_the_prefix_takes_answered_calls_and_json():
    assert read_strict_chat(messages=[*USER, CALLING, RESULT, *USER], stop=list("abcd"))
    asked = [{"role": "user", "content": "Answer in JSON."}]
    assert read_strict_chat(messages=asked, response_format={"type": "json_object"}).request.grammar


@pytest.mark.parametrize(
    "members",
    [{"stop": list("abcde")}, {"logprobs": 6}, {"logprobs": -1}, {"best_of": 21}, {"best_of": 2, "stream": True}],
    ids=str,
)
def test_openai_completions_have_the_limits_of_the_service_below_the_prefix_only(members):
    assert refusal(read_strict_completion, **members).field == next(iter(members))
    assert read_completion(**members)
    assert read_strict_completion(stop=list("abcd"), logprobs=5)
    assert read_strict_completion(best_of=20, n=2)
