"""OpenAI's Python client: chat, text, streams, tools, log-probabilities, errors. Arguments: HOST:PORT MODEL."""

import json
import re
import sys

import openai

address, model = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def expect_error(kind, part, call, **options):
    try:
        call(**options)
    except kind as error:
        assert part in str(error), error
    else:
        raise AssertionError("it was not refused")


# the default /v1 and each API's own /v1 that speaks this protocol
for base in ("/v1", "/openai/v1", "/vllm/v1"):
    client = openai.OpenAI(base_url=f"http://{address}{base}", api_key="none", max_retries=0)
    assert [card.id for card in client.models.list()] == [model]
    create = client.chat.completions.create
    whole = create(model=model, messages=QUESTION, temperature=0)
    assert whole.choices[0].message.content == ANSWER and whole.choices[0].finish_reason == "stop"
    usage = {"include_usage": True}
    chunks = list(create(model=model, messages=QUESTION, temperature=0, stream=True, stream_options=usage))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    scored = create(model=model, messages=QUESTION, max_tokens=2, logprobs=True, top_logprobs=3)
    assert [len(token.top_logprobs) for token in scored.choices[0].logprobs.content] == [3, 3]
    several = create(model=model, messages=QUESTION, n=3, seed=1, max_tokens=4)
    assert [choice.index for choice in several.choices] == [0, 1, 2]

    text = client.completions.create(model=model, prompt=["Hello", "World"], max_tokens=4, temperature=0)
    assert len(text.choices) == 2 and text.usage.completion_tokens <= 8
    pieces = client.completions.create(model=model, prompt="Hello", max_tokens=4, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text

    called = create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        temperature=0,
    )
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] == "Paris"

    grammar = {"syntax": "lark", "definition": 'start: NUMBER (" + " NUMBER)+\nNUMBER: /[0-9]{1,2}/'}
    adder = {"name": "adder", "format": {"type": "grammar", "grammar": grammar}}
    forced = {
        "model": model,
        "messages": [{"role": "user", "content": "Add 3 and 4."}],
        "tools": [{"type": "custom", "custom": adder}],
        "tool_choice": {"type": "custom", "custom": {"name": "adder"}},
        "temperature": 0,
        "max_tokens": 40,
    }
    if base == "/vllm/v1":  # vLLM's server knows functions only
        expect_error(openai.BadRequestError, "Invalid value for `function`: `None` in `tool_choice`", create, **forced)
    else:
        (call,) = create(**forced).choices[0].message.tool_calls
        assert call.type == "custom" and re.match(r"\d{1,2} \+ \d", call.custom.input)
        pieces = [piece.choices[0].delta.tool_calls for piece in create(**forced, stream=True) if piece.choices]
        assert "".join(piece[0].custom["input"] for piece in pieces if piece) == call.custom.input

    vectors = client.embeddings.create(model=model, input=["Hello", "World", "Hello"])
    first, second, again = (entry.embedding for entry in vectors.data)
    assert first == again != second and abs(sum(x * x for x in first) - 1) < 1e-3
    plain = client.embeddings.create(model=model, input="Hello", encoding_format="float")
    assert plain.data[0].embedding == first and plain.usage.total_tokens == plain.usage.prompt_tokens
    short = client.embeddings.create(model=model, input="Hello", dimensions=16)
    assert len(short.data[0].embedding) == 16
    expect_error(
        openai.BadRequestError, "requested", client.embeddings.create, model=model, input="a", dimensions=10**6
    )

    expect_error(openai.NotFoundError, "other", create, model="other", messages=QUESTION)
    expect_error(openai.BadRequestError, "temperature", create, model=model, messages=QUESTION, temperature=-1)
    expect_error(openai.BadRequestError, "context", create, model=model, messages=QUESTION * 3000)
print("good")
