"""LangGraph: an agent over three APIs that calls a tool, whole and streamed. Arguments: HOST:PORT MODEL."""

import sys

from langchain.agents import create_agent
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

address, model = sys.argv[1:]


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f'{{"city": "{city}", "sky": "sunny", "temperature": 21}}'


openai = {"model": model, "base_url": f"http://{address}/v1", "api_key": "none", "temperature": 0, "max_tokens": 200}
for client in (
    ChatOpenAI(**openai),
    ChatOpenAI(**openai, use_responses_api=True),
    ChatOllama(model=model, base_url=f"http://{address}", temperature=0, num_predict=200),
):
    agent = create_agent(client, [get_weather])
    limit = {"recursion_limit": 8}
    messages = agent.invoke({"messages": [("user", "What is the weather in Paris?")]}, limit)["messages"]
    kinds = [message.type for message in messages]
    assert kinds == ["human", "ai", "tool", "ai"] and "sunny" in messages[-1].text, messages
    again = {"messages": [("user", "What is the weather in London?")]}
    chunks = [chunk for chunk, _ in agent.stream(again, limit, stream_mode="messages")]
    text = "".join(chunk.text for chunk in chunks if chunk.type == "AIMessageChunk")
    assert "London" in text and any(chunk.type == "tool" for chunk in chunks), chunks
print("good")
