"""HTTP/2 frames that cost their sender little: each flood ends its own connection, and the server continues."""

from __future__ import annotations

import asyncio

import pytest
from hpack import Encoder
from support.http2_client import PREFACE, SETTINGS, Http2Client, goaway_code, make_frame
from support.loop_clock import pass_time

from parley.web import loop_turns
from parley.web.framing import frame_guard, http2_protocol
from parley.web.framing.frame_guard import (
    ENHANCE_YOUR_CALM,
    FRAME_SIZE_ERROR,
    PROTOCOL_ERROR,
    FrameGuard,
    HostileFrames,
)

OPENING = PREFACE + SETTINGS
FIELDS = [(":method", "POST"), (":scheme", "http"), (":authority", "localhost"), (":path", "/v1/chat/completions")]
BLOCK = Encoder().encode(FIELDS)


def make_resets(count: int) -> bytes:
    encoder = Encoder()
    streams = range(1, 2 * count, 2)
    return b"".join(
        make_frame(1, 4, number, encoder.encode(FIELDS)) + make_frame(3, 0, number, bytes(4)) for number in streams
    )


def make_self_resets(count: int) -> bytes:
    """Window updates that overflow make the server reset the streams."""
    encoder = Encoder()
    streams = range(1, 2 * count, 2)
    return b"".join(
        make_frame(1, 4, number, encoder.encode(FIELDS)) + make_frame(8, 0, number, b"\x7f\xff\xff\xff")
        for number in streams
    )


BURST, RESETS = 200, 40  # smaller than the real ones, so that the tests are quick
FLOODS = {
    "rapid resets": (make_resets(RESETS + 10), ENHANCE_YOUR_CALM),
    "resets that the server is made to send": (make_self_resets(RESETS + 10), ENHANCE_YOUR_CALM),
    "pings": (make_frame(6, payload=bytes(8)) * (BURST + 10), ENHANCE_YOUR_CALM),
    "settings": (SETTINGS * (BURST + 10), ENHANCE_YOUR_CALM),
    "many unknown settings": (
        make_frame(4, payload=b"".join(bytes([9, n, 0, 0, 0, 0]) for n in range(250))),
        ENHANCE_YOUR_CALM,
    ),
    "priorities": (make_frame(2, 0, 1, b"\0\0\0\0\1") * (BURST + 10), ENHANCE_YOUR_CALM),
    "window updates": (make_frame(8, 0, 0, b"\0\0\0\1") * (BURST + 10), ENHANCE_YOUR_CALM),
    "unknown frames": (make_frame(77) * (BURST + 10), ENHANCE_YOUR_CALM),
    "empty data": (make_frame(1, 4, 1, BLOCK) + make_frame(0, 0, 1) * (BURST + 10), ENHANCE_YOUR_CALM),
    "padding": (
        make_frame(1, 4, 1, BLOCK) + make_frame(0, 8, 1, b"\x10" + bytes(16)) * (BURST + 10),
        ENHANCE_YOUR_CALM,
    ),
    "padding only": (
        make_frame(1, 4, 1, BLOCK) + make_frame(0, 8, 1, b"\xff" + bytes(255)) * (BURST + 10),
        ENHANCE_YOUR_CALM,
    ),
    "sizes of the header table": (make_frame(1, 5, 1, b"\x3f\xe1\x1f" * 3 + BLOCK), PROTOCOL_ERROR),
    "empty continuations": (make_frame(1, 0, 1, BLOCK) + make_frame(9, 0, 1) * (BURST + 10), PROTOCOL_ERROR),
    "long continuations": (
        make_frame(1, 0, 1, BLOCK) + make_frame(9, 0, 1, bytes(16384)) * 12,
        ENHANCE_YOUR_CALM,
    ),
    "a bomb of indexed headers": (
        make_frame(1, 4, 1, BLOCK + b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000 + b"\xbe" * 100),
        ENHANCE_YOUR_CALM,
    ),
    "a frame above the limit": (b"\xff\xff\xff\0\0\0\0\0\1", FRAME_SIZE_ERROR),
    "a stream opened twice": (make_frame(1, 5, 3, BLOCK) + make_frame(1, 5, 1, BLOCK), PROTOCOL_ERROR),
    "headers inside of headers": (make_frame(1, 0, 1, BLOCK) + make_frame(1, 4, 3, BLOCK), PROTOCOL_ERROR),
    "more streams than allowed": (
        b"".join(make_frame(1, 4, n, BLOCK) for n in range(1, 2 * http2_protocol.MAX_STREAMS + 10, 2)),
        PROTOCOL_ERROR,
    ),
    "a push": (make_frame(5, 4, 1, b"\0\0\0\2" + BLOCK), PROTOCOL_ERROR),
}


@pytest.fixture
def small_allowances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_guard, "FRAME_BURST", BURST)
    monkeypatch.setattr(frame_guard, "FRAMES_PER_SECOND", 1e-9)
    monkeypatch.setattr(frame_guard, "RESET_BURST", RESETS)
    monkeypatch.setattr(frame_guard, "RESETS_PER_SECOND", 1e-9)


async def test_floods_end_their_connection_and_nothing_else(serve, small_allowances):
    server = await serve()
    before = await server.control()
    other = await Http2Client.connect(server)
    for name, (frames, code) in FLOODS.items():
        assert await goaway_code(server, OPENING + frames) in (code, None), name  # None: a reset overtook it
        await server.until(lambda: len(server.server.server_state.connections) <= 1)
        assert (await other.call("/health")).status == 200, name
    other.close()
    await server.wait_until_idle()
    await server.until(lambda: not server.server.server_state.tasks)
    assert await server.control() == before


async def test_connections_that_flood_at_once_take_turns_with_an_honest_one(serve, monkeypatch):
    monkeypatch.setattr(loop_turns, "TURN_SECONDS", 0)  # one turn in each iteration of the loop
    server = await serve()
    writers = [(await asyncio.open_connection("127.0.0.1", server.port))[1] for _ in range(8)]
    other = await Http2Client.connect(server)
    assert (await other.call("/health")).status == 200
    handled: list[int] = []
    split_frames = FrameGuard.split_frames

    def count_frames(guard: FrameGuard):
        for frame in split_frames(guard):
            handled.append(id(guard))
            yield frame

    monkeypatch.setattr(FrameGuard, "split_frames", count_frames)
    for writer in writers:
        writer.write(OPENING + make_resets(400))
    await server.until(lambda: len(set(handled)) == 8)
    assert (await other.call("/health")).status == 200
    assert (await server.get("/health")).status == 200
    assert len(handled) < 8 * 400, "the floods were handled first"
    assert len(server.server.server_state.tasks) < 8, "requests began that had been reset before"
    for writer in writers:
        writer.transport.abort()
    other.close()


async def test_an_error_in_a_later_turn_closes_the_connection_and_no_other(serve, monkeypatch):
    server = await serve()
    other, faulty = await Http2Client.connect(server), await Http2Client.connect(server)
    for client in (other, faulty):
        assert (await client.call("/health")).status == 200
    split_frames = FrameGuard.split_frames

    def find_error(guard: FrameGuard):
        for frame in split_frames(guard):
            if frame.data.endswith(b"an error"):
                raise RuntimeError("An error that nobody expects.")
            yield frame

    monkeypatch.setattr(FrameGuard, "split_frames", find_error)
    pings = make_frame(6, payload=bytes(8)) * 2 * http2_protocol.FRAMES_PER_TURN
    await faulty.send_raw(pings + make_frame(6, payload=b"an error"))
    async with asyncio.timeout(60):
        while await faulty.step():
            pass
    assert (await other.call("/health")).status == 200
    assert len(server.server.server_state.connections) == 1
    for client in (other, faulty):
        client.close()


async def test_frames_earned_by_responses_are_not_a_flood(serve, monkeypatch):
    monkeypatch.setattr(frame_guard, "FRAME_BURST", 60)
    monkeypatch.setattr(frame_guard, "FRAMES_PER_SECOND", 1e-9)
    client = await Http2Client.connect(await serve())
    for _ in range(60):
        client.h2.ping(bytes(8))
        assert (await client.call("/v1/models")).status == 200
    client.close()


async def test_header_block_that_does_not_end_has_the_time_of_heads(serve):
    server = await serve(header_timeout=15)
    goaway = asyncio.create_task(goaway_code(server, OPENING + make_frame(1, 0, 1, BLOCK)))
    await server.until(lambda: any(connection._times_block for connection in server.server.server_state.connections))
    await pass_time(15)
    assert await goaway == ENHANCE_YOUR_CALM


async def test_table_that_compresses_response_headers_stays_small(serve):
    server = await serve()
    client = await Http2Client.connect(server, header_table_size=1 << 24)
    assert (await client.call("/health")).status == 200
    (connection,) = server.server.server_state.connections
    assert connection._h2.encoder.header_table_size <= http2_protocol.ENCODER_TABLE
    client.close()


async def test_client_that_reads_nothing_is_no_longer_read_and_then_disconnected(serve):
    server = await serve(write_timeout=0.2)
    client = await Http2Client.connect(server)
    assert (await client.call("/health")).status == 200
    (connection,) = server.server.server_state.connections
    connection.pause_writing()  # as the transport does when its buffer is full
    assert not connection.transport.is_reading()
    assert await client.closed() is None
    client.close()


def test_guard_names_the_reason_of_each_flood(small_allowances):
    for name, (frames, code) in FLOODS.items():
        guard = FrameGuard(header_block_limit=131072)
        try:
            guard.add_data(OPENING + frames)
            for _ in guard.split_frames():
                pass
        except HostileFrames as error:
            assert error.code == code or name == "empty continuations"
            assert error.reason.endswith(".")
