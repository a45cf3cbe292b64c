"""OpenAI's client with the Responses API: streams, parse, a loop of tools, background. Arguments: HOST:PORT MODEL."""

import json
import sys
import time

import openai
from openai import OpenAI
from pydantic import BaseModel

address, model = sys.argv[1:]
client = OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
                   "additionalProperties": False},
    "strict": True,
}  # fmt: skip


class Person(BaseModel):
    name: str
    age: int
    city: str


whole = client.responses.create(model=model, input=QUESTION, temperature=0)
assert whole.output_text == ANSWER and whole.status == "completed", whole
is_stored = whole.store  # not with --response-store 0

with client.responses.stream(model=model, input=QUESTION, temperature=0) as stream:
    texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    final = stream.get_final_response()
assert "".join(texts) == final.output_text == ANSWER

PERSON = "Mia is 34 years old and lives in Rome. Give name, age and city as JSON."
parsed = client.responses.parse(model=model, input=PERSON, text_format=Person, temperature=0)
assert parsed.output_parsed == Person(name="Mia", age=34, city="Rome"), parsed

# a loop of tools, with full items and, where they are stored, with the previous response
for uses_store in (False, True) if is_stored else (False,):
    items = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(model=model, input=items, tools=[WEATHER], temperature=0, store=uses_store)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Paris"}
    result = json.dumps({"city": "Paris", "sky": "sunny", "temperature": 21})
    output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
    if uses_store:
        following = {"previous_response_id": first.id, "input": [output]}
    else:
        following = {"input": [*items, *(item.model_dump() for item in first.output), output]}
    second = client.responses.create(model=model, tools=[WEATHER], temperature=0, store=uses_store, **following)
    assert "Paris" in second.output_text, second

# reasoning that is not stored here comes back sealed
thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}, "max_output_tokens": 200}
first = client.responses.create(
    model=model, input=QUESTION, store=False, include=["reasoning.encrypted_content"], temperature=0, **thinking
)
reasoning = next(item for item in first.output if item.type == "reasoning")
assert reasoning.encrypted_content
items = [{"role": "user", "content": QUESTION}, *(item.model_dump(exclude_none=True) for item in first.output)]
more = [*items, {"role": "user", "content": "And of Italy?"}]
assert client.responses.create(model=model, input=more, store=False, temperature=0, **thinking).output

if is_stored:
    count = client.responses.input_tokens.count(model=model, input=QUESTION)
    assert count.input_tokens == whole.usage.input_tokens
    assert client.responses.retrieve(whole.id).output_text == ANSWER
    assert [item.role for item in client.responses.input_items.list(whole.id)] == ["user"]
    running = client.responses.create(model=model, input=QUESTION, background=True, temperature=0)
    assert running.status == "queued"
    while running.status in ("queued", "in_progress"):
        time.sleep(0.05)
        running = client.responses.retrieve(running.id)
    assert running.output_text == ANSWER
    events = list(client.responses.create(model=model, input=QUESTION, background=True, stream=True, temperature=0))
    again = list(client.responses.retrieve(events[0].response.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in again] == [event.sequence_number for event in events[4:]]
    endless = client.responses.create(model=model, input="Hi", background=True, extra_body={"ignore_eos": True})
    assert client.responses.cancel(endless.id).status == "cancelled"
    conversation = client.conversations.create(metadata={"a": "b"})
    client.responses.create(model=model, input=QUESTION, conversation=conversation.id, temperature=0)
    assert len(list(client.conversations.items.list(conversation.id))) == 2
    client.responses.delete(whole.id)
    try:
        client.responses.retrieve(whole.id)
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("it was not deleted")

try:
    client.responses.create(model=model, input="Hi", tools=[{"type": "file_search", "vector_store_ids": ["a"]}])
except openai.BadRequestError as error:
    assert error.param == "tools[0].type", error
else:
    raise AssertionError("it was not refused")
print("good")
