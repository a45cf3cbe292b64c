"""What each dialect costs: microseconds of processor time of the API process per request and per streamed token.

    python bench/dialects.py [MODEL] [--requests 400] [--tokens 64] [--rounds 5]

The whole server runs in this process over the scripted engine and is called as an ASGI application, without sockets, on
one thread. Dialects take turns within a round, so that what else the machine does hits all alike; medians over the
rounds. Per request: an answer in one piece of one token. Per token: what a stream of more tokens costs beyond one of a
single token. The engine's own share is in both, and the same for all. Markdown on standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import time
from typing import Any

from starlette.types import ASGIApp

from parley import hub
from parley.engine.fake import FAKE, FakeEngine
from parley.server.app import build
from parley.server.options import ServerOptions
from parley.server.service import Service
from parley.types import Settings

TEXT = "time year people way day man thing woman life child world school state family student group country problem"
TALK = [{"role": "user", "content": TEXT}]
LONG = 1 << 20


def openai(prompt: dict[str, Any], tokens: int, stream: bool) -> dict[str, Any]:
    return prompt | {"max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}


def chat(tokens: int, stream: bool) -> dict[str, Any]:
    return openai({"messages": TALK}, tokens, stream)


def text(tokens: int, stream: bool) -> dict[str, Any]:
    return openai({"prompt": TEXT}, tokens, stream)


def flavour(tokens: int, stream: bool) -> dict[str, Any]:
    return {"messages": TALK, "max_tokens": tokens, "stream": stream, "temperature": 0}


def tgi(tokens: int, stream: bool) -> dict[str, Any]:
    return {"inputs": TEXT, "parameters": {"max_new_tokens": tokens, "details": True}, "stream": stream}


def triton(tokens: int, stream: bool) -> dict[str, Any]:
    return {"text_input": TEXT, "max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}


# name: path of an answer in one piece, path of a stream, body
DIALECTS = {
    "OpenAI chat": ("/v1/chat/completions", "/v1/chat/completions", chat),
    "OpenAI completions": ("/v1/completions", "/v1/completions", text),
    "vLLM chat": ("/vllm/v1/chat/completions", "/vllm/v1/chat/completions", chat),
    "vLLM completions": ("/vllm/v1/completions", "/vllm/v1/completions", text),
    "vLLM generate": ("/vllm/generate", "/vllm/generate", text),
    "TGI": ("/", "/", tgi),
    "TGI chat": ("/tgi/v1/chat/completions", "/tgi/v1/chat/completions", flavour),
    "Triton": ("/v2/models/{}/generate", "/v2/models/{}/generate_stream", triton),
}


async def call(app: ASGIApp, path: str, body: bytes) -> int:
    """One request. Its status; what is sent goes nowhere."""
    given = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0

    async def receive() -> Any:
        return given.pop() if given else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": headers, "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1),
             "server": ("127.0.0.1", 80), "root_path": ""}  # fmt: skip
    await app(scope, receive, send)
    return status


async def cost(app: ASGIApp, path: str, body: dict[str, Any], requests: int) -> float:
    """Seconds of processor time per request."""
    data = json.dumps(body).encode()
    began = time.process_time()
    for _ in range(requests):
        status = await call(app, path, data)
        assert status == 200, (path, status)
    return (time.process_time() - began) / requests


async def measure(options: argparse.Namespace) -> None:
    folder = str(hub.resolve(options.model))
    info = FAKE.__class__(**{name: getattr(FAKE, name) for name in FAKE.__struct_fields__} | {"vocab_size": LONG})
    engine = FakeEngine(reply=lambda work, index: [70 + n % 50 for n in range(work.max_tokens)], info=info)
    service = Service(ServerOptions(access_log=False), Settings(model=folder), engine)
    await service.load()
    app = build(service)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in DIALECTS}
    for _ in range(options.rounds):
        for name, (whole, stream, body) in DIALECTS.items():
            whole, stream = whole.format(service.names[0]), stream.format(service.names[0])
            request = await cost(app, whole, body(1, False), options.requests)
            short = await cost(app, stream, body(1, True), options.requests // 4)
            long = await cost(app, stream, body(1 + options.tokens, True), options.requests // 4)
            seen[name].append((request, (long - short) / options.tokens))
    await engine.close()
    print("| Dialect | µs per request | of OpenAI's | µs per streamed token | of OpenAI's |\n|---|---|---|---|---|")
    base = [statistics.median(column) for column in zip(*seen["OpenAI chat"], strict=True)]
    for name, rounds in seen.items():
        request, token = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {name} | {request * 1e6:.0f} | {request / base[0]:.2f} | {token * 1e6:.1f} | {token / base[1]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="", help="folder or name; only its tokenizer counts")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    logging.disable(logging.WARNING)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
