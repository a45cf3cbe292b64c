"""OpenAI's client at vLLM's Responses: whole, streamed, parsed, a loop of tools, reasoning, storage and errors."""

import json
import sys
import time

import openai
from openai import OpenAI
from pydantic import BaseModel

address, model = sys.argv[1:]
client = OpenAI(base_url=f"http://{address}/vllm/v1", api_key="none", max_retries=0)
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},  # looser than OpenAI's strict mode
    "strict": True,
}


class Person(BaseModel):
    name: str
    age: int
    city: str


extras = {"top_k": 5, "repetition_penalty": 1.0, "cache_salt": "tenant", "stop": ["zzz"]}
whole = client.responses.create(model=model, input=QUESTION, temperature=0, extra_body=extras)
assert whole.output_text == ANSWER and whole.status == "completed", whole
counted = whole.usage.input_tokens_details
# the 19 tokens of the prompt fill one page, which either was there already or is new
assert whole.max_output_tokens > 100 and counted.cached_tokens + counted.cache_write_tokens == 16, whole.usage

with client.responses.stream(model=model, input=QUESTION, temperature=0) as stream:
    texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    final = stream.get_final_response()
assert "".join(texts) == final.output_text == ANSWER

with client.responses.stream(model=model, input=QUESTION, temperature=0, max_output_tokens=2) as stream:
    *_, last_event = stream
assert last_event.type == "response.incomplete" and last_event.response.status == "incomplete", last_event
assert last_event.response.incomplete_details.reason == "max_output_tokens"

PERSON = "Mia is 34 years old and lives in Rome. Give name, age and city as JSON."
parsed = client.responses.parse(model=model, input=PERSON, text_format=Person, temperature=0)
assert parsed.output_parsed == Person(name="Mia", age=34, city="Rome"), parsed

items = [{"role": "user", "content": "What is the weather in Paris?"}]
first = client.responses.create(model=model, input=items, tools=[WEATHER], temperature=0)
(call,) = [item for item in first.output if item.type == "function_call"]
assert json.loads(call.arguments) == {"city": "Paris"} and call.call_id.startswith("chatcmpl-tool-"), call
result = json.dumps({"city": "Paris", "sky": "sunny", "temperature": 21})
output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
following = [*items, *(item.model_dump() for item in first.output), output]
second = client.responses.create(model=model, tools=[WEATHER], temperature=0, input=following)
assert "Paris" in second.output_text, second

thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}, "max_output_tokens": 200}
reasoned = client.responses.create(model=model, input=QUESTION, temperature=0, **thinking)
assert [item.type for item in reasoned.output] == ["reasoning", "message"] and reasoned.output[0].content[0].text

# what the server stores: the original does if VLLM_ENABLE_RESPONSES_API_STORE is set
try:
    found = client.responses.retrieve(whole.id)
except openai.NotFoundError as missing:
    assert f"Response with id '{whole.id}' not found." in str(missing)
else:
    assert found.output_text == ANSWER
    again = client.responses.create(model=model, input="And Italy?", previous_response_id=whole.id, temperature=0)
    assert again.usage.input_tokens > whole.usage.input_tokens
    running = client.responses.create(model=model, input=QUESTION, background=True, temperature=0)
    while running.status in ("queued", "in_progress"):
        time.sleep(0.05)
        running = client.responses.retrieve(running.id)
    assert running.output_text == ANSWER, running
    try:
        client.responses.cancel(running.id)
    except openai.BadRequestError as refusal:
        assert "Cannot cancel" in str(refusal) and refusal.param == "response_id"

for wrong, error, kind in (
    ({"model": "nope"}, openai.NotFoundError, "NotFoundError"),
    ({"temperature": 3}, openai.BadRequestError, "BadRequestError"),
    ({"previous_response_id": "resp_nope"}, openai.NotFoundError, "invalid_request_error"),
):
    try:
        client.responses.create(**({"model": model, "input": QUESTION} | wrong))
    except error as refusal:
        assert refusal.type == kind, refusal
    else:
        raise AssertionError(f"{wrong} was taken")
print("good")
