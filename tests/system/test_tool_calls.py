"""Tools through the official client and the built-in model: voluntary and forced calls, and how answers report them.

Every case runs streamed and whole, with thinking and without: all must give the same answer.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import jsonschema
import pytest
from openai import APIStatusError, BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from parley.demo.errands import TOOLS

MODEL = "parley-demo"
WEATHER = TOOLS["get_weather"]
TWO_CITIES = "What is the weather in Paris and London?"
MODES = [(stream, thinking) for stream in (False, True) for thinking in (False, True)]


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


def first_choice(client, messages, stream=False, thinking=False, **options):
    """Returns the first choice of an answer, in the same form whether it came whole or in chunks."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    options = {"model": MODEL, "temperature": 0, "max_tokens": 300, "messages": messages} | options
    body = {"chat_template_kwargs": {"enable_thinking": thinking}} | options.pop("extra_body", {})
    if not stream:
        return client.chat.completions.create(**options, extra_body=body).choices[0]
    message, finish = SimpleNamespace(content=None, tool_calls=[], reasoning=None, function_call=None), None
    for chunk in client.chat.completions.create(**options, extra_body=body, stream=True):
        (choice,) = chunk.choices
        delta, finish = choice.delta, choice.finish_reason or finish
        if delta.content:
            message.content = (message.content or "") + delta.content
        if getattr(delta, "reasoning", None):
            message.reasoning = (message.reasoning or "") + delta.reasoning
        for call in delta.tool_calls or ():
            if call.index == len(message.tool_calls):
                assert call.id and call.type == "function" and call.function.name
                message.tool_calls.append(SimpleNamespace(id=call.id, type=call.type, function=call.function))
            else:
                assert call.id is None and call.function.name is None
                message.tool_calls[call.index].function.arguments += call.function.arguments
        if delta.function_call:
            if message.function_call is None:
                message.function_call = delta.function_call
            else:
                message.function_call.arguments += delta.function_call.arguments
    return SimpleNamespace(message=message, finish_reason=finish)


def tool_calls(choice):
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]


@pytest.mark.parametrize(("stream", "thinking"), MODES)
def test_tool_loop_of_three_rounds(client, stream, thinking):
    messages: list = []
    for city, choice in (("Paris", "auto"), ("London", "auto"), ("Rome", "required")):
        messages.append({"role": "user", "content": f"What is the weather in {city}?"})
        answer = first_choice(client, messages, stream, thinking, tools=[WEATHER], tool_choice=choice)
        assert (tool_calls(answer), answer.finish_reason) == ([("get_weather", {"city": city})], "tool_calls")
        assert bool(answer.message.reasoning) is thinking and not answer.message.content
        (call,) = answer.message.tool_calls
        function = {"name": call.function.name, "arguments": call.function.arguments}
        messages.append({
            "role": "assistant", "content": None, "reasoning": answer.message.reasoning,
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        })  # fmt: skip
        result = json.dumps({"city": city, "sky": "sunny", "temperature": 21})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answer = first_choice(client, messages, stream, thinking, tools=[WEATHER])
        assert f"21 degrees in {city}" in answer.message.content and answer.finish_reason == "stop"
        messages.append({"role": "assistant", "content": answer.message.content})


@pytest.mark.parametrize(("stream", "thinking"), MODES)
def test_parallel_tool_calls_can_be_turned_off(client, stream, thinking):
    paris, london = ("get_weather", {"city": "Paris"}), ("get_weather", {"city": "London"})
    parameters = WEATHER["function"]["parameters"] | {"additionalProperties": False}
    strict = {"type": "function", "function": WEATHER["function"] | {"parameters": parameters, "strict": True}}
    for tool, more in ((WEATHER, {}), (strict, {}), (WEATHER, {"tool_choice": "required"})):
        answer = first_choice(client, TWO_CITIES, stream, thinking, tools=[tool], **more)
        assert (tool_calls(answer), answer.finish_reason) == ([paris, london], "tool_calls")
        assert len({call.id for call in answer.message.tool_calls}) == 2
        answer = first_choice(client, TWO_CITIES, stream, thinking, tools=[tool], parallel_tool_calls=False, **more)
        assert (tool_calls(answer), answer.finish_reason) == ([paris], "tool_calls")


@pytest.mark.parametrize(("stream", "thinking"), MODES)
def test_tool_choice_forces_a_call(client, stream, thinking):
    """Includes a tool that the model has never seen, and a question that calls for no tool."""
    properties = {"stars": {"enum": [1, 2, 3]}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}}
    schema = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip
    rate = {"type": "function", "function": {"name": "rate", "parameters": schema}}
    named = {"type": "function", "function": {"name": "rate"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice, finish in ((named, "stop"), (allowed, "tool_calls")):
        answer = first_choice(
            client, "Hello!", stream, thinking, tools=[WEATHER, rate], tool_choice=choice, temperature=1.0
        )
        assert answer.finish_reason == finish and bool(answer.message.reasoning) is thinking
        for name, arguments in tool_calls(answer) or pytest.fail("nothing was called"):
            assert name == "rate"
            jsonschema.validate(arguments, schema)
    answer = first_choice(client, "Hello!", stream, thinking, tools=[WEATHER], tool_choice="none")
    assert answer.message.content and not answer.message.tool_calls
    legacy_options = {"functions": [WEATHER["function"]], "function_call": {"name": "get_weather"}}
    answer = first_choice(client, "What is the weather in Rome?", stream, thinking, **legacy_options)
    assert json.loads(answer.message.function_call.arguments) == {"city": "Rome"} and answer.finish_reason == "stop"


@pytest.mark.parametrize(("stream", "thinking"), MODES)
def test_answer_is_a_tool_call_or_matches_the_response_format(client, stream, thinking):
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}}
    schema = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    options = {"tools": [WEATHER], "response_format": form}
    assert tool_calls(first_choice(client, TWO_CITIES, stream, thinking, **options)) == [
        ("get_weather", {"city": "Paris"}), ("get_weather", {"city": "London"})
    ]  # fmt: skip
    person = "Give me JSON for a person: Anna, 31 years old, from Paris."
    answer = first_choice(client, person, stream, thinking, **options)
    assert not answer.message.tool_calls and answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.message.content), schema)
    forced = first_choice(client, TWO_CITIES, stream, thinking, **options, tool_choice="required")
    assert [name for name, _ in tool_calls(forced)] == ["get_weather", "get_weather"]


def test_each_choice_has_its_own_tool_calls_and_logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": TWO_CITIES}], n=3, seed=1, temperature=0.8, logprobs=True,
        tools=[WEATHER], tool_choice="required", max_tokens=200,
    )  # fmt: skip
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids) >= 3
    for choice in answer.choices:
        assert {name for name, _ in tool_calls(choice)} == {"get_weather"}
        assert choice.logprobs.content and all(token.logprob <= 0 for token in choice.logprobs.content)
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)


def test_reasoning_can_be_switched_and_limited_by_a_budget(client):
    question = [{"role": "user", "content": "What is 47 + 38?"}]

    def think(**body):
        answer = client.chat.completions.create(
            model=MODEL, messages=question, temperature=0, max_tokens=200, extra_body=body
        )
        return answer.choices[0].message, answer.usage.completion_tokens_details.reasoning_tokens

    unlimited, unlimited_tokens = think(enable_thinking=True)
    assert "carry 1" in unlimited.reasoning_content and unlimited.content == "47 + 38 = 85." and unlimited_tokens > 6
    again, reasoning_tokens = think(reasoning_effort="high")
    assert (again.reasoning_content, reasoning_tokens) == (unlimited.reasoning_content, unlimited_tokens)
    hidden, reasoning_tokens = think(enable_thinking=True, include_reasoning=False)
    assert (hidden.reasoning_content, hidden.content, reasoning_tokens) == (None, unlimited.content, unlimited_tokens)
    for off in ({"reasoning_effort": "none"}, {"enable_thinking": False}, {}):
        message, reasoning_tokens = think(**off)
        assert message.reasoning_content is None and reasoning_tokens == 0
    short, reasoning_tokens = think(enable_thinking=True, thinking_token_budget=4)
    assert reasoning_tokens < unlimited_tokens and unlimited.reasoning_content.startswith(
        (short.reasoning_content or "").rstrip()
    )
    forced = first_choice(
        client, "What is 47 + 38?", thinking=True, tools=[TOOLS["add"]], tool_choice="required",
        extra_body={"thinking_token_budget": 4},
    )  # fmt: skip
    assert [name for name, _ in tool_calls(forced)] == ["add"]


def test_client_side_parsing_of_tool_calls_and_formats(client):
    class get_weather(BaseModel):
        """Get the weather in a city."""

        city: str

    class Person(BaseModel):
        name: str
        age: int
        city: str

    parse, common = client.chat.completions.parse, {"model": MODEL, "temperature": 0, "max_tokens": 200}
    tools = [pydantic_function_tool(get_weather)]
    question = [{"role": "user", "content": TWO_CITIES}]
    message = parse(messages=question, tools=tools, response_format=Person, **common).choices[0].message
    assert [call.function.parsed_arguments.city for call in message.tool_calls] == ["Paris", "London"]
    question = [{"role": "user", "content": "Give me JSON for a person: Anna, 31 years old, from Paris."}]
    with client.chat.completions.stream(messages=question, tools=tools, response_format=Person, **common) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert parsed == Person(name="Anna", age=31, city="Paris")


def test_refuses_strict_tools_with_unsupported_schemas(client):
    def request_error(**options):
        with pytest.raises(BadRequestError) as caught:
            first_choice(client, "Hello!", **options)
        return caught.value

    broken = {"type": "function", "function": {
        "name": "f", "strict": True, "parameters": {
            "type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}, "required": ["a"],
            "additionalProperties": False},
    }}  # fmt: skip
    assert request_error(tools=[WEATHER, broken]).param == "tools[1].function.parameters"
    loose = {"type": "function", "function": {name: broken["function"][name] for name in ("name", "parameters")}}
    named = {"type": "function", "function": {"name": "f"}}
    ((name, arguments),) = tool_calls(first_choice(client, "Hello!", tools=[loose], tool_choice=named))
    assert name == "f" and isinstance(arguments, dict)  # a schema that is not strict is followed as far as possible


ENDS = {"/vllm/v1": "stop", "/tgi/v1": "stop", "/mindie/v1": "tool_calls", "/mindie-old/v1": "tool_calls",
        "/serving-endpoints": "stop", "/databricks/serving-endpoints": "stop"}  # fmt: skip


@pytest.mark.parametrize("base", ENDS)
def test_every_api_forces_a_tool_call_and_reports_it_in_its_form(server, base):
    named = {"type": "function", "function": {"name": "get_weather"}}
    options: dict = {"model": MODEL, "temperature": 0.0, "max_tokens": 100, "tools": [WEATHER, TOOLS["get_time"]]}
    options["messages"] = [{"role": "user", "content": TWO_CITIES}]
    with OpenAI(base_url=server.url + base, api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        whole = create(**options, tool_choice=named).choices[0]
        (call,) = whole.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        assert whole.finish_reason == ENDS[base]
        name, arguments = None, ""
        for chunk in create(**options, tool_choice=named, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
                name, arguments = name or piece.function.name, arguments + (piece.function.arguments or "")
        assert (name, arguments) == (call.function.name, call.function.arguments)
        required = create(**options, tool_choice="required").choices[0].message.tool_calls
        assert len(required) == (1 if base == "/tgi/v1" else 2)
        for one in required:
            assert list(json.loads(one.function.arguments)) == ["city"]
        with pytest.raises(APIStatusError) as caught:
            create(**options, tool_choice={"type": "function", "function": {"name": "nothing"}})
        assert 400 <= caught.value.status_code < 500
