"""databricks-openai: chat, streams, tools, vectors, errors. Arguments: HOST:PORT MODEL."""

import json
import sys

import openai
from databricks.sdk import WorkspaceClient
from databricks_openai import DatabricksOpenAI

address, model = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}

for surface in ("", "/databricks"):
    workspace = WorkspaceClient(host=f"http://{address}{surface}", token="none")
    client = DatabricksOpenAI(workspace_client=workspace, max_retries=0)
    create = client.chat.completions.create
    whole = create(model=model, messages=QUESTION, temperature=0)
    assert whole.choices[0].message.content == ANSWER and whole.id.startswith("chatcmpl_")
    chunks = list(create(model=model, messages=QUESTION, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    counted = [chunk.usage.completion_tokens for chunk in chunks]
    assert counted == sorted(counted) and chunks[-1].usage.total_tokens == whole.usage.total_tokens

    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    message = create(model=model, messages=messages, tools=[WEATHER], temperature=0).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] == "Paris"
    tool_message = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 20}'}
    again = [*messages, message.model_dump(exclude_none=True), tool_message]
    assert create(model=model, messages=again, tools=[WEATHER], temperature=0).choices[0].message.content

    text = client.completions.create(model=model, prompt="Hello", max_tokens=4)
    assert text.choices[0].text
    vectors = client.embeddings.create(model=model, input=["Hello", "World"])
    assert [entry.index for entry in vectors.data] == [0, 1] and len(vectors.data[0].embedding) > 8

    for kind, part, options in (
        (openai.NotFoundError, "does not exist", {"model": "other"}),
        (openai.BadRequestError, "temperature", {"temperature": 9}),
        (openai.BadRequestError, "context", {"messages": [{"role": "user", "content": "x " * 20_000}]}),
    ):
        try:
            create(**{"model": model, "messages": QUESTION} | options)
        except kind as error:
            assert part in str(error), error
        else:
            raise AssertionError(f"{options}: it was not refused")
print("good")
