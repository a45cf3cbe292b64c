"""LiteLLM with each of its providers that parley can stand in for. Arguments: HOST:PORT MODEL."""

import sys

import litellm

address, model = sys.argv[1:]
url = f"http://{address}"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
litellm.num_retries = 0

CHATS = {
    f"hosted_vllm/{model}": f"{url}/v1",
    f"openai/{model}": f"{url}/v1",
    "huggingface/tgi": url,
    f"databricks/{model}": f"{url}/serving-endpoints",
    f"anthropic/{model}": url,
}
for name, base in CHATS.items():
    options = {"model": name, "api_base": base, "api_key": "none", "messages": QUESTION, "max_tokens": 16}
    answer = litellm.completion(**options, temperature=0.01)
    assert answer.choices[0].message.content == ANSWER, (name, answer)
    chunks = litellm.completion(**options, temperature=0.01, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER, name
    try:
        litellm.completion(**options, temperature=-1)
    except litellm.exceptions.APIError as error:  # the base class of only some of its errors
        assert "temperature" in str(error), error
    except Exception as error:
        assert "temperature" in str(error), error
    else:
        raise AssertionError(f"{name}: it was not refused")

vectors = litellm.embedding(
    model=f"databricks/{model}", api_base=f"{url}/serving-endpoints", api_key="none", input=["Hello", "World"]
)
assert [entry["index"] for entry in vectors.data] == [0, 1] and len(vectors.data[0]["embedding"]) > 8

text = litellm.text_completion(
    model=f"text-completion-openai/{model}", api_base=f"{url}/v1", api_key="none", prompt="Hello", max_tokens=4
)
assert text.choices[0].text

generate = f"{url}/v2/models/{model}/generate"
triton = {"model": f"triton/{model}", "api_base": generate, "messages": [{"role": "user", "content": "Hello"}]}
whole = litellm.completion(**triton, max_tokens=8).choices[0].message.content
assert whole
chunks = litellm.completion(**triton, max_tokens=8, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
print("good")
