"""CrewAI: its LLM over three APIs, and a crew whose answer follows a schema. Arguments: HOST:PORT MODEL."""

import os
import sys
from typing import Literal

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", OTEL_SDK_DISABLED="true", CREWAI_TRACING_ENABLED="false")

from crewai import LLM, Agent, Crew, Task
from pydantic import BaseModel

address, model = sys.argv[1:]


class Rating(BaseModel):
    stars: Literal[1, 2, 3]
    mood: Literal["good", "bad"]


urls = {"openai": f"http://{address}/v1", "hosted_vllm": f"http://{address}/v1", "ollama": f"http://{address}"}
for provider, url in urls.items():
    client = LLM(model=f"{provider}/{model}", base_url=url, api_key="none", temperature=0, max_tokens=100)
    assert "Paris" in client.call("What is the capital of France?"), provider

client = LLM(model=f"openai/{model}", base_url=urls["openai"], api_key="none", temperature=0, max_tokens=100)
agent = Agent(role="helper", goal="answer", backstory="none", llm=client, max_iter=2)
task = Task(description="Rate Paris.", expected_output="a rating", agent=agent, output_pydantic=Rating)
assert Crew(agents=[agent], tasks=[task]).kickoff().pydantic.stars in (1, 2, 3)
print("good")
