"""The calls that Open WebUI's backend makes to an Ollama server, as its source has them. Arguments: HOST:PORT MODEL."""

import json
import sys

import httpx

address, model = sys.argv[1:]
client = httpx.Client(base_url=f"http://{address}", timeout=300)
assert client.head("/").status_code == 200
assert client.get("/api/version").json()["version"].count(".") == 2  # its check of the connection
(entry,) = client.get("/api/tags").json()["models"]
assert entry["model"] == entry["name"] == f"{model}:latest"
assert all(entry[member] for member in ("digest", "size", "details"))
assert client.get("/api/ps").json()["models"][0]["model"] == entry["model"]
shown = client.post("/api/show", json={"model": entry["model"]}).json()
assert "completion" in shown["capabilities"] and shown["model_info"]
options = {"temperature": 0, "num_ctx": None, "top_k": None, "stop": None, "num_predict": 300}
body = {
    "model": entry["model"],
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "options": options,
    "think": False,
    "keep_alive": "5m",
    "stream": True,
}
with client.stream("POST", "/api/chat", json=body) as answer:
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.iter_lines()]
assert "".join(line["message"]["content"] for line in lines) == "The capital of France is Paris."
assert lines[-1]["done"] and lines[-1]["eval_duration"] > 0
with client.stream("POST", "/api/chat", json=body) as answer:  # the stop button
    next(answer.iter_lines())
assert client.post("/api/embed", json={"model": entry["model"], "input": ["a"]}).json()["embeddings"][0]
unload = client.post("/api/generate", json={"model": entry["model"], "prompt": "", "keep_alive": 0}).json()
assert unload["done_reason"] == "unload"
assert client.post("/api/chat", json=body | {"stream": False}).json()["message"]["content"]
print("good")
