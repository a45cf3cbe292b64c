"""The anthropic package at vLLM's routes: messages, streams, a loop of tools, thinking, counts and errors."""

import sys

import anthropic

address, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=f"http://{address}/vllm", api_key="none", max_retries=0)

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
GREEDY = {"extra_body": {"temperature": 0}}
HELLO = [{"role": "user", "content": "Hello"}]
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


message = client.messages.create(model=model, max_tokens=50, messages=HELLO, **GREEDY)
assert message.content[0].text.startswith("Hello") and message.stop_reason == "end_turn", message
assert message.id.startswith("chatcmpl-")

with client.messages.stream(model=model, max_tokens=50, messages=HELLO, **GREEDY) as stream:
    text = "".join(stream.text_stream)
    streamed = stream.get_final_message()
assert text and streamed.content[0].text == text == message.content[0].text and streamed.stop_reason == "end_turn"
assert prompt_tokens(streamed.usage) == prompt_tokens(message.usage)

stopped = client.messages.create(model=model, max_tokens=50, messages=HELLO, **GREEDY, stop_sequences=["l"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "l"), stopped

# A loop of tools with thinking, which the template switches on.
members = {"model": model, "max_tokens": 2000, "tools": [WEATHER]}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
members["extra_body"] = THINKS | {"temperature": 0, "cache_salt": "tenant"}
with client.messages.stream(messages=[QUESTION], **members) as stream:
    answer = stream.get_final_message()
thought, call = answer.content
assert (thought.type, call.type, call.name, answer.stop_reason) == ("thinking", "tool_use", "get_weather", "tool_use")
assert thought.thinking and thought.signature and call.input == {"city": "Paris"}, answer
result = {"type": "tool_result", "tool_use_id": call.id,
          "content": '{"city": "Paris", "sky": "sunny", "temperature": 20}'}  # fmt: skip
turns = [QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
last = client.messages.create(messages=turns, **members)
assert "Paris" in last.content[-1].text, last
counted = client.messages.count_tokens(model=model, messages=turns, tools=[WEATHER], extra_body=THINKS)
assert counted.input_tokens == prompt_tokens(last.usage)

for wrong, error, sentence in (
    ({"model": "nope"}, anthropic.NotFoundError, "The model `nope` does not exist."),
    ({"extra_body": {"temperature": 3}}, anthropic.BadRequestError, "temperature must be in [0, 2]"),
    ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens must be positive"),
):
    body = {"model": model, "max_tokens": 5, "messages": HELLO} | wrong
    for stream in (False, True):
        try:
            client.messages.create(**body, stream=stream)
        except error as refusal:
            assert sentence in str(refusal), refusal
        else:
            raise AssertionError(f"{wrong} was taken")
print("good")
