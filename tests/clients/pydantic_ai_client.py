"""Pydantic AI: agents with a tool and typed output, on the APIs of OpenAI and Anthropic. Arguments: HOST:PORT MODEL."""

import asyncio
import sys
from typing import Annotated

from pydantic import BaseModel, Field
from pydantic_ai import Agent, FunctionToolCallEvent, NativeOutput, PartDeltaEvent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

address, name = sys.argv[1:]
openai_provider = OpenAIProvider(base_url=f"http://{address}/v1", api_key="none")
vllm_provider = OpenAIProvider(base_url=f"http://{address}/vllm/v1", api_key="none")
anthropic_provider = AnthropicProvider(base_url=f"http://{address}/anthropic", api_key="none")
openai_models = [
    OpenAIChatModel(name, provider=openai_provider),
    OpenAIResponsesModel(name, provider=openai_provider),
    OpenAIChatModel(name, provider=vllm_provider),
    OpenAIResponsesModel(name, provider=vllm_provider),
]


class Place(BaseModel):
    city: Annotated[str, Field(max_length=12)]
    country: Annotated[str, Field(max_length=12)]


async def check_tool(model: Model) -> None:
    agent = Agent(model, model_settings={"temperature": 0})
    asked = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the current weather in a city."""
        asked.append(city)
        return f'{{"city": "{city}", "sky": "sunny", "temperature": 21}}'

    result = await agent.run("What is the weather in Paris?")
    assert asked == ["Paris"] and "Paris" in result.output, result
    assert result.usage.requests == 2 and result.usage.output_tokens, result.usage
    async with agent.run_stream_events("What is the weather in Rome?") as stream:
        events = [event async for event in stream]
    assert asked == ["Paris", "Rome"] and "Rome" in events[-1].result.output, events
    assert {PartDeltaEvent, FunctionToolCallEvent} <= {type(event) for event in events}, events


async def check_output(model: Model) -> None:
    settings = {"temperature": 0, "max_tokens": 200}
    for output_type in (Place, NativeOutput(Place)):  # by a forced tool call, by response_format
        agent = Agent(model, output_type=output_type, model_settings=settings)
        assert isinstance((await agent.run("What is the capital of France?")).output, Place)
    async with agent.run_stream("What is the capital of France?") as stream:
        assert isinstance(await stream.get_output(), Place)


async def main() -> None:
    for model in (*openai_models, AnthropicModel(name, provider=anthropic_provider)):
        await check_tool(model)
    for model in openai_models:
        await check_output(model)


asyncio.run(main())
print("good")
