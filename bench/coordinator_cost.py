"""Measures the coordinator's cost: CPU seconds of its process per request and per token frame, with many streams.

    python bench/coordinator_cost.py [--requests N] [--streams N] [--crowd N] [--rounds N] [--json]

Instances are scripted, in another process: P answers at once, D sends one frame to each stream every tick, as an engine
does that makes steps. The same streams also go through a proxy that only forwards bytes, which is the least that any
coordinator has to do. Costs come from the difference between streams of 2 and of 102 tokens. CPU time is the kernel's
count for the process (``/proc/PID/stat``), so other load on the machine matters little.

The crowd is ``--crowd`` concurrent streams, each with a token every 100 ms. It shows the coordinator's memory, and the
gaps between tokens as clients see them, compared with the proxy's.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httptools
import uvloop
from local_cluster import cpu_seconds, free_port, resident_bytes, user_seconds, wait_until_ready

TICK, SLOW = 0.02, 0.1
SHORT, LONG = 2, 102
CROWD = 102  # tokens of each stream of a crowd
PART = b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
PART += b'"model":"parley-demo","choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
RECORD = base64.b64encode(bytes(48))
FIRST = base64.b64encode(b"\x91\x92\x00\x01").decode()
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 400}], "stream": True}).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Instance(asyncio.Protocol):
    """P, D and a standalone server in one: each request decides. A stream is (transport, request id, tokens left)."""

    line: asyncio.Transport | None = None
    streams: list[tuple[asyncio.Transport | None, bytes, int]] = []  # noqa: RUF012
    tokens, tick = SHORT, TICK

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.request_id = b"", b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name == b"req-id":
            self.request_id = value

    def on_message_complete(self) -> None:
        if self.url.startswith(b"/dresult?"):
            Instance.line = self.transport
            self.transport.write(HEAD + b"c\r\nepoch:abcde\0\r\n")
        elif self.url == b"/v1/status":
            role = {"service": {"roleStatus": "RoleReady", "currentRole": "mixed"}, "resource": {}}
            own = {"models": ["m"], "epoch": "e", "role": "mixed", "peer": "127.0.0.1;1"}
            self.send_body(json.dumps(role | {"parley": own}).encode())
        elif self.url.startswith(b"/tokens/"):
            tokens, tick = self.url[8:].split(b"/")
            Instance.tokens, Instance.tick = int(tokens), float(tick)
            self.send_body(b"{}")
        elif self.request_id:
            answer = {"reqId": self.request_id.decode(), "isStream": True, "isLastResp": False, "output": PART.decode(),
                      "headers": [["content-type", "text/event-stream"]], "status": 200, "records": FIRST}  # fmt: skip
            self.send_body(json.dumps(answer).encode())
            Instance.streams.append((None, self.request_id, Instance.tokens - 1))
        else:
            self.transport.write(HEAD)
            Instance.streams.append((self.transport, b"", Instance.tokens))

    def send_body(self, body: bytes) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


async def run_instances(port: int) -> None:
    """Serve, and send every stream its token each tick."""
    loop = asyncio.get_running_loop()
    await loop.create_server(Instance, "127.0.0.1", port, backlog=4096)
    chunk, end = b"%x\r\n%b\r\n" % (len(PART), PART), b"0\r\n\r\n"
    due = time.monotonic()
    while True:
        due += Instance.tick
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        frames, remaining_streams = [], []
        for transport, request_id, tokens in Instance.streams:
            last = tokens == 1
            if transport is not None:
                transport.write(chunk + end if last else chunk)
            else:
                word = b"lastData" if last else b"data"
                frames.append(b"reqId:%b\0record:%b\0reqId:%b\0%b:%b\0" % (request_id, RECORD, request_id, word, PART))
            if not last:
                remaining_streams.append((transport, request_id, tokens - 1))
        Instance.streams = remaining_streams
        if frames and Instance.line is not None:
            data = b"".join(frames)
            Instance.line.write(b"%x\r\n%b\r\n" % (len(data), data))


class Proxy(asyncio.Protocol):
    """One of two connected connections; forwards bytes to the other."""

    to = 0
    other: Proxy | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        if self.other is None:
            self.early: list[bytes] = []
            self.task = asyncio.get_running_loop().create_task(self.open_other_side())

    async def open_other_side(self) -> None:
        def make_proxy() -> Proxy:
            other = Proxy()
            other.other = self
            return other

        _, self.other = await asyncio.get_running_loop().create_connection(make_proxy, "127.0.0.1", Proxy.to)
        self.other.transport.write(b"".join(self.early))

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


async def run_proxy(port: int, to: int) -> None:
    """Forward connections on ``port`` to port ``to``."""
    Proxy.to = to
    server = await asyncio.get_running_loop().create_server(Proxy, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


class StreamClient(asyncio.Protocol):
    """Sends requests one after the other on one connection. ``gaps``: seconds between tokens, of all clients."""

    def __init__(self, take_request: Callable[[], bool], done: Callable[[], None]):
        self.take_request, self.done = take_request, done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.tokens, self.tail = 0, b""
        self.send_next()

    def send_next(self) -> None:
        if not self.take_request():
            self.transport.close()
            self.done()
            return
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self.transport.write(
            head + b"user-agent: bench\r\naccept: */*\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
        )

    def data_received(self, data: bytes) -> None:
        tokens, now = data.count(b'"delta"'), time.monotonic()
        if tokens and self.tokens:
            StreamClient.gaps.append(now - self.last)
        if tokens:
            self.last = now
        self.tokens += tokens
        self.tail = (self.tail + data)[-5:]
        if self.tail == b"0\r\n\r\n":
            StreamClient.seen += self.tokens
            self.tokens, self.tail = 0, b""
            self.send_next()

    seen = 0
    last = 0.0
    gaps: list[float] = []  # noqa: RUF012


@dataclass(frozen=True)
class LoadSeconds:
    """What a load took: CPU time of the process, the part of it outside of the kernel, and wall time."""

    cpu: float
    user: float
    wall: float


async def run_streams(
    port: int, pid: int, requests: int, streams: int, tokens: int, instance: int, tick: float = TICK
) -> LoadSeconds:
    """Return the seconds of a load of ``streams`` concurrent requests. Raises RuntimeError for lost tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", instance)
    writer.write(b"GET /tokens/%d/%f HTTP/1.1\r\n\r\n" % (tokens, tick))
    await reader.readuntil(b"\r\n\r\n")
    writer.close()
    unsent, open_, ended = requests, streams, asyncio.Event()
    StreamClient.seen = 0
    StreamClient.gaps.clear()

    def take_request() -> bool:
        nonlocal unsent
        unsent -= 1
        return unsent >= 0

    def client_done() -> None:
        nonlocal open_
        open_ -= 1
        if not open_:
            ended.set()

    loop = asyncio.get_running_loop()
    before, user_before, began = cpu_seconds(pid), user_seconds(pid), time.monotonic()
    for _ in range(streams):
        await loop.create_connection(lambda: StreamClient(take_request, client_done), "127.0.0.1", port)
    await ended.wait()
    if StreamClient.seen != requests * tokens:
        raise RuntimeError(f"{StreamClient.seen} of {requests * tokens} tokens came")
    return LoadSeconds(cpu_seconds(pid) - before, user_seconds(pid) - user_before, time.monotonic() - began)


class RunningCoordinator:
    """A coordinator with its scripted instances, and a proxy before the same instances, while it is entered."""

    def __enter__(self) -> RunningCoordinator:
        self.instance, self.port, self.proxy_port = free_port(), free_port(), free_port()
        self._folder = tempfile.TemporaryDirectory()
        config = Path(self._folder.name) / "c.toml"
        config.write_text(
            f"management_port = {free_port()}\nmetrics_port = {free_port()}\nstatus_port = "
            f"{free_port()}\nmax_requests = 90000\n"
            f'single_node_max_requests = 90000\n[[instances]]\nurl = "http://127.0.0.1:{self.instance}"\n'
        )
        me, quiet = [sys.executable, __file__], {"stdout": subprocess.DEVNULL}
        command = [sys.executable, "-m", "parley", "coordinator", "--config", str(config), "--port", str(self.port)]
        self._running = [
            subprocess.Popen([*me, "--serve", str(self.instance)]),
            subprocess.Popen([*me, "--serve", str(self.proxy_port), "--to", str(self.instance)]),
            subprocess.Popen([*command, "--quiet"], **quiet),  # type: ignore[call-overload]
        ]
        self.pid, self.proxy_pid = self._running[2].pid, self._running[1].pid
        try:
            asyncio.run(wait_until_ready(self.port))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.wait()
        self._folder.cleanup()


async def measure_process(
    name: str, port: int, pid: int, instance: int, options: argparse.Namespace
) -> dict[str, float]:
    """Return the figures of the coordinator or the proxy."""
    requests, streams, crowd = options.requests, options.streams, options.crowd
    figures: dict[str, float] = {}
    await run_streams(port, pid, 4 * streams, streams, SHORT, instance)  # warm
    frames: dict[str, list[float]] = {"": [], "_user": []}
    request_costs: dict[str, list[float]] = {"": [], "_user": []}
    paces = []
    for _ in range(options.rounds):
        short = await run_streams(port, pid, requests, streams, SHORT, instance)
        long = await run_streams(port, pid, requests, streams, LONG, instance)
        for kind, few, many in (("", short.cpu, long.cpu), ("_user", short.user, long.user)):
            frames[kind].append((many - few) / requests / (LONG - SHORT))
            request_costs[kind].append(few / requests - frames[kind][-1] * SHORT)
        paces.append(requests * LONG / long.wall)
    for kind in frames:
        figures[f"{name}_frame{kind}_us"] = 1e6 * median(frames[kind])
        figures[f"{name}_request{kind}_us"] = 1e6 * median(request_costs[kind])
    figures[f"{name}_tokens_per_second"] = median(paces)
    if crowd:
        before, _ = resident_bytes(pid)
        load = await run_streams(port, pid, crowd, crowd, CROWD, instance, SLOW)
        gaps = sorted(StreamClient.gaps)
        figures[f"{name}_crowd_bytes"] = resident_bytes(pid)[1] - before
        figures[f"{name}_crowd_us"] = 1e6 * load.cpu / crowd / CROWD
        for share in (0.5, 0.99, 0.999):
            figures[f"{name}_crowd_gap_p{100 * share:g}"] = gaps[int(len(gaps) * share)]
    return figures


def measure_coordinator(options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of coordinator and proxy."""
    with RunningCoordinator() as running, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures: dict[str, float] = {}
        for name, port, pid in (
            ("coordinator", running.port, running.pid), ("proxy", running.proxy_port, running.proxy_pid)
        ):  # fmt: skip
            figures |= runner.run(measure_process(name, port, pid, running.instance, options))
        return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--streams", type=int, default=400)
    parser.add_argument("--crowd", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3, help="each figure is the median of this many rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        coroutine = run_proxy(options.serve, options.to) if options.to else run_instances(options.serve)
        uvloop.run(coroutine)
        return
    figures = measure_coordinator(options)
    if options.json:
        print(json.dumps(figures))
        return
    print(f"{options.streams} streams at once, {options.requests} requests; CPU of the process in µs")
    print(f"medians of {options.rounds}")
    for name in ("coordinator", "proxy"):
        print(
            f"  {name:<12} {figures[f'{name}_request_us']:7.1f} per request  "
            f"{figures[f'{name}_frame_us']:6.2f} per token; outside of the kernel "
            f"{figures[f'{name}_request_user_us']:.1f} and {figures[f'{name}_frame_user_us']:.2f}"
        )
    for what in ("request", "frame"):
        print(f"  ratio per {what}: {figures[f'coordinator_{what}_us'] / figures[f'proxy_{what}_us']:.2f}")
    if options.crowd:
        print(f"{options.crowd} streams at once, a token each {1e3 * SLOW:g} ms")
        for name in ("coordinator", "proxy"):
            gaps = [f"{1e3 * figures[f'{name}_crowd_gap_p{share}']:.0f}" for share in ("50", "99", "99.9")]
            memory = figures[f"{name}_crowd_bytes"] / options.crowd / 1024
            costs = f"{figures[f'{name}_crowd_us']:.1f} µs a token, {memory:.1f} KiB a stream"
            print(f"  {name:<12} gaps p50, p99, p99.9: {', '.join(gaps)} ms; {costs}")


if __name__ == "__main__":
    main()
