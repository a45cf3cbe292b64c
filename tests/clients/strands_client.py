"""Strands Agents: a tool and typed output in five forms of model. Arguments: HOST:PORT MODEL."""

import sys
from typing import Literal

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.litellm import LiteLLMModel
from strands.models.ollama import OllamaModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel

address, name = sys.argv[1:]
url = f"http://{address}"
openai = {"base_url": f"{url}/v1", "api_key": "none"}
cold = {"temperature": 0, "max_tokens": 100}
ollama_model = OllamaModel(url, model_id=name, temperature=0, max_tokens=100)
models = [
    OpenAIModel(client_args=openai, model_id=name, params=cold),
    OpenAIResponsesModel(
        client_args=openai, model_id=name, params={"temperature": 0, "max_output_tokens": 100, "store": False}
    ),
    AnthropicModel(client_args={"base_url": url, "api_key": "none"}, model_id=name, max_tokens=100),
    LiteLLMModel(client_args={"api_base": f"{url}/v1", "api_key": "none"}, model_id=f"hosted_vllm/{name}", params=cold),
    ollama_model,
]
asked = []


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    asked.append(city)
    return "sunny, 21 degrees"


for model in models:
    asked.clear()
    agent = Agent(model=model, tools=[get_weather], callback_handler=None)
    result = agent("What is the weather in Paris?")
    assert asked == ["Paris"] and result.stop_reason == "end_turn" and "21 degrees in Paris" in str(result), result
    usage = result.metrics.accumulated_usage
    assert usage["outputTokens"] > 0 and usage["totalTokens"] > usage["outputTokens"], usage
    if model is not ollama_model:  # Ollama's API cannot force a tool call, which typed output needs
        agent = Agent(model=model, callback_handler=None)
        typed = agent("What is the capital of France?", structured_output_model=City)
        assert isinstance(typed.structured_output, City), typed
print("good")
