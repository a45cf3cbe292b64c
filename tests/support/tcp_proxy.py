"""A TCP proxy between two processes or tasks, as a network that stalls or cuts connections."""

from __future__ import annotations

import asyncio
import contextlib


class TcpProxy:
    """Forwards connections to a port of this machine."""

    def __init__(self, target_port: int):
        self.port = 0
        self._target_port = target_port
        self._flows = asyncio.Event()  # set unless the network stalls
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._forward_connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stall(self) -> None:
        """Deliver nothing any more, as a network that loses all packets: connections stay open."""
        self._flows.clear()

    async def cut(self) -> None:
        """Reset all connections, and refuse new ones."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def restore(self) -> None:
        """Deliver everything again."""
        self._flows.set()
        if self._server is not None and not self._server.is_serving():
            await self.open()

    async def close(self) -> None:
        await self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _forward_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(target_writer)
            try:
                await asyncio.gather(self._copy(reader, target_writer), self._copy(target_reader, writer))
            finally:
                self._writers.discard(target_writer)
                target_writer.transport.abort()
        except OSError:
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
            await self._flows.wait()
        writer.transport.close()
