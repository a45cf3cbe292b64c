"""The anthropic package: messages, streams, tool loops, thinking that is sent back, counts, models and errors."""

import json
import sys

import anthropic

address, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=f"http://{address}", api_key="none", max_retries=0)

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    },
}
HELLO = [{"role": "user", "content": "Hello"}]
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


message = client.messages.create(model=model, max_tokens=50, messages=HELLO)
assert message.content[0].text.startswith("Hello") and message.stop_reason == "end_turn", message
assert message._request_id.startswith("req_") and message.id.startswith("msg_01")

with client.messages.stream(model=model, max_tokens=50, messages=HELLO) as stream:
    text = "".join(stream.text_stream)
    streamed = stream.get_final_message()
assert text and streamed.content[0].text == text and streamed.stop_reason == "end_turn"
assert prompt_tokens(streamed.usage) == prompt_tokens(message.usage)

# A tool loop with thinking, whole and streamed: the thinking returns with its signature, shown or not.
for display in ("summarized", "omitted"):
    members = {"model": model, "max_tokens": 2000, "tools": [WEATHER]}
    thinking = {"type": "adaptive", "display": display}
    with client.messages.stream(messages=[QUESTION], thinking=thinking, **members) as stream:
        answer = stream.get_final_message()
    thought, call = answer.content
    assert (thought.type, bool(thought.thinking), bool(thought.signature)) == ("thinking", display != "omitted", True)
    assert (call.type, call.name, call.input, answer.stop_reason) == (
        "tool_use", "get_weather", {"city": "Paris"}, "tool_use",
    )  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": call.id,
              "content": '{"city": "Paris", "sky": "sunny", "temperature": 20}'}  # fmt: skip
    turns = [QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=turns, thinking=thinking, **members)
    assert "Paris" in last.content[-1].text, last
    counted = client.messages.count_tokens(model=model, messages=turns, thinking=thinking, tools=[WEATHER])
    assert counted.input_tokens == prompt_tokens(last.usage)


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The city
    """
    return json.dumps({"city": city, "sky": "sunny", "temperature": 20})


# The package's own loop asks the server to hold the conversation, and goes on without that.
for is_stream in (False, True):
    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=200, tools=[get_weather], messages=[QUESTION], stream=is_stream
    )
    replies = [reply.get_final_message() if is_stream else reply for reply in runner]
    assert [reply.stop_reason for reply in replies] == ["tool_use", "end_turn"], replies
    assert "Paris" in replies[-1].content[-1].text, replies

forced = client.messages.create(
    model=model,
    max_tokens=200,
    messages=[QUESTION],
    tools=[WEATHER],
    tool_choice={"type": "tool", "name": "get_weather"},
)
assert [block.type for block in forced.content] == ["tool_use"] and forced.stop_reason == "tool_use"

marked = [{"type": "text", "text": "You are a helper. " * 40, "cache_control": {"type": "ephemeral"}}]
usages = [client.messages.create(model=model, max_tokens=5, system=marked, messages=HELLO).usage for _ in range(2)]
assert usages[0].cache_creation_input_tokens > 0 and usages[1].cache_read_input_tokens > 0, usages

stopped = client.messages.create(model=model, max_tokens=50, messages=HELLO, stop_sequences=["!"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "!") and "!" not in stopped.content[0].text

assert model in [model_card.id for model_card in client.models.list()]
assert client.models.retrieve(model).max_input_tokens == 4096
for expected, members in (
    (anthropic.NotFoundError, {"model": "x"}),
    (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "long " * 9000}]}),
    (anthropic.BadRequestError, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
):
    try:
        client.messages.create(**{"model": model, "max_tokens": 5, "messages": HELLO} | members)
    except expected as error:
        assert error.request_id.startswith("req_")
    else:
        raise AssertionError(f"{expected.__name__} was not raised")
print("good")
