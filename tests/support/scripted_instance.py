"""Scripted instances: real sockets, HTTP and result frames, but no model.

A script holds the answer to a request; an instance plays it as prefill instance, as decode instance, or as both, like
parley's own instances or like plain MindIE servers. It records the requests it gets.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from parley.disagg.wire import result_frames


@dataclass
class Asked:
    """One request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Script:
    """An answer: its parts as the client must get them; the first comes from the prefill instance."""

    parts: list[bytes] = field(default_factory=lambda: [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"])
    stream: bool = True
    headers: tuple[tuple[str, str], ...] = (("content-type", "text/event-stream; charset=utf-8"), ("x-own", "1"))
    status: int = 200


def record(number: int) -> bytes:
    """Return the record of part ``number``: a list of one output that holds just that number."""
    return msgspec.msgpack.encode([[0, number]])


class Scripted:
    """``plain``: speak like MindIE's servers. ``cut``: bytes per write of results, 0 for all at once. ``tick``: seconds
    between two parts of decode. ``label``: a name that its answers contain."""

    def __init__(
        self,
        role: str = "mixed",
        *,
        plain: bool = False,
        script: Script | None = None,
        cut: int = 0,
        tick: float = 0.0,
        label: str = "",
    ):
        self.role, self.plain, self.cut, self.tick = role, plain, cut, tick
        self.label = label
        self.models = ["m"]
        self.layout = ""
        self.longest = 4096
        self.script = script or Script()
        self.asked: list[Asked] = []
        self.connected: list[Asked] = []  # requests for result connections
        self.halted: list[str] = []
        self.flows: list[tuple[str, bool]] = []
        self.paused: set[str] = set()
        self.epoch = f"e{id(self):x}"
        self.peers: dict[str, Scripted] = {}  # by d-target
        self.before: Callable[[Asked], Awaitable[Any]] | None = None  # runs before prefill; bytes are its raw answer
        self.decode: Callable[[Scripted, str, list[bytes], int], Awaitable[None]] | None = None
        self.lines: list[asyncio.StreamWriter] = []
        self.hangs_up = False  # disconnect after the head of a request
        self.writers: list[asyncio.StreamWriter] = []
        self.sent: deque[bytes] = deque()
        self.first = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def target(self) -> str:
        return f"127.0.0.1;{self.port}"

    async def start(self, port: int = 0) -> Scripted:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Stop as if killed."""
        if self._server is not None:
            self._server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    # -- HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                for line in head[1:]:
                    if line:
                        name, _, value = line.partition(": ")
                        headers[name.lower()] = value
                if self.hangs_up:
                    return
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(method, target, headers, body)
                if target.startswith("/dresult?") or target == "/dresult":
                    await self._results(asked, reader, writer)
                    return
                await self._answer(asked, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.tasks.discard(task)
            writer.transport.abort()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        path = asked.target.partition("?")[0]
        if path == "/v1/status":
            self._say(writer, 200, self.status())
        elif path.endswith("/stopInfer"):
            self.halted.append(json.loads(asked.body)["id"])
            self._say(writer, 200, {})
        elif path == "/v1/dresult/flow":
            said = json.loads(asked.body)
            self.flows.append((said["id"], said["pause"]))
            (self.paused.add if said["pause"] else self.paused.discard)(said["id"])
            self._say(writer, 200, {})
        else:
            self.asked.append(asked)
            told = await self.before(asked) if self.before is not None else None
            if isinstance(told, bytes):
                writer.write(told)
                await writer.drain()
            elif "req-id" not in asked.headers:
                self._say(writer, 200, {"instance": self.label, "method": asked.method, "path": path})
            else:
                await self._prefill(asked, writer)

    def _say(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "service": {"roleStatus": "RoleReady", "currentRole": self.role},
            "resource": {"availSlotsNum": 200, "availBlockNum": 1024},
            "linkStatus": {"peers": []},
        }
        if not self.plain:
            told["parley"] = {"models": self.models, "epoch": self.epoch, "role": self.role, "peer": self.target,
                              "layout": self.layout, "max_seq_len": self.longest}  # fmt: skip
        return told

    # -- prefill

    async def _prefill(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        headers, script = asked.headers, self.script
        given = int(headers.get("parley-given", 0))
        past = sum(map(len, msgspec.msgpack.decode(asked.body[:given]))) if given else 0
        parts = script.parts
        whole = b"".join(parts)
        target = headers["d-target"]
        d = self if target in ("self", self.target) else self.peers[target]
        last = past + 1 >= len(parts)
        answer: dict[str, Any] = {"reqId": headers["req-id"], "isStream": script.stream, "isLastResp": last}
        if script.stream or last:
            answer["output"] = (parts[past] if script.stream else whole).decode()
        if not self.plain:
            answer |= {"headers": script.headers, "status": script.status}
            answer["records"] = base64.b64encode(record(past)).decode()
        if not last:
            d.begin(headers["req-id"], parts, past + 1, script)
        self._say(writer, 200, answer)

    # -- decode

    def begin(self, id: str, parts: list[bytes], past: int, script: Script) -> None:
        task = asyncio.get_running_loop().create_task(self._decode(id, parts, past, script))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _decode(self, id: str, parts: list[bytes], past: int, script: Script) -> None:
        exact = not self.plain
        if self.decode is not None:
            await self.decode(self, id, parts, past)
            return
        if not script.stream:
            head = result_frames.head(id, script.status, list(script.headers))
            self.put([*([head] if exact else []), *result_frames.results(id, b"".join(parts), last=True, exact=exact)])
            return
        for number in range(past, len(parts)):
            if self.tick:
                await asyncio.sleep(self.tick)
            while id in self.paused:
                await asyncio.sleep(0.001)
            if id in self.halted:
                return
            self.part(id, parts, number)

    def part(self, id: str, parts: list[bytes], number: int) -> None:
        """Send one part of a stream."""
        exact = not self.plain
        made = [result_frames.record(id, record(number))] if exact else []
        self.put([*made, *result_frames.results(id, parts[number], last=number == len(parts) - 1, exact=exact)])

    def put(self, made: list[bytes]) -> None:
        """Send frames, and keep them for a connection that returns."""
        self.sent += made
        for writer in self.lines:
            self._write(writer, b"".join(made))

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        step = self.cut or len(data) or 1
        for begin in range(0, len(data), step):
            piece = data[begin : begin + step]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    async def _results(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected.append(asked)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        query = dict(pair.split("=") for pair in asked.target.partition("?")[2].split("&") if pair)
        if not self.plain:
            self._write(writer, result_frames.epoch(self.epoch))
            if query.get("epoch") == self.epoch:
                for made in list(self.sent)[int(query["from"]) :]:
                    self._write(writer, made)
        self.lines = [writer]
        try:
            while await reader.read(1024):
                pass
        finally:
            if writer in self.lines:
                self.lines.remove(writer)

    def break_line(self) -> None:
        """Break the result connection."""
        for writer in self.lines:
            writer.transport.abort()
        self.lines = []
