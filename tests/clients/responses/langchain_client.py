"""LangChain with ``use_responses_api``: text, streams, a loop of tools, objects. Arguments: HOST:PORT MODEL."""

import json
import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

address, model = sys.argv[1:]
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
chat = ChatOpenAI(
    base_url=f"http://{address}/v1", api_key="none", model=model, temperature=0, max_retries=0, use_responses_api=True
)


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return json.dumps({"city": city, "sky": "sunny", "temperature": 21})


class Person(BaseModel):
    name: str
    age: int


assert chat.invoke(QUESTION).text == ANSWER
assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == ANSWER
bound = chat.bind_tools([get_weather])
messages = []
for city in ("Paris", "London"):
    messages.append(HumanMessage(f"What is the weather in {city}?"))
    messages.append(bound.invoke(messages))
    (call,) = messages[-1].tool_calls
    assert call["args"] == {"city": city}, messages[-1]
    messages.append(get_weather.invoke(call))
    messages.append(bound.invoke(messages))
    assert city in messages[-1].text, messages[-1]
forced = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("Hello")
assert forced.tool_calls[0]["name"] == "get_weather"
person = chat.with_structured_output(Person, method="json_schema").invoke("Tom is 30 years old.")
assert isinstance(person, Person)
print("good")
