"""A host on 127.0.0.1 that sends what a test says, byte by byte, and keeps the requests that it got."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

Answer = bytes | Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]  # a function writes the answer itself


def http_answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def redirect_to(url: str, status: str = "302 Found") -> bytes:
    return http_answer(b"", f"Location: {url}", status=status)


async def run_until_closed(coroutine: Coroutine[Any, Any, None], reader: asyncio.StreamReader) -> None:
    """Run a coroutine until the client closes the connection."""
    tasks = [asyncio.ensure_future(coroutine), asyncio.ensure_future(reader.read())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception) and not isinstance(outcome, ConnectionError):
            raise outcome


class MediaHost:
    """``answers``: by path; other paths get 404. ``heads``: of the requests so far."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.heads: list[bytes] = []
        self.port = 0
        self.open_connections = self.max_connections = 0
        self.closed = asyncio.Condition()

    async def wait_until_idle(self) -> None:
        """Wait until no client is connected."""
        async with self.closed, asyncio.timeout(20):
            await self.closed.wait_for(lambda: not self.open_connections)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections += 1
        self.max_connections = max(self.max_connections, self.open_connections)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            answer = self.answers.get(head.split()[1].decode(), http_answer(b"gone", status="404 Not Found"))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await run_until_closed(answer(writer), reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()
            async with self.closed:
                self.open_connections -= 1
                self.closed.notify_all()


@asynccontextmanager
async def run_media_host(ssl_context: ssl.SSLContext | None = None) -> AsyncIterator[MediaHost]:
    host = MediaHost()
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0, ssl=ssl_context)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()
        await server.wait_closed()
