"""LangChain's ChatAnthropic: calls, streams, tools and structured output by a forced tool."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from pydantic import BaseModel

address, model = sys.argv[1:]
llm = ChatAnthropic(model=model, base_url=f"http://{address}", api_key="none", max_retries=0)


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"It is sunny in {city}."


class Weather(BaseModel):
    """The weather in a city."""

    city: str


whole = llm.invoke("Hello")
pieces = list(llm.stream("Hello"))
joined = pieces[0]
for piece in pieces[1:]:
    joined += piece
assert whole.text and joined.text
assert joined.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"], (joined, whole)
calls = llm.bind_tools([get_weather]).invoke("What is the weather in Paris?").tool_calls
assert [(call["name"], call["args"]) for call in calls] == [("get_weather", {"city": "Paris"})], calls
assert isinstance(llm.with_structured_output(Weather).invoke("What is the weather in Paris?"), Weather)
print("good")
