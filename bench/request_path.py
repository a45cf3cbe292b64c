"""Measures the API process's own work per request and per streamed token: without sockets, and without an engine.

    python bench/request_path.py [MODEL] [--api chat,responses,messages,openai] [--rounds 20] [--profile FILE]

The real server is in this process. Requests of ``CLIENTS`` connections go into their protocol objects, and the engine's
frames into the reader of a ``RemoteEngine``; what the server writes is thrown away. So the figures have no system calls
in them, and hardly any of the noise of other programs. Figures are processor time in µs, and the least of the rounds.
``--profile`` writes the profile of further rounds for ``pstats``. Only MODEL's tokenizer is used. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import random
import time
from typing import Any

import msgspec
import uvloop

from parley import hub, wire
from parley.boot.server_parts import ServerParts
from parley.cli.apis import BENCHED_APIS
from parley.dialects.bench import LoadShape
from parley.disagg.kv.peer import KVPeer
from parley.engine.messages import EngineReady, StepOutputs, SubmitRequest, ToEngine
from parley.engine.remote_engine import RemoteEngine
from parley.engine.scripted_engine import SCRIPTED_MODEL
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import EngineOutput, EngineRequest, EngineStats, ParleySettings
from parley.web.port import HttpServer, freeze_objects, uvicorn_config

CLIENTS = 16
REQUESTS = 4  # of each client in a round
TOKENS = 58  # that count, in the middle of a stream of more
WORDS = 20  # of a question
INFO = msgspec.structs.replace(SCRIPTED_MODEL, vocab_size=1 << 24)
NAMES = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem",
)  # fmt: skip


class MemoryTransport(asyncio.Transport):
    """A connection without a socket. Counts what is written to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 9), "sockname": ("127.0.0.1", 10)})
        self.writes, self.tail, self.closed = 0, b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes, self.tail = self.writes + 1, bytes(data[-32:])

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class _FrameSink:
    """Takes the frames to the engine, and keeps the requests in them."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def write(self, frame: bytes) -> None:
        if b"submit" in frame[:16]:
            message = self._decoder.decode(frame[wire.FRAME_HEADER.size :])
            assert isinstance(message, SubmitRequest)
            self.requests.append(message.request)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


class MemoryEngine(RemoteEngine):
    """An engine connection whose other end is this program. ``sink``: what was sent; ``reader``: takes the frames."""

    async def _spawn_process(self) -> asyncio.StreamReader:
        self.sink, self.reader = _FrameSink(), asyncio.StreamReader()
        self._writer = self.sink  # type: ignore[assignment]
        self.reader.feed_data(wire.encode_frame(EngineReady(INFO)))
        return self.reader


def encode_request(path: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a request as a client library sends it."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost:8000\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
        "Accept: application/json\r\nContent-Type: application/json\r\nUser-Agent: bench/1.0\r\n"
        f"Authorization: Bearer none\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class MemoryServer:
    """A server with connections in this process. ``harness``: nanoseconds of this program's own work."""

    def __init__(self, folder: str, clients: int = CLIENTS):
        settings, options = ParleySettings(model=folder), ServerOptions(access_log=False)
        self.engine = MemoryEngine(settings)
        self.model = ServedModel(("model",), settings, self.engine, options)
        config = uvicorn_config(options, ServerParts(options, [self.model], KVPeer()).build_app())
        config.load()
        server = HttpServer(config)
        server.lifespan = config.lifespan_class(config)
        self._random = random.Random(0)
        self.connections: list[Any] = []
        self.transports = [MemoryTransport() for _ in range(clients)]
        for transport in self.transports:
            self.connections.append(server._create_protocol())
            self.connections[-1].connection_made(transport)

    async def start(self) -> None:
        await self.model.load_engine()
        freeze_objects()

    def draw_request(self, api_name: str, tokens: int, stream: bool) -> bytes:
        """Return the bytes of a request with a text that no other request has."""
        api = BENCHED_APIS[api_name]
        body = api.build_body(LoadShape("model", tokens, 60.0), " ".join(self._random.choices(NAMES, k=WORDS)))
        if not stream:
            body = body | {"stream": False}
            body.pop("stream_options", None)
        return encode_request(api.path, body)

    async def run_requests(self, requests: list[bytes], steps: int) -> tuple[float, float]:
        """Send one request on each connection, and let every one generate ``steps`` tokens.

        Return the server's nanoseconds up to the first step and of it, and those of all further steps but the last.
        """
        for transport in self.transports:
            transport.tail = b""
        began, harness = time.thread_time_ns(), 0
        for connection, request in zip(self.connections, requests, strict=True):
            connection.data_received(request)
        sent = self.engine.sink.requests
        while len(sent) < len(requests):
            await asyncio.sleep(0)
        opened = began
        for step in range(steps):
            paused = time.thread_time_ns()
            last = step == steps - 1
            outputs = [
                EngineOutput(
                    engine_request.id, 0, [300 + (31 * step + place) % 600], finish_reason="length" if last else None
                )
                for place, engine_request in enumerate(sent)
            ]
            frame = wire.encode_frame(StepOutputs(outputs, EngineStats(running=len(sent))))
            resumed = time.thread_time_ns()
            harness += resumed - paused
            if step == 1:
                opened, harness_before = resumed, harness
            if last and steps > 1:
                streamed = paused - opened - (harness - (resumed - paused) - harness_before)
            self.engine.reader.feed_data(frame)
            for _ in range(3):
                await asyncio.sleep(0)
        while not all(transport.tail.endswith((b"}", b"0\r\n\r\n", b"}\n\n")) for transport in self.transports):
            await asyncio.sleep(0)
        for _ in range(4):  # ends of tasks
            await asyncio.sleep(0)
        whole = time.thread_time_ns() - began - harness
        sent.clear()
        return float(whole), float(streamed) if steps > 1 else 0.0


async def measure_round(server: MemoryServer, api: str) -> tuple[float, float]:
    """Return µs of a request answered in one piece with one token, and of a streamed token."""
    whole = 0.0
    for _ in range(REQUESTS):
        requests = [server.draw_request(api, 1, False) for _ in server.connections]
        whole += (await server.run_requests(requests, 1))[0]
    requests = [server.draw_request(api, TOKENS + 2, True) for _ in server.connections]
    _, streamed = await server.run_requests(requests, TOKENS + 2)
    count = len(server.connections)
    return whole / REQUESTS / count / 1e3, streamed / TOKENS / count / 1e3


async def measure_apis(options: argparse.Namespace) -> None:
    server = MemoryServer(str(hub.resolve_model(options.model)))
    await server.start()
    names = options.api.split(",")
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for name in names:  # warm up
        await measure_round(server, name)
    for _ in range(options.rounds):
        for name in names:
            figures[name].append(await measure_round(server, name))
    print("| µs | a request | a streamed token |\n|---|---|---|")
    for name, rounds in figures.items():
        request, token = (sorted(column)[len(column) // 6] for column in zip(*rounds, strict=True))
        print(f"| {name} | {request:.0f} | {token:.2f} |")
    if options.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(options.rounds):
            await measure_round(server, names[0])
        profile.disable()
        profile.dump_stats(options.profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--api", default="chat,responses,messages,openai")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", default="")
    uvloop.run(measure_apis(parser.parse_args()))


if __name__ == "__main__":
    main()
