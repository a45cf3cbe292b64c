"""Mistral's SDK: chats whole and streamed, forced calls, a continued answer, infilling, vectors, models.

Arguments: HOST:PORT MODEL.
"""

import json
import sys

from mistralai.client import Mistral
from mistralai.client.errors import SDKError

address, model = sys.argv[1:]
client = Mistral(api_key="none", server_url=f"http://{address}", timeout_ms=60_000)
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}

answers = [
    client.chat.complete(model=model, messages=WEATHER, max_tokens=8, random_seed=7).choices[0].message.content
    for _ in range(2)
]
assert answers[0] == answers[1]
streamed = [
    event.data.choices[0].delta.content or ""
    for event in client.chat.stream(model=model, messages=WEATHER, max_tokens=8, random_seed=7)
]
assert "".join(streamed) == answers[0]
called = client.chat.complete(model=model, messages=WEATHER, tools=[TOOL], tool_choice="any", max_tokens=100)
assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
assert called.choices[0].finish_reason == "tool_calls"
call_stream = client.chat.stream(model=model, messages=WEATHER, tools=[TOOL], tool_choice="any", max_tokens=100)
deltas = [event.data.choices[0].delta for event in call_stream]
(streamed_call,) = [call for delta in deltas for call in delta.tool_calls or []]
assert streamed_call.function.name == "get_weather" and "city" in json.loads(streamed_call.function.arguments)

begun = [*WEATHER, {"role": "assistant", "content": "The weather in", "prefix": True}]
unfinished = [*WEATHER, {"role": "assistant", "content": "The weather in", "prefix": False}]
counts = [
    client.chat.complete(model=model, messages=messages, max_tokens=1).usage.prompt_tokens
    for messages in (begun, unfinished)
]
assert counts[0] < counts[1], "the answer that is continued has no end mark after it"

filled = client.fim.complete(model=model, prompt="def add(", max_tokens=5, temperature=0)
text = filled.choices[0].message.content
pieces = [
    event.data.choices[0] for event in client.fim.stream(model=model, prompt="def add(", max_tokens=5, temperature=0)
]
assert "".join(piece.delta.content for piece in pieces) == text and pieces[-1].finish_reason == "length"
try:
    client.fim.complete(model=model, prompt="def add(", suffix="return a + b")
except SDKError as error:
    assert "suffix" in error.body  # the built-in model is not trained for it
else:
    raise AssertionError("it is not trained for a suffix")

vectors = client.embeddings.create(model=model, inputs=["a", "b"])
assert vectors.id and [item.index for item in vectors.data] == [0, 1]
(card,) = client.models.list().data
assert card.id == model and card.capabilities.completion_chat and not card.capabilities.completion_fim
assert client.models.retrieve(model_id=model) == card
print("good")
