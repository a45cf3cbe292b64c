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
class ReceivedRequest:
    """One request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class AnswerScript:
    """An answer: its parts as the client must get them; the first comes from the prefill instance."""

    parts: list[bytes] = field(default_factory=lambda: [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"])
    stream: bool = True
    headers: tuple[tuple[str, str], ...] = (("content-type", "text/event-stream; charset=utf-8"), ("x-own", "1"))
    status: int = 200


def part_record(number: int) -> bytes:
    """Return the record of part ``number``: a list of one output that holds just that number."""
    return msgspec.msgpack.encode([[0, number]])


class ScriptedInstance:
    """``plain``: speak like MindIE's servers. ``cut``: bytes per write of results, 0 for all at once. ``tick``: seconds
    between two parts of decode. ``label``: a name that its answers contain."""

    def __init__(
        self,
        role: str = "mixed",
        *,
        plain: bool = False,
        script: AnswerScript | None = None,
        cut: int = 0,
        tick: float = 0.0,
        label: str = "",
    ):
        self.role, self.plain, self.cut, self.tick = role, plain, cut, tick
        self.label = label
        self.models = ["m"]
        self.layout = ""
        self.max_context = 4096
        self.script = script or AnswerScript()
        self.requests: list[ReceivedRequest] = []
        self.result_requests: list[ReceivedRequest] = []  # requests for result connections
        self.stopped_ids: list[str] = []
        self.flow_requests: list[tuple[str, bool]] = []
        self.paused_ids: set[str] = set()
        self.epoch = f"e{id(self):x}"
        self.peers: dict[str, ScriptedInstance] = {}  # by d-target
        # Runs before prefill; bytes are its raw answer.
        self.before_prefill: Callable[[ReceivedRequest], Awaitable[Any]] | None = None
        self.decode_hook: Callable[[ScriptedInstance, str, list[bytes], int], Awaitable[None]] | None = None
        self.result_writers: list[asyncio.StreamWriter] = []
        self.hangs_up = False  # disconnect after the head of a request
        self.writers: list[asyncio.StreamWriter] = []
        self.sent_frames: deque[bytes] = deque()
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

    async def start_serving(self, port: int = 0) -> ScriptedInstance:
        # Hundreds of connections may come before a busy event loop accepts one; the kernel drops those above `backlog`.
        self._server = await asyncio.start_server(self._serve_connection, "127.0.0.1", port, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def kill_instance(self) -> None:
        """Stop as if killed."""
        if self._server is not None:
            self._server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    # -- HTTP

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
                request = ReceivedRequest(method, target, headers, body)
                if target.startswith("/dresult?") or target == "/dresult":
                    await self._serve_results(request, reader, writer)
                    return
                await self._answer_request(request, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.tasks.discard(task)
            writer.transport.abort()

    async def _answer_request(self, request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        path = request.target.partition("?")[0]
        if path == "/v1/status":
            self._send_json(writer, 200, self.status_body())
        elif path.endswith("/stopInfer"):
            self.stopped_ids.append(json.loads(request.body)["id"])
            self._send_json(writer, 200, {})
        elif path == "/v1/dresult/flow":
            flow_body = json.loads(request.body)
            self.flow_requests.append((flow_body["id"], flow_body["pause"]))
            (self.paused_ids.add if flow_body["pause"] else self.paused_ids.discard)(flow_body["id"])
            self._send_json(writer, 200, {})
        else:
            self.requests.append(request)
            raw_reply = await self.before_prefill(request) if self.before_prefill is not None else None
            if isinstance(raw_reply, bytes):
                writer.write(raw_reply)
                await writer.drain()
            elif "req-id" not in request.headers:
                self._send_json(writer, 200, {"instance": self.label, "method": request.method, "path": path})
            else:
                await self._run_prefill(request, writer)

    def _send_json(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )

    def status_body(self) -> dict[str, Any]:
        members: dict[str, Any] = {
            "service": {"roleStatus": "RoleReady", "currentRole": self.role},
            "resource": {"availSlotsNum": 200, "availBlockNum": 1024},
            "linkStatus": {"peers": []},
        }
        if not self.plain:
            members["parley"] = {"models": self.models, "epoch": self.epoch, "role": self.role, "peer": self.target,
                              "layout": self.layout, "max_seq_len": self.max_context}  # fmt: skip
        return members

    # -- prefill

    async def _run_prefill(self, request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        headers, script = request.headers, self.script
        prior_size = int(headers.get("parley-given", 0))
        prior_count = sum(map(len, msgspec.msgpack.decode(request.body[:prior_size]))) if prior_size else 0
        parts = script.parts
        whole = b"".join(parts)
        target = headers["d-target"]
        decode_instance = self if target in ("self", self.target) else self.peers[target]
        last = prior_count + 1 >= len(parts)
        answer: dict[str, Any] = {"reqId": headers["req-id"], "isStream": script.stream, "isLastResp": last}
        if script.stream or last:
            answer["output"] = (parts[prior_count] if script.stream else whole).decode()
        if not self.plain:
            answer |= {"headers": script.headers, "status": script.status}
            answer["records"] = base64.b64encode(part_record(prior_count)).decode()
        if not last:
            decode_instance.start_decode(headers["req-id"], parts, prior_count + 1, script)
        self._send_json(writer, 200, answer)

    # -- decode

    def start_decode(self, request_id: str, parts: list[bytes], first_part: int, script: AnswerScript) -> None:
        task = asyncio.get_running_loop().create_task(self._run_decode(request_id, parts, first_part, script))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run_decode(self, request_id: str, parts: list[bytes], first_part: int, script: AnswerScript) -> None:
        native = not self.plain
        if self.decode_hook is not None:
            await self.decode_hook(self, request_id, parts, first_part)
            return
        if not script.stream:
            head = result_frames.encode_head_frame(request_id, script.status, list(script.headers))
            self.send_frames(
                [
                    *([head] if native else []),
                    *result_frames.encode_result(request_id, b"".join(parts), last=True, native=native),
                ]
            )
            return
        for number in range(first_part, len(parts)):
            if self.tick:
                await asyncio.sleep(self.tick)
            while request_id in self.paused_ids:
                await asyncio.sleep(0.001)
            if request_id in self.stopped_ids:
                return
            self.send_part(request_id, parts, number)

    def send_part(self, request_id: str, parts: list[bytes], number: int) -> None:
        """Send one part of a stream."""
        native = not self.plain
        record_frames = [result_frames.encode_record_frame(request_id, part_record(number))] if native else []
        self.send_frames(
            [
                *record_frames,
                *result_frames.encode_result(request_id, parts[number], last=number == len(parts) - 1, native=native),
            ]
        )

    def send_frames(self, frames: list[bytes]) -> None:
        """Send frames, and keep them for a connection that returns."""
        self.sent_frames += frames
        for writer in self.result_writers:
            self._write_chunks(writer, b"".join(frames))

    def _write_chunks(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        step = self.cut or len(data) or 1
        for begin in range(0, len(data), step):
            piece = data[begin : begin + step]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    async def _serve_results(
        self, request: ReceivedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.result_requests.append(request)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        query = dict(pair.split("=") for pair in request.target.partition("?")[2].split("&") if pair)
        if not self.plain:
            self._write_chunks(writer, result_frames.encode_epoch_frame(self.epoch))
            if query.get("epoch") == self.epoch:
                for frame in list(self.sent_frames)[int(query["from"]) :]:
                    self._write_chunks(writer, frame)
        self.result_writers = [writer]
        try:
            while await reader.read(1024):
                pass
        finally:
            if writer in self.result_writers:
                self.result_writers.remove(writer)

    def break_result_connection(self) -> None:
        """Break the result connection."""
        for writer in self.result_writers:
            writer.transport.abort()
        self.result_writers = []
