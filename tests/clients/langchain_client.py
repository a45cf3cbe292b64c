"""LangChain over OpenAI's and Hugging Face's APIs: chat, text, streams, tools, errors. Arguments: HOST:PORT MODEL."""

import json
import sys

import openai
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

address, model = sys.argv[1:]
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return json.dumps({"city": city, "sky": "sunny", "temperature": 21})


class get_time(BaseModel):
    """Get the local time in a city."""

    city: str


class Person(BaseModel):
    name: str
    age: int
    city: str


def get_message(model, messages, stream):
    """Returns a whole message, received at once or joined from chunks."""
    if not stream:
        return model.invoke(messages)
    first, *rest = model.stream(messages)
    for chunk in rest:
        first += chunk
    return first


url = f"http://{address}/v1"
chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_retries=0)
assert chat.invoke(QUESTION).content == ANSWER
assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == ANSWER
(call,) = chat.bind_tools([get_weather]).invoke("What is the weather in Paris?").tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
for thinking in (False, True):
    body = {"chat_template_kwargs": {"enable_thinking": thinking}}
    talker = ChatOpenAI(
        base_url=url, api_key="none", model=model, temperature=0, max_retries=0, max_tokens=300, extra_body=body
    )
    for stream in (False, True):
        messages = []
        for number, city in enumerate(("Paris", "London", "Berlin")):  # three rounds, the last one forced
            bound = talker.bind_tools([get_weather], tool_choice="any" if number == 2 else None)
            messages.append(HumanMessage(f"What is the weather in {city}?"))
            messages.append(get_message(bound, messages, stream))
            (call,) = messages[-1].tool_calls
            assert call["args"] == {"city": city}, messages[-1]
            messages.append(get_weather.invoke(call))
            messages.append(get_message(talker.bind_tools([get_weather]), messages, stream))
            assert not messages[-1].tool_calls and city in messages[-1].content, messages[-1]
        two = get_message(talker.bind_tools([get_weather]), "What is the weather in Paris and London?", stream)
        assert [call["args"]["city"] for call in two.tool_calls] == ["Paris", "London"]
        one = talker.bind_tools([get_weather], parallel_tool_calls=False)
        assert len(get_message(one, "What is the weather in Paris and London?", stream).tool_calls) == 1
        named = talker.bind_tools([get_weather], tool_choice="get_weather")
        (call,) = get_message(named, "Hello!", stream).tool_calls
        assert list(call["args"]) == ["city"]
    vectors = talker.with_structured_output(get_time, method="function_calling").invoke("What time is it in Paris?")
    assert vectors == get_time(city="Paris"), vectors
    for method in ("json_schema", "json_mode"):
        structured = talker.with_structured_output(Person, method=method)
        vectors = structured.invoke("Give me JSON for a person: Anna, 31 years old, from Paris.")
        assert vectors == Person(name="Anna", age=31, city="Paris"), vectors
text = OpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=4)
assert text.invoke("Hello") == "".join(text.stream("Hello"))
# without this option it would use OpenAI's own tokenizer, which it downloads
reader = OpenAIEmbeddings(base_url=url, api_key="none", model=model, check_embedding_ctx_length=False, chunk_size=7)
vectors = reader.embed_documents([f"text {i}" for i in range(20)])
assert len(vectors) == 20 and reader.embed_query("text 3") == vectors[3] != vectors[4]
try:
    chat.bind(temperature=-1).invoke(QUESTION)
except openai.BadRequestError as error:
    assert "temperature" in str(error)
else:
    raise AssertionError("it was not refused")

# tests its defaults as well: with typical_p, top_p and a temperature, TGI samples although do_sample is false
endpoint = HuggingFaceEndpoint(endpoint_url=f"http://{address}", max_new_tokens=8, seed=7)
endpoint_text = endpoint.invoke("Hello")
streamed = "".join(endpoint.stream("Hello"))
assert (
    endpoint_text and streamed.removesuffix("<|endoftext|>") == endpoint_text
)  # a stream also yields the final special token
answer = ChatHuggingFace(llm=HuggingFaceEndpoint(endpoint_url=f"http://{address}", temperature=0.01)).invoke(QUESTION)
assert answer.content == ANSWER, answer
print("good")
