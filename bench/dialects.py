"""Measures the cost of each dialect: microseconds of the API process's CPU time per request and per streamed token.

    python bench/dialects.py [MODEL] [--requests 400] [--tokens 64] [--rounds 5]

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

from parley import hub
from parley.boot import server as start
from parley.boot.parts import Parts
from parley.disagg.kv.peer import Peer
from parley.engine.fake import FAKE, FakeEngine
from parley.serving.options import ServerOptions
from parley.serving.served_model import Model
from parley.types import Settings, Work

TEXT = "time year people way day man thing woman life child world school state family student group country problem"
TALK = [{"role": "user", "content": TEXT}]


def openai(prompt: dict[str, Any], tokens: int, stream: bool) -> dict[str, Any]:
    return prompt | {"max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}


def chat(tokens: int, stream: bool) -> dict[str, Any]:
    return openai({"messages": TALK}, tokens, stream)


def mindie(tokens: int, stream: bool) -> dict[str, Any]:
    return chat(tokens, stream) | {"model": "dummy"}


def text(tokens: int, stream: bool) -> dict[str, Any]:
    return openai({"prompt": TEXT}, tokens, stream)


def flavour(tokens: int, stream: bool) -> dict[str, Any]:
    return {"messages": TALK, "max_tokens": tokens, "stream": stream, "temperature": 0}


def tgi(tokens: int, stream: bool) -> dict[str, Any]:
    return {"inputs": TEXT, "parameters": {"max_new_tokens": tokens, "details": True}, "stream": stream}


def triton(tokens: int, stream: bool) -> dict[str, Any]:
    return {"text_input": TEXT, "max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}


# name: path of an unstreamed answer, path of a stream, body
DIALECTS = {
    "OpenAI chat": ("/v1/chat/completions", "/v1/chat/completions", chat),
    "OpenAI completions": ("/v1/completions", "/v1/completions", text),
    "vLLM chat": ("/vllm/v1/chat/completions", "/vllm/v1/chat/completions", chat),
    "vLLM completions": ("/vllm/v1/completions", "/vllm/v1/completions", text),
    "vLLM generate": ("/vllm/generate", "/vllm/generate", text),
    "TGI": ("/", "/", tgi),
    "TGI chat": ("/tgi/v1/chat/completions", "/tgi/v1/chat/completions", flavour),
    "MindIE": ("/infer", "/infer", tgi),
    "MindIE chat": ("/mindie/v1/chat/completions", "/mindie/v1/chat/completions", mindie),
    "Triton": ("/v2/models/{}/generate", "/v2/models/{}/generate_stream", triton),
}


class Thread(threading.Thread):
    """A server with its own event loop. ``seconds``: the CPU time it has used."""

    def __init__(self, folder: str):
        super().__init__(daemon=True)
        engine = FakeEngine(answer, info=msgspec.structs.replace(FAKE, vocab_size=1 << 20))
        options = ServerOptions(port=0, access_log=False)
        parts = Parts(options, [Model(("model",), Settings(model=folder), engine, options)], Peer())
        self.service = parts.service
        self._sock = start.listen(options.host, 0)
        self.port = self._sock.getsockname()[1]
        self._server = start.Server(start.http(options, parts.build()))
        self._ready = threading.Event()
        self.start()
        self._ready.wait()

    def run(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        await self.service.main.load()
        start.settle()
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


def answer(work: Work, index: int) -> list[int]:
    return [70 + n % 50 for n in range(work.max_tokens)]


def cost(server: Thread, path: str, body: dict[str, Any], requests: int) -> float:
    """Return the server's CPU seconds per request."""
    data = json.dumps(body).encode()
    client = http.client.HTTPConnection("127.0.0.1", server.port)
    began = server.seconds
    for _ in range(requests):
        client.request("POST", path, data, {"content-type": "application/json"})
        got = client.getresponse()
        got.read()
        assert got.status == 200, (path, got.status)
    spent = server.seconds - began
    client.close()
    return spent / requests


def measure(options: argparse.Namespace) -> None:
    server = Thread(str(hub.resolve(options.model)))
    model = server.service.main.name
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in DIALECTS}
    for _ in range(options.rounds):
        for name, (whole, stream, body) in DIALECTS.items():
            whole, stream = whole.format(model), stream.format(model)
            request = cost(server, whole, body(1, False), options.requests)
            short = cost(server, stream, body(1, True), options.requests // 4)
            long = cost(server, stream, body(1 + options.tokens, True), options.requests // 4)
            seen[name].append((request, (long - short) / options.tokens))
    server.stop()
    print("| Dialect | µs per request | of OpenAI's | µs per streamed token | of OpenAI's |\n|---|---|---|---|---|")
    base = [statistics.median(column) for column in zip(*seen["OpenAI chat"], strict=True)]
    for name, rounds in seen.items():
        request, token = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {name} | {request * 1e6:.0f} | {request / base[0]:.2f} | {token * 1e6:.1f} | {token / base[1]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="", help="folder or name; only its tokenizer is used")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    logging.disable(logging.WARNING)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
