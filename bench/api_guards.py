"""Measures what TLS, an API key with limits, and kept usage cost the API process, per request and streamed token.

    python bench/api_guards.py MODEL [--turns 8] [--only tls] [--clients 64] [--requests 2000] [--output 64]

Two servers run in this process, one plain, the other guarded; both count their metrics. Their scripted engines and
clients are those of ``profile_api.py``. They take turns, and the table has the medians of CPU time and of the ratios of
neighbouring turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import ssl
import subprocess
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median

import uvloop
from profile_api import LOADS, ApiClient, ScriptedEngine, count_answers, encode_request, load_parser, start_process

from parley.boot.server_parts import ServerParts
from parley.disagg.kv.peer import KVPeer
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.settings.key_file import make_key
from parley.types import ParleySettings
from parley.web import logs
from parley.web.port import HttpServer, freeze_objects, uvicorn_config
from parley.web.tls.contexts import server_tls_context
from parley.web.tls.files import TlsFiles

GUARDS = ("tls", "keys", "usage")
PLENTY = 10**12  # a limit that is counted and never reached


@dataclass
class MeasuredServer:
    """A running server. ``key``: what its clients send; ``encrypted``: they use TLS."""

    server: HttpServer
    model: ServedModel
    serving: asyncio.Task[None]
    port: int
    key: str
    encrypted: bool


def write_certificate(folder: Path) -> TlsFiles:
    """Write a certificate for this machine."""
    files = TlsFiles(folder / "certificate.pem", folder / "key.pem")
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        ["openssl", *command.split(), "-keyout", files.key, "-out", files.certificate], check=True, capture_output=True
    )
    return files


async def start_server(options: argparse.Namespace, folder: Path, guards: tuple[str, ...]) -> MeasuredServer:
    """Start a server with these guards."""
    key, hashed_key = make_key(
        "bench", requests_per_minute=PLENTY, tokens_per_minute=PLENTY, tokens_per_day=PLENTY, concurrent_requests=PLENTY
    )
    settings = ParleySettings(model=str(options.model))
    server_options = ServerOptions(
        tls=write_certificate(folder) if "tls" in guards else None,
        hashed_keys=(hashed_key,) if "keys" in guards else None,
        usage_db=str(folder / "usage.db") if "usage" in guards else None,
    )
    model = ServedModel(("model",), settings, ScriptedEngine(settings, options.pause), server_options)
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    parts = ServerParts(server_options, [model], KVPeer())
    tls = None if server_options.tls is None else server_tls_context(server_options.tls, http2=True)
    server = HttpServer(uvicorn_config(server_options, parts.build_app(), tls))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    await model.load_engine()
    return MeasuredServer(
        server, model, serving, sock.getsockname()[1], key if "keys" in guards else "", tls is not None
    )


def run_clients(*arguments: object) -> None:
    """Run the clients; the main function of their process."""
    uvloop.run(send_requests(*arguments))  # type: ignore[arg-type]


async def send_requests(
    port: int, key: str, encrypted: bool, clients: int, requests: int, output: int, stream: bool, start: Barrier
) -> None:
    """Connect ``clients`` clients; after ``start``, send ``requests`` requests and wait for all responses."""
    header = f"\r\nAuthorization: Bearer {key}\r\n".encode() if key else b"\r\n"
    pending_requests = [
        encode_request(port, stream, output, number).replace(b"\r\n", header, 1) for number in range(requests)
    ]
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if encrypted else None
    if tls is not None:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    end = b"0\r\n\r\n" if stream else b"}}"
    loop = asyncio.get_running_loop()
    held_requests: list[bytes] = []
    connections = [
        await loop.create_connection(lambda: HeldClient(held_requests, end), "127.0.0.1", port, ssl=tls)
        for _ in range(clients)
    ]
    start.wait()
    held_requests += pending_requests
    for _, client in connections:
        client.send_next()
    await asyncio.gather(*(client.done for _, client in connections))


class HeldClient(ApiClient):
    """A client that sends nothing yet when it has connected."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport


async def measure_turn(server: MeasuredServer, options: argparse.Namespace, output: int, stream: bool) -> float:
    """Return the microseconds of this thread per request or token of a load, without the handshakes."""
    length = output or options.output
    tokens = count_answers(options, output, stream)
    start = multiprocessing.get_context("spawn").Barrier(2)
    arguments = (server.port, server.key, server.encrypted, options.clients, tokens // length, length, stream, start)
    clients = start_process(run_clients, *arguments)
    await asyncio.to_thread(start.wait)
    began = time.thread_time_ns()
    while clients.is_alive():
        await asyncio.sleep(0.02)
    return (time.thread_time_ns() - began) / tokens / 1e3


async def measure_guards(options: argparse.Namespace) -> None:
    """Measure both loads in turns, and print the table."""
    guards = tuple(options.only.split(",")) if options.only else GUARDS
    with tempfile.TemporaryDirectory() as plain_folder, tempfile.TemporaryDirectory() as guarded_folder:
        plain = await start_server(options, Path(plain_folder), ())
        guarded = await start_server(options, Path(guarded_folder), guards)
        freeze_objects()
        print(f"| µs | plain | {', '.join(guards)} | plain / guarded |\n|---|---|---|---|")
        for title, *kind in LOADS:
            for server in (plain, guarded):
                await measure_turn(server, options, *kind)  # warms up
            pairs = []
            for turn in range(options.turns):
                order = (plain, guarded) if turn % 2 else (guarded, plain)
                costs = {id(server): await measure_turn(server, options, *kind) for server in order}
                pairs.append((costs[id(plain)], costs[id(guarded)]))
            middle = [median(column) for column in zip(*pairs, strict=True)]
            ratios = sorted(first / second for first, second in pairs)
            span = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"| {title} | {middle[0]:.1f} | {middle[1]:.1f} | {span} |", flush=True)
        for server in (plain, guarded):
            await server.model.close_engine()
            server.server.should_exit = True
            await server.serving


def main() -> None:
    parser = load_parser(__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--only", default="", help="some of tls, keys and usage")
    options = parser.parse_args()
    logs.set_up_logging("text")
    uvloop.run(measure_guards(options))


if __name__ == "__main__":
    main()
