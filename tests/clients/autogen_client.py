"""AutoGen: answers, streams, structured output, and an agent that calls a function and reads its result."""

import asyncio
import json
import sys
from typing import Annotated

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel, Field

address, model = sys.argv[1:]
ABILITIES = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True,
             "family": "unknown"}  # fmt: skip
HELLO = [UserMessage(content="Hello", source="user")]


class Capital(BaseModel):
    city: Annotated[str, Field(max_length=12)]


async def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return json.dumps({"city": city, "sky": "sunny", "temperature": 20})


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=model, base_url=f"http://{address}/v1", api_key="none", model_info=ABILITIES, temperature=0
    )
    answer = await client.create(HELLO)
    assert answer.content.startswith("Hello") and answer.usage.completion_tokens > 0, answer
    *parts, streamed = [part async for part in client.create_stream(HELLO, include_usage=True)]
    assert len(parts) > 3 and "".join(parts) == streamed.content == answer.content, streamed
    assert streamed.usage == answer.usage, streamed
    answer = await client.create(HELLO, json_output=Capital)
    assert isinstance(Capital.model_validate_json(answer.content).city, str), answer
    for is_stream in (False, True):
        agent = AssistantAgent(
            "helper", client, tools=[get_weather], reflect_on_tool_use=True, model_client_stream=is_stream
        )
        result = await agent.run(task="What is the weather in Paris?")
        kinds = [message.type for message in result.messages]
        assert kinds == ["TextMessage", "ToolCallRequestEvent", "ToolCallExecutionEvent", "TextMessage"], kinds
        assert "Paris" in result.messages[-1].content, result
    await client.close()


asyncio.run(main())
print("good")
