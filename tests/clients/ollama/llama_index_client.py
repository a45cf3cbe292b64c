"""LlamaIndex's Ollama classes: text, streams, tools, a schema, thinking, vectors. Arguments: HOST:PORT MODEL."""

import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.llms.ollama import Ollama
from pydantic import BaseModel

address, model = sys.argv[1:]
url = f"http://{address}"
CAPITAL = [ChatMessage(role="user", content="What is the capital of France?")]


class Rating(BaseModel):
    stars: Literal[1, 2, 3]
    mood: Literal["good", "bad"]


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"It is sunny in {city}."


client = Ollama(model=model, base_url=url, temperature=0, context_window=2000, additional_kwargs={"num_predict": 100})
assert "Paris" in client.complete(CAPITAL[0].content).text
answer = client.chat(CAPITAL).message.content
assert "Paris" in answer and "".join(part.delta for part in client.stream_chat(CAPITAL)) == answer
weather = FunctionTool.from_defaults(get_weather)
response = client.chat_with_tools([weather], user_msg="What is the weather in Paris?")
(call,) = client.get_tool_calls_from_response(response)
assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Paris"}), call
assert client.as_structured_llm(Rating).chat(CAPITAL).raw.stars in (1, 2, 3)
thinking = Ollama(model=model, base_url=url, temperature=0, thinking=True)
message = thinking.chat([ChatMessage(role="user", content="What is 47 + 38?")]).message
assert "85" in message.content and len(message.blocks) == 2, message
vectors = OllamaEmbedding(model_name=model, base_url=url)
assert vectors.get_text_embedding_batch(["a", "b"])[0] == vectors.get_text_embedding("a")
print("good")
