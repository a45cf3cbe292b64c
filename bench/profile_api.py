"""Profiles the API process per request and token: the real server on a real socket, with a scripted engine process.

    python bench/profile_api.py MODEL [--clients 64] [--requests 2000] [--output 64]

Clients send completion requests of 8 token ids: first unstreamed ones of one token, then streams of ``--output``
tokens. The engine gives every running choice one token per step. Times are CPU time of the event loop's thread; the
remainder not in the named parts is the event loop itself, its sockets and its tasks. Only MODEL's tokenizer is used.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import select
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import uvloop
from cpu_meter import Meter, cost_table

from parley import wire
from parley.boot.server_parts import ServerParts
from parley.dialects.openai import completions
from parley.disagg.kv.peer import KVPeer
from parley.engine.messages import CancelRequest, EngineReady, StepOutputs, SubmitRequest, ToEngine
from parley.engine.output_stream import StreamGroup
from parley.engine.protocol import Engine
from parley.engine.remote_engine import RemoteEngine
from parley.engine.scripted_engine import SCRIPTED_MODEL
from parley.serving import app, generate_handler
from parley.serving.generation import Generation
from parley.serving.request_metrics import RequestMetrics
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.text.answer_choice import AnswerChoice
from parley.text.text_pipeline import TextPipeline
from parley.types import EngineOutput, EngineRequest, EngineStats, ParleySettings
from parley.web import logs
from parley.web.exchange import Exchange
from parley.web.http_cycle import HttpCycle
from parley.web.http_protocol import LimitedHttpProtocol
from parley.web.port import HttpServer, freeze_objects, uvicorn_config

INFO = msgspec.structs.replace(SCRIPTED_MODEL, vocab_size=1 << 24)
PROMPT = 8
REST = "event loop, sockets, tasks"
LOADS = (("a request of one token", 1, False), ("a streamed token", 0, True))  # output 0: --output


def start_process(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a process that runs ``target``."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


class ScriptedEngine(RemoteEngine):
    """The API process's end of a real engine connection, whose other end is a process without a model."""

    def __init__(self, settings: ParleySettings, pause: float):
        super().__init__(settings)
        self._pause = pause

    async def _spawn_process(self) -> asyncio.StreamReader:
        own_end, engine_end = socket.socketpair()
        start_process(run_scripted_engine, engine_end, self._pause)
        engine_end.close()
        reader, self._writer = await asyncio.open_connection(sock=own_end)
        self._writer.write(wire.encode_frame(self.settings))
        return reader


def run_scripted_engine(sock: socket.socket, pause: float) -> None:
    """Play the engine: send one frame per step, ``pause`` seconds after the last."""
    decoder = msgspec.msgpack.Decoder(ToEngine)
    wire.receive_frame(sock, msgspec.msgpack.Decoder(ParleySettings))
    sock.sendall(wire.encode_frame(EngineReady(INFO)))
    running: dict[str, list] = {}
    while True:
        while not running or select.select([sock], [], [], 0)[0]:
            message = wire.receive_frame(sock, decoder)
            if message is None:
                return
            if isinstance(message, SubmitRequest):
                running[message.request.id] = [message.request, 0]
            elif isinstance(message, CancelRequest):
                running.pop(message.id, None)
        time.sleep(pause)
        outputs = [next_output(entry) for entry in running.values()]
        for output in outputs:
            if output.finish_reason:
                del running[output.id]
        sock.sendall(wire.encode_frame(StepOutputs(outputs, EngineStats(running=len(running)))))


def next_output(entry: list) -> EngineOutput:
    """Return a request's next token, and finish it at its length."""
    request: EngineRequest = entry[0]
    token = request.token_ids[entry[1] % PROMPT]
    entry[1] += 1
    return EngineOutput(request.id, 0, [token], finish_reason="length" if entry[1] >= request.max_tokens else None)


def instrument_api(meter: Meter, parts: ServerParts) -> None:
    """Charge the functions of the API process to the meter's names."""
    meter.wrap_attribute(LimitedHttpProtocol, "data_received", "HTTP: parse, start of the task")
    for name in ("send_message", "write_part"):
        meter.wrap_attribute(HttpCycle, name, "HTTP: write")
    meter.wrap_attribute(HttpCycle, "receive_message", "HTTP: receive")
    meter.wrap_attribute(app.App, "__call__", "app: route, key, limits")
    meter.wrap_attribute(generate_handler, "handle_generate", "life of a request")
    parts.handlers["generate"] = generate_handler.handle_generate
    for name in ("__post_init__", "read_body", "while_connected", "send_response", "write_stream", "write_part"):
        meter.wrap_attribute(Exchange, name, "exchange")
    meter.wrap_attribute(completions, "decode_fields", "JSON")
    meter.wrap_attribute(completions.CompletionReply, "__init__", "validate")
    for name in ("render_chunk", "add_events", "render_body", "finish_stream"):
        meter.wrap_attribute(completions.CompletionReply, name, "render")
    meter.wrap_attribute(TextPipeline, "prepare_prompt", "tokenize")
    for name in ("__init__", "submit_request", "feed_events", "_take_arrivals", "close"):
        meter.wrap_attribute(Generation, name, "generation")
    meter.wrap_attribute(AnswerChoice, "__init__", "text: set up")
    meter.wrap_attribute(AnswerChoice, "push_output", "text: detokenize, stop strings")
    for name in ("record_submit", "record_tokens", "record_finish", "record_end"):
        meter.wrap_attribute(RequestMetrics, name, "metrics")
    meter.wrap_attribute(app, "log_access", "access log")
    meter.wrap_attribute(Engine, "submit_request", "submit")
    for name in ("feed_outputs", "wake_reader"):
        meter.wrap_attribute(StreamGroup, name, "stream")
    meter.wrap_attribute(Engine, "_deliver_outputs", "deliver")
    meter.wrap_attribute(RemoteEngine, "_read_messages", "receive frames")


class ApiClient(asyncio.Protocol):
    """Sends requests one after the other on one connection, each after the end of the last response."""

    def __init__(self, requests: list[bytes], end: bytes):
        self.requests, self.end = requests, end
        self.done = asyncio.get_running_loop().create_future()
        self.tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.send_next()

    def send_next(self) -> None:
        if self.requests:
            self.transport.write(self.requests.pop())
        else:
            self.transport.close()
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.tail = self.tail[-64:] + data
        if self.tail.endswith(self.end):
            self.tail = b""
            self.send_next()


def encode_request(port: int, stream: bool, output: int, number: int) -> bytes:
    """Return the bytes of request ``number``."""
    body = {
        "model": "model",
        "prompt": [300 + (7 * number + k) % 3000 for k in range(PROMPT)],
        "max_tokens": output,
        "temperature": 0,
        "stream": stream,
        "ignore_eos": True,
    }
    data = json.dumps(body | ({"stream_options": {"include_usage": True}} if stream else {})).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def run_clients(*arguments: int) -> None:
    """Run the clients; the main function of their process."""
    uvloop.run(send_requests(*arguments))


async def send_requests(port: int, clients: int, requests: int, output: int, stream: bool) -> None:
    """Send ``requests`` requests over ``clients`` connections and wait for all responses."""
    pending_requests = [encode_request(port, stream, output, number) for number in range(requests)]
    end = b"0\r\n\r\n" if stream else b"}}"
    loop = asyncio.get_running_loop()
    connections = [
        await loop.create_connection(lambda: ApiClient(pending_requests, end), "127.0.0.1", port)
        for _ in range(clients)
    ]
    await asyncio.gather(*(client.done for _, client in connections))


def count_answers(options: argparse.Namespace, output: int, stream: bool) -> int:
    """Return the number of requests, or of tokens for a stream, in a load."""
    length = output or options.output
    return max(options.clients, options.requests * 8 // length) * length if stream else options.requests


async def measure_load(
    port: int, options: argparse.Namespace, output: int, stream: bool, meter: Meter | None = None
) -> float:
    """Return the microseconds of this thread per request or token of a load. The load runs once before, to warm up."""
    length, cost = output or options.output, 0.0
    tokens = count_answers(options, output, stream)
    for requests in (options.clients, tokens // length):
        if meter is not None:
            meter.clear()
        began = time.thread_time_ns()
        clients = start_process(run_clients, port, options.clients, requests, length, stream)
        while clients.is_alive():
            await asyncio.sleep(0.02)
        cost = (time.thread_time_ns() - began) / tokens / 1e3
    return cost


async def measure_api(options: argparse.Namespace) -> None:
    """Measure both loads, plain and instrumented, and print the table."""
    settings, server_options = ParleySettings(model=str(options.model)), ServerOptions()
    model = ServedModel(("model",), settings, ScriptedEngine(settings, options.pause), server_options)
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    parts = ServerParts(server_options, [model], KVPeer())
    server = HttpServer(uvicorn_config(server_options, parts.build_app()))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    await model.load_engine()
    freeze_objects()
    port = sock.getsockname()[1]
    meter = Meter()
    whole = [await measure_load(port, options, *kind) for _, *kind in LOADS]
    instrument_api(meter, parts)
    columns = []
    for title, *kind in LOADS:
        cost = await measure_load(port, options, *kind, meter)
        per = count_answers(options, *kind) * 1e3
        costs = {name: own / per for name, own in meter.own.items()}
        columns.append((title, costs | {REST: cost - meter.cost / per - sum(costs.values())}))
    print(cost_table(columns, "µs", whole))
    await model.close_engine()
    server.should_exit = True
    await serving


def load_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the model and the sizes of the loads."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0.002, help="seconds of an engine step")
    return parser


def main() -> None:
    options = load_parser(__doc__).parse_args()
    logs.set_up_logging("text")
    uvloop.run(measure_api(options))


if __name__ == "__main__":
    main()
