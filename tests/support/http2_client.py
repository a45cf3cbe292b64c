"""A client of HTTP/2 that works frame by frame, by the h2 library or with raw bytes."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    InformationalResponseReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from support.http_client import Answer, RunningServer

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # an empty frame
GOAWAY = 7


def make_frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def goaway_code(server: RunningServer, data: bytes) -> int | None:
    """Send these bytes on a new connection, and answer nothing. Return the code of GOAWAY once the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    received, code = b"", None
    try:
        writer.write(data)
        while part := await asyncio.wait_for(reader.read(1 << 16), 20):
            received += part
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    while len(received) >= 9:
        size = 9 + int.from_bytes(received[:3], "big")
        if received[3] == GOAWAY:
            code = int.from_bytes(received[13:17], "big")
        received = received[size:]
    return code


class Http2Client:
    """One connection. ``goaway``: the error code of the server's GOAWAY, None before it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, reads_bodies: bool = True):
        self.reader, self.writer = reader, writer
        self.h2 = H2Connection(
            H2Configuration(client_side=True, validate_outbound_headers=False, normalize_outbound_headers=False)
        )
        self.reads_bodies = reads_bodies
        self.goaway: int | None = None
        self.statuses: dict[int, int] = {}
        self.headers: dict[int, dict[str, str]] = {}
        self.bodies: defaultdict[int, bytes] = defaultdict(bytes)
        self.resets: dict[int, int] = {}
        self.ended: set[int] = set()
        self.interim: list[int] = []
        self.is_closed = False

    @classmethod
    async def connect(cls, server: RunningServer, *, reads_bodies: bool = True, **settings: int) -> Http2Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", server.port), reads_bodies=reads_bodies)
        for name, value in settings.items():
            setattr(client.h2.local_settings, name, value)
        client.h2.local_settings.acknowledge()
        client.h2.decoder.max_allowed_table_size = client.h2.local_settings.header_table_size
        client.h2.initiate_connection()
        await client.flush()
        return client

    async def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    async def send_raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def begin(self, path: str, body: Any = None, method: str = "", end: bool = True, **headers: str) -> int:
        """Queue a request and return the number of its stream; ``flush`` sends it."""
        number = self.h2.get_next_available_stream_id()
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        fields = [(":method", method), (":scheme", "http"), (":authority", "localhost"), (":path", path)]
        self.h2.send_headers(number, [*fields, *headers.items()], end_stream=end and not data)
        if data:
            self.h2.send_data(number, data, end_stream=end)
        return number

    async def step(self) -> bool:
        """Handle what comes next. Return False once the server has closed the connection."""
        try:
            data = await asyncio.wait_for(self.reader.read(65536), 20)
        except ConnectionError:
            data = b""
        if not data:
            self.is_closed = True
            return False
        for event in self.h2.receive_data(data):
            self._take(event)
        if not self.is_closed:
            await self.flush()
        return True

    def _take(self, event: Event) -> None:
        if isinstance(event, ConnectionTerminated):
            self.goaway = int(event.error_code)
        elif isinstance(event, InformationalResponseReceived):
            self.interim.append(int(dict(event.headers)[b":status"]))
        elif isinstance(event, ResponseReceived):
            fields = {name.decode(): value.decode() for name, value in event.headers}
            self.statuses[event.stream_id] = int(fields.pop(":status"))
            self.headers[event.stream_id] = fields
        elif isinstance(event, DataReceived):
            self.bodies[event.stream_id] += event.data
            if self.reads_bodies:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, StreamReset):
            self.resets[event.stream_id] = int(event.error_code)
        elif isinstance(event, WindowUpdated):
            pass

    async def answer(self, number: int) -> Answer:
        """Wait for the end of a stream's response."""
        while number not in self.ended and number not in self.resets and await self.step():
            pass
        assert number in self.ended, (self.resets, self.goaway)
        return Answer(self.statuses[number], self.headers[number], self.bodies[number])

    async def call(self, path: str, body: Any = None, **options: Any) -> Answer:
        number = self.begin(path, body, **options)
        await self.flush()
        return await self.answer(number)

    async def reset_code(self, number: int) -> int:
        """Wait until the server resets a stream, and return the error code."""
        while number not in self.resets and await self.step():
            pass
        return self.resets[number]

    async def closed(self) -> int | None:
        """Wait until the server closes the connection. Return the error code of GOAWAY."""
        while await self.step():
            pass
        return self.goaway

    def close(self) -> None:
        self.writer.transport.abort()
