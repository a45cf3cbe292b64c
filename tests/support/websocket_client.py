"""The client's side of a WebSocket, frame by frame."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from typing import Any, NamedTuple

from support.http_client import Answer, Connection, RunningServer

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
KEY = "dGhlIHNhbXBsZSBub25jZQ=="  # RFC 6455, 1.3
OFFER = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": KEY}


class Frame(NamedTuple):
    opcode: int
    data: bytes


def encode_frame(data: bytes, opcode: int = TEXT, *, fin: bool = True, masked: bool = True) -> bytes:
    size, mask = len(data), os.urandom(4) if masked else b""
    head = bytes([opcode | 0x80 * fin])
    if size < 126:
        head += bytes([size | 0x80 * masked])
    elif size < 1 << 16:
        head += bytes([126 | 0x80 * masked]) + struct.pack("!H", size)
    else:
        head += bytes([127 | 0x80 * masked]) + struct.pack("!Q", size)
    if masked:
        data = bytes(byte ^ mask[number % 4] for number, byte in enumerate(data))
    return head + mask + data


def handshake(path: str, headers: dict[str, str] | None = None) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: localhost"]
    lines += [f"{name}: {value}" for name, value in {**OFFER, **(headers or {})}.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


class WebSocketClient:
    """A connection after its handshake."""

    def __init__(self, connection: Connection, headers: dict[str, str]):
        self.connection, self.headers = connection, headers

    async def send(self, message: Any) -> None:
        """Send a message: bytes as they are, anything else as JSON."""
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        await self.connection.send(encode_frame(data))

    async def frame(self) -> Frame:
        """Return the next frame. Raises asyncio.IncompleteReadError at the end."""
        reader = self.connection.reader
        first, second = await reader.readexactly(2)
        assert first & 0x80 and not first & 0x70 and not second & 0x80, "one whole frame without a mask"
        size = second
        if size == 126:
            (size,) = struct.unpack("!H", await reader.readexactly(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", await reader.readexactly(8))
        return Frame(first & 0x0F, await reader.readexactly(size))

    async def event(self) -> dict[str, Any]:
        """Return the next message. Answers pings, which a server sends to clients that it has not heard for a while."""
        while (frame := await self.frame()).opcode == PING:
            await self.connection.send(encode_frame(frame.data, PONG))
        assert frame.opcode == TEXT, frame
        event: dict[str, Any] = json.loads(frame.data)
        return event

    async def answer(self) -> list[dict[str, Any]]:
        """Return the events of a response up to its last one, or the error that refuses it."""
        events = [await self.event()]
        while events[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed", "error"):
            events.append(await self.event())
        return events

    async def create(self, **members: Any) -> list[dict[str, Any]]:
        """Ask for a response, and return its events."""
        await self.send({"type": "response.create", "model": "tiny", **members})
        return await self.answer()

    async def closed(self) -> tuple[int, str]:
        """Return code and reason of the close, which must be the next frame; it is answered."""
        frame = await self.frame()
        assert frame.opcode == CLOSE, frame
        await self.connection.send(encode_frame(frame.data, CLOSE))
        assert await self.connection.ended() == b""
        return struct.unpack("!H", frame.data[:2])[0], frame.data[2:].decode()


async def open_websocket(server: RunningServer, path: str = "/v1/responses", **headers: str) -> WebSocketClient:
    connection = await server.connect()
    await connection.send(handshake(path, {name.replace("_", "-"): value for name, value in headers.items()}))
    status, answer_headers = await connection.head()
    assert status == 101, (status, await connection.reader.read(1000))
    return WebSocketClient(connection, answer_headers)


async def refused_handshake(server: RunningServer, path: str = "/v1/responses", **headers: str) -> Answer:
    connection = await server.connect()
    await connection.send(handshake(path, {name.replace("_", "-"): value for name, value in headers.items()}))
    return await asyncio.wait_for(connection.answer(), 60)
