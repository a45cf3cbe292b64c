"""Haystack: chats, streams, tools and structured output, over chat completions and Responses; an agent; embeddings."""

import sys
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel, Field

address, model = sys.argv[1:]
place = {"api_key": Secret.from_token("none"), "api_base_url": f"http://{address}/v1", "model": model}
HELLO = [ChatMessage.from_user("Hello")]
QUESTION = [ChatMessage.from_user("What is the weather in Paris?")]


class Capital(BaseModel):
    city: Annotated[str, Field(max_length=12)]


def get_weather(city: Annotated[str, "The city"]) -> dict:
    """Get the weather in a city."""
    return {"city": city, "sky": "sunny", "temperature": 20}


weather = create_tool_from_function(get_weather)


def check_generator(generator: OpenAIChatGenerator | OpenAIResponsesChatGenerator) -> None:
    (reply,) = generator.run(HELLO)["replies"]
    assert reply.text.startswith("Hello"), reply
    parts: list[str] = []
    (streamed,) = generator.run(HELLO, streaming_callback=lambda chunk: parts.append(chunk.content))["replies"]
    assert "".join(parts) == streamed.text and len(parts) > 3, (parts, streamed)
    (reply,) = generator.run(QUESTION, tools=[weather])["replies"]
    assert [(call.tool_name, call.arguments) for call in reply.tool_calls] == [("get_weather", {"city": "Paris"})]
    last = Agent(chat_generator=generator, tools=[weather]).run(QUESTION)["messages"][-1]
    assert "sunny" in last.text and "Paris" in last.text, last


check_generator(OpenAIChatGenerator(**place))
check_generator(OpenAIResponsesChatGenerator(**place))
for generator, member in ((OpenAIChatGenerator, "response_format"), (OpenAIResponsesChatGenerator, "text_format")):
    settings = {member: Capital, "temperature": 0}
    (reply,) = generator(generation_kwargs=settings, **place).run([ChatMessage.from_user("Hello")])["replies"]
    assert isinstance(Capital.model_validate_json(reply.text).city, str), reply
assert len(OpenAITextEmbedder(**place).run("Hello")["embedding"]) > 1
print("good")
