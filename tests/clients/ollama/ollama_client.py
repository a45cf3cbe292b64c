"""Ollama's Python library: chat, generate, vectors, tools, forms, streams, models, errors. Takes HOST:PORT MODEL."""

import json
import sys

import ollama
from pydantic import BaseModel

address, model = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
PERSON = [{"role": "user", "content": "Give me JSON for a person: Anna, 31 years old, from Paris."}]
GREEDY = {"temperature": 0, "num_predict": 300}
client = ollama.Client(host=f"http://{address}")


class Person(BaseModel):
    name: str
    age: int
    city: str


def get_weather(city: str) -> str:
    """Get the current weather in a city.

    Args:
      city: the city
    """
    return json.dumps({"city": city, "sky": "sunny", "temperature": 21})


def refused(status: int, part: str, call, *arguments, **options) -> None:
    try:
        answer = call(*arguments, **options)
        if options.get("stream"):
            list(answer)
    except ollama.ResponseError as error:
        assert error.status_code == status and part in error.error, (error.status_code, error.error)
    else:
        raise AssertionError(f"{part}: it was not refused")


# chat
for name in (model, f"{model}:latest"):
    answer = client.chat(model=name, messages=QUESTION, options=GREEDY, think=False)
    assert answer.message.content == ANSWER and answer.model == name and answer.done_reason == "stop", answer
    assert answer.eval_count and answer.prompt_eval_count and answer.total_duration > answer.eval_duration > 0
pieces = list(client.chat(model=model, messages=QUESTION, options=GREEDY, think=False, stream=True, logprobs=True))
assert "".join(piece.message.content for piece in pieces) == ANSWER and [p.done for p in pieces][-2:] == [False, True]
thought = client.chat(model=model, messages=QUESTION, options=GREEDY, think=True).message
assert thought.thinking and "Paris" in thought.content, thought
for stream in (False, True):  # a loop over a tool
    messages = [{"role": "user", "content": "What is the weather in Paris and London?"}]
    answer = client.chat(model=model, messages=messages, tools=[get_weather], options=GREEDY, stream=stream)
    parts = list(answer) if stream else [answer]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"city": "Paris"}, {"city": "London"}], parts
    messages.append({"role": "assistant", "content": "", "tool_calls": [call.model_dump() for call in calls]})
    for call in calls:
        content = get_weather(**call.function.arguments)
        messages.append({"role": "tool", "content": content, "tool_name": call.function.name})
    answer = client.chat(model=model, messages=messages, tools=[get_weather], options=GREEDY)
    assert not answer.message.tool_calls and "London" in answer.message.content, answer
for form in (Person.model_json_schema(), "json"):
    answer = client.chat(model=model, messages=PERSON, format=form, options=GREEDY, think=False)
    assert Person.model_validate_json(answer.message.content) == Person(name="Anna", age=31, city="Paris"), answer
answer = client.chat(model=model, messages=PERSON, format=Person.model_json_schema(), options=GREEDY)
assert Person.model_validate_json(answer.message.content).name == "Anna" and answer.message.thinking, answer

# generate
one = client.generate(model=model, prompt=QUESTION[0]["content"], options=GREEDY, think=False)
assert one.response == ANSWER and one.context
more = client.generate(model=model, prompt="Hello!", context=one.context, options=GREEDY, think=False)
assert more.response and more.context[: len(one.context)] == one.context
raw = client.generate(model=model, prompt="The capital of", raw=True, options=GREEDY | {"num_predict": 4})
templated = client.generate(
    model=model, prompt="capital", template="The {{ .Prompt }} of{{ .Response }}", options=GREEDY | {"num_predict": 4}
)
assert templated.response == raw.response and templated.context
assert raw.eval_count == 4 and raw.done_reason == "length" and raw.context is None
streamed = client.generate(
    model=model, prompt="The capital of", raw=True, stream=True, options=GREEDY | {"num_predict": 4}
)
assert "".join(piece.response for piece in streamed) == raw.response
assert client.generate(model=model, prompt="", keep_alive=0).done_reason == "unload"

# vectors
vectors = client.embed(model=model, input=["Hello", "World"]).embeddings
assert len(vectors) == 2 and all(abs(sum(x * x for x in vector) - 1) < 1e-5 for vector in vectors)
assert len(client.embed(model=model, input="Hello", dimensions=8).embeddings[0]) == 8
assert len(client.embeddings(model=model, prompt="Hello").embedding) == len(vectors[0])

# models
assert f"{model}:latest" in [entry.model for entry in client.list().models]
assert client.ps().models[0].context_length
shown = client.show(model)
assert "tools" in shown.capabilities and shown.modelinfo[shown.modelinfo["general.architecture"] + ".context_length"]
assert client.pull(model).status == "success"
assert [line.status for line in client.pull(model, stream=True)][-1] == "success"

# errors
refused(404, "model 'x' not found", client.chat, model="x", messages=QUESTION)
refused(404, 'model "x" not found', client.embed, model="x", input="a")
refused(404, "not found", client.show, "x")
refused(500, "this server does not pull models", client.pull, "x")
refused(400, "does not support insert", client.generate, model=model, prompt="a", suffix="b")
refused(400, "does not support vision", client.chat, model=model, messages=[QUESTION[0] | {"images": [b"\x89PNG"]}])
refused(400, "temperature", client.chat, model=model, messages=QUESTION, options={"temperature": -1}, stream=True)
refused(400, "input length exceeds", client.generate, model=model, prompt="word " * 200_000)
for call, arguments in ((client.copy, (model, "y")), (client.delete, (model,)), (client.push, (model,))):
    refused(400, "is not available on this server", call, *arguments)
refused(400, "Creating models is not available", client.create, model="y", from_=model)
print("good")
