"""LlamaIndex's OpenAILike: chat and text, streams, errors. Arguments: HOST:PORT MODEL."""

import sys

import openai
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

address, model = sys.argv[1:]
QUESTION = [ChatMessage(role="user", content="What is the capital of France?")]
ANSWER = "The capital of France is Paris."
COMMON = {
    "model": model,
    "api_base": f"http://{address}/v1",
    "api_key": "none",
    "max_retries": 0,
    "context_window": 2048,
}

chat = OpenAILike(**COMMON, is_chat_model=True, temperature=0)
assert chat.chat(QUESTION).message.content == ANSWER
assert "".join(part.delta or "" for part in chat.stream_chat(QUESTION)) == ANSWER
text = OpenAILike(**COMMON, max_tokens=4, temperature=0)
whole = text.complete("Hello").text
assert whole and list(text.stream_complete("Hello"))[-1].text == whole
try:
    OpenAILike(**COMMON, is_chat_model=True, additional_kwargs={"top_p": 2}).chat(QUESTION)
except openai.BadRequestError as error:
    assert "top_p" in str(error)
else:
    raise AssertionError("it was not refused")
print("good")
