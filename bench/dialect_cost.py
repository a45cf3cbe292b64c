"""Measures the cost of each dialect: microseconds of the API process's CPU time per request and per streamed token.

    python bench/dialect_cost.py [MODEL] [--requests 400] [--tokens 64] [--rounds 5] [--only NAME,…]

The whole server runs on the scripted engine, in a thread whose CPU time is read. A client sends requests over a socket,
one at a time. Dialects take turns within a round, so that other load on the machine affects all alike; results are
medians over the rounds. Per request: an unstreamed answer of one token. Per token: the additional cost of a longer
stream over one of a single token. Sockets and the scripted engine are in both, the same for all. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import logging
import statistics
import threading
import time
from typing import Any

import msgspec
import uvloop

from parley import hub
from parley.boot.server_parts import ServerParts
from parley.disagg.kv.peer import KVPeer
from parley.engine.scripted_engine import SCRIPTED_MODEL, ScriptedEngine
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import EngineRequest, ParleySettings
from parley.web import port as http_port

TEXT = "time year people way day man thing woman life child world school state family student group country problem"
TALK = [{"role": "user", "content": TEXT}]


def openai_body(prompt: dict[str, Any], tokens: int, stream: bool) -> dict[str, Any]:
    return prompt | {"max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}


def chat_body(tokens: int, stream: bool) -> dict[str, Any]:
    return openai_body({"messages": TALK}, tokens, stream)


def response_body(tokens: int, stream: bool) -> dict[str, Any]:
    return {"input": TEXT, "max_output_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}


def mindie_chat_body(tokens: int, stream: bool) -> dict[str, Any]:
    return chat_body(tokens, stream) | {"model": "dummy"}


def completion_body(tokens: int, stream: bool) -> dict[str, Any]:
    return openai_body({"prompt": TEXT}, tokens, stream)


def plain_chat_body(tokens: int, stream: bool) -> dict[str, Any]:
    return {"messages": TALK, "max_tokens": tokens, "stream": stream, "temperature": 0}


def tgi_body(tokens: int, stream: bool) -> dict[str, Any]:
    return {"inputs": TEXT, "parameters": {"max_new_tokens": tokens, "details": True}, "stream": stream}


def triton_body(tokens: int, stream: bool) -> dict[str, Any]:
    return {"text_input": TEXT, "max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}


def anthropic_body(tokens: int, stream: bool) -> dict[str, Any]:
    return {"model": "model", "messages": TALK, "max_tokens": tokens, "stream": stream, "temperature": 0}


def ollama_chat_body(tokens: int, stream: bool) -> dict[str, Any]:
    options = {"num_predict": tokens, "temperature": 0}
    return {"model": "model", "messages": TALK, "stream": stream, "options": options, "think": False}


def ollama_generate_body(tokens: int, stream: bool) -> dict[str, Any]:
    options = {"num_predict": tokens, "temperature": 0}
    return {"model": "model", "prompt": TEXT, "stream": stream, "options": options, "think": False}


BASE = "OpenAI chat"  # the dialect that others are compared with
# name: path of an unstreamed answer, path of a stream, body
DIALECTS = {
    "OpenAI chat": ("/v1/chat/completions", "/v1/chat/completions", chat_body),
    "OpenAI Responses": ("/v1/responses", "/v1/responses", response_body),
    "OpenAI completions": ("/v1/completions", "/v1/completions", completion_body),
    "vLLM chat": ("/vllm/v1/chat/completions", "/vllm/v1/chat/completions", chat_body),
    "vLLM completions": ("/vllm/v1/completions", "/vllm/v1/completions", completion_body),
    "vLLM generate": ("/vllm/generate", "/vllm/generate", completion_body),
    "TGI": ("/", "/", tgi_body),
    "TGI chat": ("/tgi/v1/chat/completions", "/tgi/v1/chat/completions", plain_chat_body),
    "MindIE": ("/infer", "/infer", tgi_body),
    "MindIE chat": ("/mindie/v1/chat/completions", "/mindie/v1/chat/completions", mindie_chat_body),
    "Triton": ("/v2/models/{}/generate", "/v2/models/{}/generate_stream", triton_body),
    "Anthropic Messages": ("/v1/messages", "/v1/messages", anthropic_body),
    "Ollama chat": ("/api/chat", "/api/chat", ollama_chat_body),
    "Ollama generate": ("/api/generate", "/api/generate", ollama_generate_body),
}


class ServerThread(threading.Thread):
    """A server with its own event loop. ``seconds``: the CPU time it has used."""

    def __init__(self, folder: str):
        super().__init__(daemon=True)
        engine = ScriptedEngine(scripted_tokens, info=msgspec.structs.replace(SCRIPTED_MODEL, vocab_size=1 << 20))
        options = ServerOptions(port=0, access_log=False)
        parts = ServerParts(options, [ServedModel(("model",), ParleySettings(model=folder), engine, options)], KVPeer())
        self.service = parts.registry
        self._sock = http_port.open_listener(options.host, 0)
        self.port = self._sock.getsockname()[1]
        self._server = http_port.HttpServer(http_port.uvicorn_config(options, parts.build_app()))
        self._ready = threading.Event()
        self.start()
        self._ready.wait()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the server has it
            runner.run(self._serve_until_stopped())

    async def _serve_until_stopped(self) -> None:
        await self.service.main_model.load_engine()
        http_port.freeze_objects()
        self._ready.set()
        await self._server.serve(sockets=[self._sock])

    @property
    def seconds(self) -> float:
        """The thread's CPU seconds so far."""
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))

    def stop(self) -> None:
        """Stop the server and wait for the thread."""
        self._server.should_exit = True
        self.join()


def scripted_tokens(request: EngineRequest, index: int) -> list[int]:
    return [70 + n % 50 for n in range(request.max_tokens)]


def request_cost(server: ServerThread, path: str, body: dict[str, Any], requests: int) -> float:
    """Return the server's CPU seconds per request."""
    data = json.dumps(body).encode()
    client = http.client.HTTPConnection("127.0.0.1", server.port)
    began = server.seconds
    for _ in range(requests):
        client.request("POST", path, data, {"content-type": "application/json"})
        response = client.getresponse()
        response.read()
        assert response.status == 200, (path, response.status)
    spent = server.seconds - began
    client.close()
    return spent / requests


def measure_dialects(options: argparse.Namespace) -> None:
    server = ServerThread(str(hub.resolve_model(options.model)))
    model = server.service.main_model.name
    names = [name for name in DIALECTS if name == BASE or not options.only or name in options.only.split(",")]
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            whole, stream, body = DIALECTS[name]
            whole, stream = whole.format(model), stream.format(model)
            request = request_cost(server, whole, body(1, False), options.requests)
            short = request_cost(server, stream, body(1, True), options.requests // 4)
            long = request_cost(server, stream, body(1 + options.tokens, True), options.requests // 4)
            costs[name].append((request, (long - short) / options.tokens))
    server.stop()
    print("| Dialect | µs per request | of OpenAI's | µs per streamed token | of OpenAI's |\n|---|---|---|---|---|")
    base = [statistics.median(column) for column in zip(*costs[BASE], strict=True)]
    for name, rounds in costs.items():
        request, token = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {name} | {request * 1e6:.0f} | {request / base[0]:.2f} | {token * 1e6:.1f} | {token / base[1]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="", help="folder or name; only its tokenizer is used")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="names of dialects, separated by commas; OpenAI chat always runs")
    logging.disable(logging.WARNING)
    measure_dialects(parser.parse_args())


if __name__ == "__main__":
    main()
