"""databricks-langchain: chat, streams, tools, embeddings, errors. Arguments: HOST:PORT MODEL."""

import os
import sys

address, model = sys.argv[1:]
os.environ["DATABRICKS_TOKEN"] = "none"
ANSWER = "The capital of France is Paris."


def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return f"It is 20 degrees in {city}."


for surface in ("", "/databricks"):
    os.environ["DATABRICKS_HOST"] = f"http://{address}{surface}"
    from databricks_langchain import ChatDatabricks, DatabricksEmbeddings

    chat = ChatDatabricks(model=model, temperature=0, max_tokens=64)
    whole = chat.invoke("What is the capital of France?")
    assert whole.content == ANSWER and whole.usage_metadata["output_tokens"] > 0
    *chunks, last = chat.stream("What is the capital of France?")
    assert "".join(chunk.content for chunk in (*chunks, last)) == ANSWER
    counted = [chunk.usage_metadata["output_tokens"] for chunk in (*chunks, last) if chunk.usage_metadata]
    assert counted == sorted(counted) and counted[-1] == whole.usage_metadata["output_tokens"]

    (call,) = chat.bind_tools([get_weather]).invoke("What is the weather in Paris?").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})

    vectors = DatabricksEmbeddings(endpoint=model, query_params={"instruction": "Find:"})
    several = vectors.embed_documents([f"text {number}" for number in range(25)])  # the client batches by twenty
    assert len(several) == 25 and len({tuple(vector) for vector in several}) == 25
    assert vectors.embed_query("text 0") != several[0]

    try:
        ChatDatabricks(model="other").invoke("Hello")
    except Exception as error:
        assert "does not exist" in str(error), error
    else:
        raise AssertionError("it was not refused")
print("good")
