"""LiteLLM's two providers for Ollama: ``ollama`` and ``ollama_chat``. Arguments: HOST:PORT MODEL."""

import sys

import litellm

address, model = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
litellm.num_retries = 0
for name in (f"ollama_chat/{model}", f"ollama/{model}"):
    options = {"model": name, "api_base": f"http://{address}", "messages": QUESTION, "max_tokens": 300}
    whole = litellm.completion(**options, temperature=0).choices[0].message.content
    chunks = litellm.completion(**options, temperature=0, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in whole and "Paris" in streamed, (name, whole, streamed)
    try:
        litellm.completion(**options, temperature=-1)
    except Exception as error:
        assert "temperature" in str(error), error
    else:
        raise AssertionError(f"{name}: it was not refused")
vectors = litellm.embedding(model=f"ollama/{model}", api_base=f"http://{address}", input=["Hello", "World"])
assert [entry["index"] for entry in vectors.data] == [0, 1] and len(vectors.data[0]["embedding"]) > 8
print("good")
