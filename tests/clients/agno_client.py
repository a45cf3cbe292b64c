"""Agno: a tool, typed output and streams, in five forms of model. Arguments: HOST:PORT MODEL."""

import sys
from typing import Literal

from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.ollama import Ollama
from agno.models.openai import OpenAIChat, OpenAIResponses
from agno.models.vllm import VLLM
from agno.run.base import RunStatus
from pydantic import BaseModel

address, name = sys.argv[1:]
url = f"http://{address}"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
openai = {"id": name, "base_url": f"{url}/v1", "api_key": "none", "temperature": 0}
models = [
    VLLM(**openai, max_tokens=100),
    OpenAIChat(**openai, max_tokens=100),
    OpenAIResponses(**openai, max_output_tokens=100),
    Claude(id=name, client_params={"base_url": url}, api_key="none", max_tokens=100),
    Ollama(id=name, host=url, options={"temperature": 0, "num_predict": 100}),
]
asked = []


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]


def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    asked.append(city)
    return '{"sky": "sunny", "temperature": 21}'


for model in models:
    asked.clear()
    run = Agent(model=model, tools=[get_weather], telemetry=False).run("What is the weather in Paris?")
    assert run.status == RunStatus.completed and "Paris" in run.content, run
    assert asked[:1] == ["Paris"] and run.metrics.output_tokens > 0, (asked, run.metrics)
    events = list(Agent(model=model, telemetry=False).run(QUESTION, stream=True))
    said = "".join(event.content or "" for event in events if event.event == "RunContent")
    assert said == ANSWER, said
    typed = Agent(model=model, output_schema=City, telemetry=False).run(QUESTION)
    assert isinstance(typed.content, City), typed
print("good")
