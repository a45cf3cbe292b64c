"""LangChain's Cohere integration: chats, streams, tools, vectors, ranked documents. Takes HOST:PORT MODEL."""

import os
import sys

from langchain_cohere import ChatCohere, CohereEmbeddings, CohereRerank
from langchain_core.tools import tool

address, model = sys.argv[1:]
os.environ["COHERE_API_KEY"] = "none"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"sunny in {city}"


for path in ("", "/cohere"):
    place = {"base_url": f"http://{address}{path}", "model": model}
    chat = ChatCohere(**place, temperature=0)
    assert chat.invoke(QUESTION).content == ANSWER
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == ANSWER
    (call,) = chat.bind_tools([get_weather]).invoke("What is the weather in Paris?").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"}), call
    embeddings = CohereEmbeddings(**place)
    first, second = embeddings.embed_documents([QUESTION, ANSWER])
    assert len(first) == len(second) and first != second and embeddings.embed_query(QUESTION) == first
    (best,) = CohereRerank(**place, top_n=1).rerank([ANSWER, "12345 + 67890"], QUESTION)
    assert best["index"] == 0 and best["relevance_score"] > 0, best
print("good")
