"""mem0: answers, tools, vectors, and memories in a store of its own. Arguments: HOST:PORT MODEL."""

import os
import sys
import tempfile

os.environ |= {"MEM0_TELEMETRY": "False", "MEM0_DIR": tempfile.mkdtemp()}

from mem0 import Memory

address, model = sys.argv[1:]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Current weather of a city", "parameters": PARAMETERS}
SERVER = {"model": model, "openai_base_url": f"http://{address}/v1", "api_key": "none"}
STORE = {"path": os.environ["MEM0_DIR"], "embedding_model_dims": 192}

memory = Memory.from_config(
    {
        "llm": {"provider": "openai", "config": SERVER | {"temperature": 0}},
        "embedder": {"provider": "openai", "config": SERVER | {"embedding_dims": 192}},
        "vector_store": {"provider": "qdrant", "config": STORE},
        "history_db_path": os.path.join(os.environ["MEM0_DIR"], "history.db"),
    }
)
question = [{"role": "user", "content": "What is the capital of France?"}]
assert memory.llm.generate_response(question) == "The capital of France is Paris."
weather = [{"role": "user", "content": "What is the weather in Paris?"}]
(call,) = memory.llm.generate_response(weather, tools=[{"type": "function", "function": WEATHER}])["tool_calls"]
assert call == {"name": "get_weather", "arguments": {"city": "Paris"}}
for text in ("I live in Paris", "I like green tea"):
    memory.add(text, user_id="me", infer=False)
stored = memory.get_all(filters={"user_id": "me"})["results"]
assert sorted(memory["memory"] for memory in stored) == ["I like green tea", "I live in Paris"]
found = memory.search("I live in Paris", filters={"user_id": "me"}, threshold=0.0)["results"]
assert found[0]["memory"] == "I live in Paris", found
print("good")
