"""LangChain over OpenAI's and Hugging Face's APIs: chat, text, streams, tools, errors. Arguments: HOST:PORT MODEL."""

import sys

import openai
from langchain_core.tools import tool
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

address, model = sys.argv[1:]
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return city


url = f"http://{address}/v1"
chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_retries=0)
assert chat.invoke(QUESTION).content == ANSWER
assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == ANSWER
(call,) = chat.bind_tools([get_weather]).invoke("What is the weather in Paris?").tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
text = OpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=4)
assert text.invoke("Hello") == "".join(text.stream("Hello"))
# without this option it would take OpenAI's own tokenizer, which it downloads
reader = OpenAIEmbeddings(base_url=url, api_key="none", model=model, check_embedding_ctx_length=False, chunk_size=7)
found = reader.embed_documents([f"text {i}" for i in range(20)])
assert len(found) == 20 and reader.embed_query("text 3") == found[3] != found[4]
try:
    chat.bind(temperature=-1).invoke(QUESTION)
except openai.BadRequestError as error:
    assert "temperature" in str(error)
else:
    raise AssertionError("it was not refused")

# its defaults are part of the trial: with typical_p, top_p and a temperature TGI draws although do_sample is false
endpoint = HuggingFaceEndpoint(endpoint_url=f"http://{address}", max_new_tokens=8, seed=7)
said = endpoint.invoke("Hello")
streamed = "".join(endpoint.stream("Hello"))
assert said and streamed.removesuffix("<|endoftext|>") == said  # in a stream the last token is shown, too
answer = ChatHuggingFace(llm=HuggingFaceEndpoint(endpoint_url=f"http://{address}", temperature=0.01)).invoke(QUESTION)
assert answer.content == ANSWER, answer
print("good")
