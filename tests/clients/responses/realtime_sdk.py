"""The openai package's Realtime client: a conversation in text with a tool, and a refusal. Takes HOST:PORT MODEL."""

import asyncio
import json
import sys

from openai import AsyncOpenAI, OpenAI

address, model = sys.argv[1:]
ANSWER = "The capital of France is Paris."
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SETTINGS = {"type": "realtime", "output_modalities": ["text"], "reasoning": {"effort": "none"}, "temperature": 0}


def user_item(text):
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def read_response(connection):
    """Return the text of the deltas, and the response."""
    text = ""
    for event in connection:
        assert event.type != "error", event
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.done":
            return text, event.response
    raise AssertionError("the connection has ended")


for path in ("/v1", "/openai/v1"):
    client = OpenAI(base_url=f"http://{address}{path}", api_key="none")
    with client.realtime.connect(model=model) as connection:
        assert connection.recv().type == "session.created"
        connection.session.update(session=SETTINGS)
        assert connection.recv().session.output_modalities == ["text"]
        connection.conversation.item.create(item=user_item("What is the capital of France?"))
        connection.response.create()
        text, response = read_response(connection)
        assert text == response.output[0].content[0].text == ANSWER, response
        assert response.status == "completed" and response.usage.output_tokens > 0
        connection.session.update(session={"type": "realtime", "tools": [WEATHER]})
        connection.conversation.item.create(item=user_item("What is the weather in Paris?"))
        connection.response.create()
        _, response = read_response(connection)
        (call,) = response.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
        output = json.dumps({"city": "Paris", "sky": "sunny", "temperature": 21})
        connection.conversation.item.create(
            item={"type": "function_call_output", "call_id": call.call_id, "output": output}
        )
        connection.response.create()
        assert "sunny" in read_response(connection)[0]
        connection.session.update(session={"type": "realtime", "output_modalities": ["audio"]})
        error = connection.recv()
        assert error.type == "error" and error.error.param == "session.output_modalities", error


async def ask_several():
    several = AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none")

    async def ask():
        async with several.realtime.connect(model=model) as connection:
            await connection.session.update(session=SETTINGS)
            await connection.response.create(response={"input": [user_item("What is the capital of France?")]})
            async for event in connection:
                if event.type == "response.done":
                    return event.response.output[0].content[0].text

    assert set(await asyncio.gather(*(ask() for _ in range(4)))) == {ANSWER}


asyncio.run(ask_several())
print("good")
