"""OpenAI's Agents SDK: an agent that calls a tool, whole and streamed. Arguments: HOST:PORT MODEL."""

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

address, model = sys.argv[1:]
set_tracing_disabled(True)
asked = []


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    asked.append(city)
    return f'{{"city": "{city}", "sky": "sunny", "temperature": 21}}'


async def main() -> None:
    client = AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0)
    agent = Agent(
        name="Assistant",
        model=OpenAIResponsesModel(model=model, openai_client=client),
        model_settings=ModelSettings(temperature=0),
        tools=[get_weather],
    )
    result = await Runner.run(agent, "What is the weather in Paris?", max_turns=4)
    assert asked == ["Paris"] and "Paris" in result.final_output, result
    streamed = Runner.run_streamed(agent, "What is the weather in Rome?", max_turns=4)
    kinds = [event.type async for event in streamed.stream_events()]
    assert asked == ["Paris", "Rome"] and "Rome" in streamed.final_output, streamed
    assert "raw_response_event" in kinds
    history = [*result.to_input_list(), {"role": "user", "content": "What is the weather in London?"}]
    assert "London" in (await Runner.run(agent, history, max_turns=4)).final_output


asyncio.run(main())
print("good")
