"""The routers of Open WebUI's backend, as its page calls them: connections of all forms, chats and tools.

Arguments: HOST:PORT MODEL. Its other parts (documents, speech, users) are not loaded. The connections have the forms of
OpenAI's chat completions and Responses, and of Ollama.
"""

import asyncio
import json
import os
import sys
import tempfile
from typing import Any

address, model = sys.argv[1:]
folder = tempfile.TemporaryDirectory()
os.environ.update(
    DATA_DIR=folder.name,
    FROM_INIT_PY="true",  # it looks for its pages within its package
    OFFLINE_MODE="true",
    VECTOR_DB="opensearch",  # the lightest package for documents, which are not used
    WEBUI_AUTH="false",
    WEBUI_SECRET_KEY="k",
)

import httpx  # noqa: E402
from fastapi import FastAPI  # noqa: E402
from open_webui.models.users import UserModel  # noqa: E402
from open_webui.routers import ollama, openai  # noqa: E402
from open_webui.utils.auth import get_admin_user, get_verified_user  # noqa: E402
from open_webui.utils.session_pool import get_session  # noqa: E402

times = {"last_active_at": 0, "updated_at": 0, "created_at": 0}
USER = UserModel(id="u", email="a@b.c", name="Ann", role="admin", profile_image_url="", **times)
ASKED = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
ANSWER = "The capital of France is Paris."
WEATHER = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [{
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }],
}  # fmt: skip


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, (path, answer.status_code, answer.text)
    return answer


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def said_in(events: list[dict[str, Any]]) -> str:
    """Return the text of a stream of chat completions, or of a response, which the page itself reads."""
    return "".join(
        event["delta"] if event.get("type") == "response.output_text.delta" else choice["delta"].get("content") or ""
        for event in events
        for choice in event.get("choices", [{"delta": {}}])
    )


async def check_openai(client: httpx.AsyncClient, connection: dict[str, Any]) -> None:
    base = f"http://{address}/v1"
    config = {"ENABLE_OPENAI_API": True, "OPENAI_API_BASE_URLS": [base], "OPENAI_API_KEYS": ["none"]}
    await post(client, "/openai/config/update", config | {"OPENAI_API_CONFIGS": {"0": connection}})
    await post(client, "/openai/verify", {"url": base, "key": "none", "config": connection})
    assert model in [entry["id"] for entry in (await client.get("/openai/models")).json()["data"]]
    body = {"model": model, "temperature": 0, "max_tokens": 100} | ASKED
    answer = (await post(client, "/openai/chat/completions", body)).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER, answer
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    events = events_of(await post(client, "/openai/chat/completions", body | streaming))
    assert said_in(events) == ANSWER, events
    usage = events[-1].get("usage") or events[-1]["response"]["usage"]
    assert usage["total_tokens"] > 0
    called = await post(client, "/openai/chat/completions", body | streaming | WEATHER)
    assert "get_weather" in called.text and events_of(called)


async def check_ollama(client: httpx.AsyncClient) -> None:
    url = f"http://{address}"
    config = {"ENABLE_OLLAMA_API": True, "OLLAMA_BASE_URLS": [url], "OLLAMA_API_CONFIGS": {}}
    await post(client, "/ollama/config/update", config)
    assert (await post(client, "/ollama/verify", {"url": url, "key": ""})).json()["version"]
    (entry,) = (await client.get("/ollama/api/tags")).json()["models"]
    name = entry["model"]
    assert name == f"{model}:latest" and (await client.get("/ollama/api/version")).json()["version"]
    assert (await client.get("/ollama/api/ps")).status_code == 200
    assert "tools" in (await post(client, "/ollama/api/show", {"model": name})).json()["capabilities"]
    body = {"model": name, "options": {"temperature": 0, "num_predict": 100}} | ASKED
    assert (await post(client, "/ollama/api/chat", body | {"stream": False})).json()["message"]["content"] == ANSWER
    answer = await post(client, "/ollama/api/chat", body | {"stream": True, "think": False, "keep_alive": "5m"})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == ANSWER and lines[-1]["done"]
    called = (await post(client, "/ollama/api/chat", body | {"stream": False} | WEATHER)).json()
    assert called["message"]["tool_calls"][0]["function"] == {
        "index": 0, "name": "get_weather", "arguments": {"city": "Paris"},
    }  # fmt: skip
    typed = (await post(client, "/ollama/api/chat", body | {"stream": False, "format": "json"})).json()
    assert isinstance(json.loads(typed["message"]["content"]), dict)
    passed: dict[str, dict[str, Any]] = {
        "v1/chat/completions": ASKED | {"stream": True},
        "v1/completions": {"prompt": "a", "max_tokens": 4},
        "v1/messages": ASKED | {"max_tokens": 20},
        "v1/responses": {"input": "What is the capital of France?"},
        "api/generate": {"prompt": "Hi", "stream": False},
        "api/embed": {"input": ["a"]},
        "api/unload": {},
    }
    for path, members in passed.items():
        await post(client, f"/ollama/{path}", {"model": name} | members)


async def main() -> None:
    app = FastAPI()
    app.include_router(openai.router, prefix="/openai")
    app.include_router(ollama.router, prefix="/ollama")
    app.dependency_overrides |= dict.fromkeys((get_admin_user, get_verified_user), lambda: USER)
    app.state.OPENAI_MODELS, app.state.OLLAMA_MODELS, app.state.MODELS = {}, {}, {}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://webui", timeout=100) as client:
        await check_openai(client, {"enable": True})
        await check_openai(client, {"enable": True, "api_type": "responses"})
        await check_ollama(client)
    await (await get_session()).close()


asyncio.run(main())
print("good")
