"""LangChain over Ollama's API: chat, text, vectors, streams, tools, forms. Arguments: HOST:PORT MODEL."""

import json
import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel

address, model = sys.argv[1:]
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return json.dumps({"city": city, "sky": "sunny", "temperature": 21})


class Person(BaseModel):
    name: str
    age: int
    city: str


common = {"base_url": f"http://{address}", "model": model, "temperature": 0, "num_predict": 300}
chat = ChatOllama(**common, reasoning=False, validate_model_on_init=True)
answer = chat.invoke(QUESTION)
assert answer.content == ANSWER and answer.usage_metadata["output_tokens"] > 0, answer
assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == ANSWER
thought = ChatOllama(**common, reasoning=True).invoke(QUESTION)
assert thought.additional_kwargs["reasoning_content"] and "Paris" in thought.content, thought
messages = [HumanMessage("What is the weather in Paris and London?")]
messages.append(chat.bind_tools([get_weather]).invoke(messages))
assert [call["args"] for call in messages[-1].tool_calls] == [{"city": "Paris"}, {"city": "London"}], messages
messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
last = chat.bind_tools([get_weather]).invoke(messages)
assert not last.tool_calls and "London" in last.content, last
for method in ("json_schema", "json_mode"):
    person = chat.with_structured_output(Person, method=method).invoke(
        "Give me JSON for a person: Anna, 31 years old, from Paris."
    )
    assert person == Person(name="Anna", age=31, city="Paris"), person
text = OllamaLLM(**common | {"num_predict": 4})
assert text.invoke("Hello") == "".join(text.stream("Hello"))
reader = OllamaEmbeddings(base_url=f"http://{address}", model=model)
vectors = reader.embed_documents(["a", "b"])
assert len(vectors) == 2 and reader.embed_query("b") == vectors[1] != vectors[0]
print("good")
