"""A coordinator that runs inside a test, and raw requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parley.coordinator.coordinator import Coordinator


@dataclass
class RunningCoordinator:
    """A running coordinator; clients connect to ``port``."""

    coordinator: Coordinator
    port: int
    task: asyncio.Task[int]
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def wait_until(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    async def send_raw(self, raw: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and send. The fixture that started the coordinator closes it, if the test does not."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        writer.write(raw)
        return reader, writer

    def close_connections(self) -> None:
        for writer in self.writers:
            writer.close()

    async def post(self, path: str = "/v1/chat/completions", body: bytes = b"{}", *extra: str) -> ClientAnswer:
        """Send one request and return the complete answer."""
        head = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", "connection: close", *extra]
        reader, writer = await self.send_raw("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        try:
            async with asyncio.timeout(60):
                return await read_client_answer(reader)
        finally:
            writer.close()

    async def get(self, path: str, method: str = "GET") -> ClientAnswer:
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        reader, writer = await self.send_raw(head.encode())
        try:
            async with asyncio.timeout(60):
                return await read_client_answer(reader, head_only=method == "HEAD")
        finally:
            writer.close()


@dataclass
class ClientAnswer:
    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool = True  # False if the connection broke first


async def read_client_answer(reader: asyncio.StreamReader, *, head_only: bool = False) -> ClientAnswer:
    """Read one answer and join its chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {}
    for line in head[1:]:
        if line:
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
    status = int(head[0].split(" ")[1])
    if head_only:
        return ClientAnswer(status, headers, b"")
    if "content-length" in headers:
        return ClientAnswer(status, headers, await reader.readexactly(int(headers["content-length"])))
    body = b""
    try:
        while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    except (asyncio.IncompleteReadError, ConnectionError):
        return ClientAnswer(status, headers, body, is_complete=False)
    return ClientAnswer(status, headers, body)
