"""A running server with access to its parts, and an HTTP client that works byte by byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import uvicorn

from parley.boot.server_parts import ServerParts
from parley.engine.scripted_engine import SCRIPTED_MODEL, ScriptedEngine

MODEL_INFO = msgspec.structs.replace(SCRIPTED_MODEL, vocab_size=640, max_model_len=4096)
HELLO_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The decoded events of a stream, which must end with [DONE]."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == "" and lines.pop() == "data: [DONE]", lines[-2:]
        return [json.loads(line.removeprefix("data: ")) for line in lines if not line.startswith(":")]


class Connection:
    """The client's side of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def answer(self, method: str = "GET") -> Answer:
        status, headers = await self.head()
        if method == "HEAD":
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(await self.chunks())
        else:
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(status, headers, body)

    async def chunks(self) -> list[bytes]:
        """Read the chunks of an answer without a content length."""
        chunks = []
        while size := int(await self.reader.readline(), 16):
            chunks.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return chunks

    async def ended(self) -> bytes:
        """Read everything until the server closes the connection, then close this end."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""
        finally:
            self.close()

    def close(self) -> None:
        self.writer.transport.abort()


def build_request(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(data)}"]
    content_type = (
        {"content-type": "application/json"} if body is not None and "content-type" not in (headers or {}) else {}
    )
    lines += [f"{name}: {value}" for name, value in (content_type | (headers or {})).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def fill_path(path: str) -> str:
    """Fill in the parameters of a route's path."""
    parameters = {"model": "tiny", "model:path": "tiny", "version": "1", "repo": "r", "region": "x", "response": "r",
             "endpoint": "tiny", "served": "tiny", "id": "i", "digest": "d", "item": "i", "method": "ServerMetadata",
             "rest:path": "x", "rest": "x"}  # fmt: skip
    return re.sub(r"\{([^}]+)\}", lambda part: parameters[part[1]], path)


class RunningServer:
    """A running server, with the parts of it that tests inspect."""

    def __init__(self, parts: ServerParts, engine: ScriptedEngine, server: uvicorn.Server, port: int):
        self.parts, self.service, self.instance_state = parts, parts.registry, parts.instance_state
        self.engine, self.server, self.port = engine, server, port
        self.model = self.service.main_model
        self.url = f"http://127.0.0.1:{port}"
        self._connections: list[Connection] = []

    async def connect(self) -> Connection:
        """Open a connection. The test may close it; the fixture that started the server closes it at the latest."""
        self._connections.append(await self._open_connection())
        return self._connections[-1]

    def close_connections(self) -> None:
        for connection in self._connections:
            connection.close()

    async def _open_connection(self) -> Connection:
        return Connection(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24))

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = await self._open_connection()
        try:
            await connection.send(build_request(method, path, body, headers))
            return await connection.answer(method)
        finally:
            connection.close()

    async def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return await self.call("POST", path, body, headers)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.call("GET", path, None, headers)

    async def control(self) -> str:
        """Answer a fixed request. Its text must be the same before and after a test."""
        answer = await self.post("/v1/chat/completions", HELLO_CHAT)
        assert answer.status == 200, answer.body
        return answer.json["choices"][0]["message"]["content"]

    async def pages_returned(self) -> None:
        """Wait until no page is leased to other instances or reserved for them."""
        await self.until(lambda: not self.engine.lease_count and not self.engine.reservation_count)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(6000):  # half a minute at least
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it never came about")

    async def wait_until_idle(self) -> None:
        """Wait until no request is left, and check that no place in the queue is held."""
        await self.until(lambda: not self.service.open_requests and not self.engine.open_stream_count)
        await self.until(lambda: self.engine.stats.running == self.engine.stats.waiting == 0)
        assert self.model.used_slots == 0
