"""Semantic Kernel: chats, streams, embeddings, and agents that call a plugin, over chat completions and Responses."""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent, OpenAIResponsesAgent
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

address, model = sys.argv[1:]
QUESTION = "What is the weather in Paris?"


class WeatherPlugin:
    calls = 0

    @kernel_function(description="Get the weather in a city.")
    def get_weather(self, city: str) -> str:
        self.calls += 1
        return json.dumps({"city": city, "sky": "sunny", "temperature": 20})


async def main() -> None:
    client = AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none")
    service = OpenAIChatCompletion(ai_model_id=model, async_client=client)
    history = ChatHistory()
    history.add_user_message("Hello")
    settings = OpenAIChatPromptExecutionSettings(max_tokens=30, temperature=0)
    answer = await service.get_chat_message_content(history, settings)
    assert str(answer).startswith("Hello"), answer
    parts = [str(part) async for part in service.get_streaming_chat_message_content(history, settings)]
    assert len(parts) > 3 and "Hello" in "".join(parts), parts

    weather = WeatherPlugin()
    agents = (
        ChatCompletionAgent(service=service, name="helper", plugins=[weather]),
        OpenAIResponsesAgent(ai_model_id=model, client=client, name="helper", plugins=[weather]),
    )
    for agent in agents:
        assert "Paris" in str(await agent.get_response(QUESTION)), agent
        parts = [str(part.message) async for part in agent.invoke_stream(QUESTION)]
        assert len(parts) > 3 and "Paris" in "".join(parts), parts
    assert weather.calls == 4

    embedding = OpenAITextEmbedding(ai_model_id=model, async_client=client)
    assert (await embedding.generate_embeddings(["Hello", "Paris"])).shape[0] == 2


asyncio.run(main())
print("good")
