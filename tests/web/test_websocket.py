"""WebSockets from friendly and hostile clients: the handshake, frames, limits, closing, and the end of the server."""

import asyncio
import contextlib
import json
import random
import socket
import tracemalloc

import pytest
from support.http2_client import Http2Client
from support.http_client import Connection, build_request
from support.websocket_client import (
    BINARY,
    CLOSE,
    PING,
    PONG,
    TEXT,
    Frame,
    encode_frame,
    handshake,
    open_websocket,
    refused_handshake,
)

from parley.dialects.openai.responses.socket_session import ResponsesSession
from parley.serving import socket_handshake, socket_requests
from parley.web import loop_turns
from parley.web.connection_limit import ConnectionLimit
from parley.web.framing.frame_guard import FRAME_BURST
from parley.web.websocket import protocol

PATH = "/v1/responses"
LONG = {"input": "Hello", "ignore_eos": True, "max_output_tokens": 4000}
CREATE = json.dumps({"type": "response.create", "model": "tiny", "input": "Hello"}).encode()


async def has_connection(server) -> bool:
    return bool(server.server.server_state.connections)


async def gone(server) -> None:
    """Wait until no connection is left."""
    await server.until(lambda: not server.server.server_state.connections)
    await server.wait_until_idle()
    assert not server.server.config.http.options.body_budget.held_bytes


async def test_accepts_a_handshake_with_golden_bytes(serve):
    server = await serve()
    connection = await server.connect()
    await connection.send(handshake(PATH, {"x-request-id": "mine", "sec-websocket-extensions": "permessage-deflate"}))
    head = await connection.reader.readuntil(b"\r\n\r\n")
    assert head == (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nx-request-id: mine\r\n\r\n"
    )
    await connection.send(encode_frame(b"hi", PING) + b"\x88\x82\0\0\0\0\x03\xe8")
    assert await connection.ended() == b"\x8a\x02hi" + b"\x88\x02\x03\xe8"
    await gone(server)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"upgrade": "h2c"}, 426),
        ({"connection": "keep-alive"}, 426),
        ({"sec-websocket-version": "8"}, 426),
        ({"sec-websocket-version": ""}, 426),
        ({"sec-websocket-key": "dGhlIHNhbXBsZQ=="}, 400),
        ({"sec-websocket-key": "not base64"}, 400),
        ({"sec-websocket-key": ""}, 400),
        ({"content-length": "2"}, 400),
        ({"transfer-encoding": "chunked"}, 400),
        ({"origin": "http://elsewhere.example"}, 403),
        ({"host": "elsewhere.example"}, 400),  # twice
    ],
    ids=str,
)
async def test_refuses_a_handshake_in_the_form_of_the_api(serve, headers, status):
    server = await serve()
    answer = await refused_handshake(server, **headers)
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    if status == 426:
        names = ("upgrade", "connection", "sec-websocket-version")
        assert [answer.headers[name] for name in names] == ["websocket", "upgrade", "13"]
    assert await server.control()


async def test_requests_without_a_handshake_are_told_to_upgrade(serve):
    server = await serve()
    assert (await server.get(PATH)).status == (await server.call("HEAD", PATH)).status == 426
    connection = await Http2Client.connect(server)
    try:
        answer = await connection.call(PATH, method="GET")
        assert answer.status == 426 and b"HTTP/1.1" in answer.body
    finally:
        connection.close()


async def test_a_server_without_the_library_names_it(serve, monkeypatch):
    monkeypatch.setattr(socket_handshake, "HAS_WEBSOCKETS", False)
    answer = await refused_handshake(await serve())
    assert answer.status == 426 and "pip install 'parley-llm[websocket]'" in answer.error["message"]


async def test_other_paths_ignore_the_offer_and_keep_the_connection(serve):
    server = await serve()
    connection = await server.connect()
    for _ in range(2):
        await connection.send(handshake("/v1/models"))
        assert (await connection.answer()).status == 200
    await connection.send(handshake(PATH))
    assert (await connection.head())[0] == 101


@pytest.mark.parametrize("path", ["/openai/responses", "/v1/responses"])
async def test_messages_have_the_path_of_a_handshake_below_a_root_path(serve, path):
    server = await serve(root_path="/openai")
    client = await open_websocket(server, f"/openai{path}")
    assert (await client.create(input="Hello"))[-1]["type"] == "response.completed"


async def test_a_client_that_sends_nothing_more_gets_no_websocket(serve):
    server = await serve(tick=0.002)
    connection = await server.connect()
    connection.writer.write(build_request("POST", PATH, LONG | {"max_output_tokens": 50}) + handshake(PATH))
    connection.writer.write_eof()
    answers = await asyncio.wait_for(connection.ended(), 60)
    assert b"HTTP/1.1 200" in answers and b"HTTP/1.1 400" in answers and b"ended its side" in answers
    await gone(server)


async def test_frames_before_the_answer_are_refused(serve):
    server = await serve()
    connection = await server.connect()
    await connection.send(handshake(PATH) + build_request("GET", "/v1/models"))
    assert (await connection.answer()).status == 400
    assert (await connection.answer()).status == 200


async def test_the_key_is_checked_before_the_handshake_and_with_each_request(serve):
    server = await serve(api_keys=("sk-first-key-0123456789",))
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert (await refused_handshake(server, **headers)).status == 401
    client = await open_websocket(server, authorization="Bearer sk-first-key-0123456789")
    assert (await client.create(input="Hello"))[-1]["type"] == "response.completed"
    connection = next(iter(server.server.server_state.connections))
    connection.app._app.keys.replace_keys(("sk-other-key-0123456789",), (), (), "", {})
    (refusal,) = await client.create(input="Hello")
    assert (refusal["status"], refusal["error"]["code"]) == (401, "invalid_api_key")


async def test_a_message_may_come_in_pieces_between_control_frames(serve):
    server = await serve()
    client = await open_websocket(server)
    third = len(CREATE) // 3
    frames = [
        encode_frame(CREATE[:third], TEXT, fin=False),
        encode_frame(b"", PING),
        encode_frame(CREATE[third:-third], 0, fin=False),
        encode_frame(b"", 0, fin=False),
        encode_frame(b"unasked", PONG),
        encode_frame(CREATE[-third:], 0),
    ]
    for byte in b"".join(frames):
        await client.connection.send(bytes([byte]))
    assert await client.frame() == Frame(PONG, b"")
    assert (await client.answer())[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (encode_frame(b"{}", BINARY), 1003),
        (encode_frame(b"{}", masked=False), 1002),
        (encode_frame(b"{}", 0), 1002),
        (encode_frame(b"{", TEXT, fin=False) + encode_frame(b"}", TEXT), 1002),
        (encode_frame(b"", PING, fin=False), 1002),
        (encode_frame(b"a" * 126, PING), 1002),
        (encode_frame(b"{}", 3), 1002),
        (b"\xc1" + encode_frame(b"{}")[1:], 1002),  # a reserved bit, as of compressed messages
        (encode_frame(b"\xff\xfe"), 1007),
        (encode_frame(b"\x03", CLOSE), 1002),
        (encode_frame(b"\x03\xed", CLOSE), 1002),  # 1005 is never sent
        (encode_frame(b"\x03\xe8\xff", CLOSE), 1007),
    ],
    ids=["binary", "unmasked", "continuation", "interleaved", "split ping", "long ping", "opcode", "reserved", "utf-8",
         "short close", "close code", "close reason"],
)  # fmt: skip
async def test_closes_with_the_code_of_the_fault(serve, data, code):
    server = await serve()
    client = await open_websocket(server)
    await client.connection.send(data)
    frame = await client.frame()
    assert (frame.opcode, int.from_bytes(frame.data[:2])) == (CLOSE, code)
    if code != 1003:
        assert await client.connection.ended() == b""
    client.connection.close()
    await gone(server)


async def test_messages_above_the_limit_of_bodies_close_with_1009(serve, monkeypatch):
    monkeypatch.setattr(socket_requests, "ENVELOPE_BYTES", 100)
    server = await serve(body_limit=1000)
    first = await open_websocket(server)
    assert (await first.create(input="a" * 800))[-1]["type"] == "response.completed"
    assert (await first.create(input="a" * 970))[0]["status"] == 413  # fits with the envelope, but not the body
    for data in (encode_frame(b"a" * 1200), encode_frame(b"a" * 600, fin=False) + encode_frame(b"a" * 600, 0)):
        client = await open_websocket(server)
        await client.connection.send(data)
        assert (await client.closed())[0] == 1009
    client = await open_websocket(server)
    first.connection.close()
    await client.connection.send(b"\x81\xff" + (1 << 60).to_bytes(8) + b"mask" + b"a" * 1200)
    assert (await client.closed())[0] == 1009
    await gone(server)


async def test_a_message_that_does_not_come_in_time_closes(serve):
    server = await serve(body_timeout=0.1)
    client = await open_websocket(server)
    await asyncio.sleep(0.2)  # before a message there is no limit
    await client.connection.send(encode_frame(b"{", fin=False))
    assert (await client.closed())[0] == 1008
    await gone(server)


async def test_memory_of_messages_is_counted(serve):
    server = await serve()
    server.server.config.http.options.body_budget.limit = 1000
    client = await open_websocket(server)
    await client.connection.send(encode_frame(b"a" * 1200, fin=False))
    assert (await client.closed())[0] == 1013
    await gone(server)


@pytest.mark.parametrize(
    "frame",
    [encode_frame(b"x"), encode_frame(b""), encode_frame(b"", PING), encode_frame(b"", PONG),
     encode_frame(b"x", fin=False) + encode_frame(b"x", 0)],
    ids=["one byte", "empty", "ping", "pong", "pieces"],
)  # fmt: skip
async def test_a_flood_of_frames_closes_with_1008(serve, monkeypatch, frame):
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.2)
    server = await serve()
    client = await open_websocket(server)
    await client.connection.send(frame * 5000)
    async with asyncio.timeout(60):
        while (closing := await client.frame()).opcode != CLOSE:
            pass
    assert int.from_bytes(closing.data[:2]) == 1008
    await gone(server)


@pytest.mark.parametrize("frame", [encode_frame(b"", PONG), encode_frame(b"x")], ids=["pongs", "messages"])
async def test_connections_that_send_many_frames_at_once_take_turns(serve, monkeypatch, frame):
    monkeypatch.setattr(loop_turns, "TURN_SECONDS", 0)  # one turn in each iteration of the loop
    server = await serve()
    clients = [await open_websocket(server) for _ in range(8)]
    handled: list[int] = []
    handle_event = protocol.WebSocketProtocol._handle_event

    def count_event(connection, event):
        handled.append(id(connection))
        handle_event(connection, event)

    monkeypatch.setattr(protocol.WebSocketProtocol, "_handle_event", count_event)
    for client in clients:
        client.connection.writer.write(frame * 2000)
    await server.until(lambda: len(set(handled)) == 8)
    assert (await server.get("/health")).status == 200
    assert len(handled) < 8 * 2000, "all frames were handled first"
    for client in clients:
        client.connection.close()
    await gone(server)


async def test_frames_beyond_the_allowance_bring_no_message(serve, monkeypatch):
    """Though the ones before it may have been answered by then."""
    monkeypatch.setattr(protocol, "FRAME_BURST", 20)
    monkeypatch.setattr(protocol, "FRAMES_PER_SECOND", 1e-9)
    server = await serve()
    client = await open_websocket(server)
    read: list[bytes] = []
    read_message = ResponsesSession.read_message

    def note_message(session, data):
        read.append(data)
        return read_message(session, data)

    monkeypatch.setattr(ResponsesSession, "read_message", note_message)
    await client.connection.send(b"".join(encode_frame(b"%d" % number) for number in range(40)))
    while (frame := await client.frame()).opcode != CLOSE:
        pass
    assert int.from_bytes(frame.data[:2]) == 1008
    assert read == [b"%d" % number for number in range(len(read))] and len(read) <= 20
    client.connection.close()
    await gone(server)


async def test_frames_that_wait_for_a_turn_are_all_read_in_order(serve, monkeypatch):
    monkeypatch.setattr(loop_turns, "TURN_SECONDS", 0)
    server = await serve()
    client, other = await open_websocket(server), await open_websocket(server)
    pings = [b"%d" % number for number in range(300)]
    data = b"".join(encode_frame(ping, PING) for ping in pings)
    await other.connection.send(encode_frame(b"", PONG) * 2000)
    for start in range(0, len(data), 1000):
        await client.connection.send(data[start : start + 1000])
    await client.send({"type": "response.create", "input": "Hello"})
    assert [await client.frame() for _ in pings] == [Frame(PONG, ping) for ping in pings]
    assert (await client.answer())[-1]["type"] == "response.completed"


async def test_many_frames_of_a_large_message_are_no_flood(serve):
    server = await serve()
    client = await open_websocket(server)
    text = json.dumps({"type": "response.create", "input": "Hello" + " " * 400_000}).encode()
    parts = [encode_frame(text[start : start + 80], TEXT if not start else 0, fin=False)
             for start in range(0, len(text), 80)]  # fmt: skip
    assert len(parts) > FRAME_BURST
    await client.connection.send(b"".join(parts) + encode_frame(b"", 0))
    assert (await client.answer())[-1]["type"] == "error"  # of the model: the prompt is too long


async def test_messages_that_came_together_let_others_run_between_them(serve):
    server = await serve()
    client = await open_websocket(server)
    (connection,) = server.server.server_state.connections
    await client.connection.send(encode_frame(b"x") * 500)
    waiting = set()  # numbers of messages that wait, as others see them
    for _ in range(5000):
        waiting.add(len(connection._parts))
        await asyncio.sleep(0)
    assert len(waiting) > 100
    assert [(await client.event())["type"] for _ in range(500)] == ["error"] * 500


async def test_empty_messages_pause_reading(serve):
    server = await serve()
    client = await open_websocket(server)
    (connection,) = server.server.server_state.connections
    await client.connection.send(encode_frame(b"") * 2000)
    await server.until(lambda: connection._parts)
    assert not connection.transport.is_reading()
    assert [(await client.event())["type"] for _ in range(2000)] == ["error"] * 2000
    assert connection.transport.is_reading()


async def test_pieces_of_a_message_take_no_more_memory_than_their_bytes(serve):
    server = await serve()
    client = await open_websocket(server)
    budget = server.server.config.http.options.body_budget
    frames = encode_frame(b"ab", TEXT, fin=False) + encode_frame(b"ab", 0, fin=False) * 3999
    tracemalloc.start()
    try:
        await client.connection.send(frames)
        await server.until(lambda: budget.held_bytes == 8000)
        traces = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(True, f"*/parley/web/{name}") for name in ("request_body.py", "websocket/protocol.py")]
        )
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in traces.statistics("filename")) < 3 * 8000


def make_buffers_small(server, client) -> None:
    """Let the systems of both sides keep few bytes on the way to a client."""
    (connection,) = server.server.server_state.connections
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.connection.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)


async def test_a_refused_message_is_counted_until_its_refusal_is_read(serve):
    server = await serve()
    budget = server.server.config.http.options.body_budget
    client = await open_websocket(server)
    make_buffers_small(server, client)
    transport = client.connection.writer.transport
    transport.pause_reading()
    message = json.dumps({"type": "response.steer", "previous_response_id": "a", "input": "b" * 500_000})
    await client.send(message.encode())
    (connection,) = server.server.server_state.connections
    await server.until(lambda: connection.write_paused)
    await asyncio.sleep(0.05)
    assert budget.held_bytes == len(message)
    transport.resume_reading()
    assert (await client.event())["type"] == "response.steer.failed"
    await server.until(lambda: not budget.held_bytes)


async def unread_connection(server) -> Connection:
    """Return the connection of a client that does not read."""
    client = await open_websocket(server)
    client.connection.writer.transport.pause_reading()
    return client.connection


@pytest.mark.parametrize("politely", [True, False])
async def test_the_end_of_the_connection_ends_its_requests(serve, politely):
    server = await serve(tick=0.001)
    client = await open_websocket(server)
    await client.send({"type": "response.create", **LONG})
    await client.send({"type": "response.create", **LONG})  # waits
    for _ in range(5):
        await client.event()
    assert server.engine.stats.running == 1
    if politely:
        await client.connection.send(encode_frame(b"\x03\xe8", CLOSE))
        assert (await client.connection.ended()).endswith(b"\x88\x02\x03\xe8")
    else:
        client.connection.close()
    await gone(server)


async def test_a_client_that_does_not_read_is_disconnected(serve):
    server = await serve(write_timeout=0.2, body_limit=1 << 22)
    connection = await unread_connection(server)
    tool = {"type": "function", "name": "f", "description": "d" * 200_000}
    echo = json.dumps({"type": "response.create", "input": "Hello", "tools": [tool], "tool_choice": "none"})
    for _ in range(8):
        await connection.send(encode_frame(echo.encode()))
    await gone(server)


async def test_pings_without_end_fill_no_memory(serve):
    server = await serve(write_timeout=0.3)
    connection = await unread_connection(server)
    pings = encode_frame(b"p" * 125, PING) * 1000
    with pytest.raises((TimeoutError, ConnectionError)):
        for _ in range(1000):
            await asyncio.wait_for(connection.send(pings), 0.2)
    await gone(server)


async def test_silent_connections_are_pinged(serve):
    server = await serve(ping_interval=0.05)
    client = await open_websocket(server)
    assert [await client.frame() for _ in range(3)] == [Frame(PING, b"")] * 3  # though none is answered
    assert await has_connection(server)


async def test_idle_connections_make_room_and_busy_ones_do_not(serve):
    server = await serve(connection_limit=ConnectionLimit(2, 4), tick=0.001)
    busy, idle = await open_websocket(server), await open_websocket(server)
    await busy.send({"type": "response.create", **LONG})
    await busy.event()
    assert (await server.get("/v1/models")).status == 200
    assert (await idle.closed())[0] == 1013
    assert (await busy.event())["type"] == "response.in_progress"


async def test_a_stopping_server_closes_after_the_running_response(serve):
    server = await serve(tick=0.001)
    busy, idle = await open_websocket(server), await open_websocket(server)
    await busy.send({"type": "response.create", "input": "Hello", "ignore_eos": True, "max_output_tokens": 40})
    await busy.event()
    server.server.announce_shutdown()
    assert await idle.closed() == (1001, "The server is shutting down.")
    assert (await busy.answer())[-1]["type"] == "response.incomplete"
    assert (await busy.closed())[0] == 1001
    await gone(server)


async def test_requests_do_not_keep_a_connection_of_a_stopping_server(serve):
    server = await serve(tick=0.001)
    client = await open_websocket(server)
    message = {"type": "response.create", "input": "Hello", "ignore_eos": True, "max_output_tokens": 40}
    await client.send(message)
    await client.send(message)  # waits
    await client.event()
    server.server.announce_shutdown()
    await client.send(message)
    refusals = []
    while (last := (await client.answer())[-1])["type"] == "error":
        refusals.append(last)
    assert last["type"] == "response.incomplete"
    refusals += [await client.event() for _ in range(2 - len(refusals))]
    assert [refusal["status"] for refusal in refusals] == [503, 503]
    assert (await client.closed())[0] == 1001
    await gone(server)


@pytest.mark.parametrize("politely", [True, False])
async def test_a_client_that_ends_the_connection_unread_is_cut_off(serve, monkeypatch, politely):
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.05)
    server = await serve()
    client = await open_websocket(server)
    make_buffers_small(server, client)
    client.connection.writer.transport.pause_reading()
    (connection,) = server.server.server_state.connections
    while not connection.transport.get_write_buffer_size():
        connection.transport.write(b"\x8a\x00" * 5000)
        await asyncio.sleep(0)
    assert not connection.write_paused
    if politely:
        await client.connection.send(encode_frame(b"\x03\xe8", CLOSE))
    else:
        client.connection.writer.write_eof()
    await gone(server)


async def test_a_fault_in_reading_a_message_closes_with_1011(serve, monkeypatch):
    def fail(session, data):
        raise KeyError("fault")

    monkeypatch.setattr(ResponsesSession, "read_message", fail)
    server = await serve()
    client = await open_websocket(server)
    await client.connection.send(encode_frame(CREATE))
    assert (await client.closed())[0] == 1011
    await gone(server)


async def test_uvicorn_ends_its_connections(serve):
    server = await serve(tick=0.001)
    busy, idle = await open_websocket(server), await open_websocket(server)
    await busy.send({"type": "response.create", **LONG})
    await busy.event()
    server.server.config.timeout_graceful_shutdown = 0.2
    server.server.should_exit = True
    assert (await idle.closed())[0] == 1001
    rest = await busy.connection.ended()
    assert rest.count(b"response.completed") == 0
    await gone(server)


async def test_a_client_that_does_not_answer_a_close_is_cut_off(serve, monkeypatch):
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.05)
    server = await serve()
    client = await open_websocket(server)
    await client.connection.send(encode_frame(b"", BINARY))
    assert (await client.frame()).opcode == CLOSE
    await gone(server)


async def test_handshakes_and_requests_are_counted_and_logged(serve, caplog):
    caplog.set_level("INFO", "parley.access")
    server = await serve(access_log=True)
    client = await open_websocket(server)
    await client.create(input="Hello")
    client.connection.close()
    await gone(server)
    lines = [record.getMessage() for record in caplog.records if record.name == "parley.access"]
    assert "POST /v1/responses status=200" in lines[0] and "GET /v1/responses status=101" in lines[1]


async def test_any_bytes_leave_the_server_well(serve):
    server = await serve()
    draw = random.Random(7)
    messages = (CREATE, b'{"type":"response.create"}', b"[]", b"\xff", b"", b"{" * 1000)
    for _ in range(60):
        pieces = []
        for _ in range(draw.randint(1, 8)):
            data = draw.choice(messages) if draw.random() < 0.7 else draw.randbytes(draw.randint(0, 200))
            opcode = draw.choice((TEXT, TEXT, 0, BINARY, PING, PONG, CLOSE, draw.randint(0, 15)))
            pieces.append(encode_frame(data, opcode, fin=draw.random() < 0.8, masked=draw.random() < 0.9))
            if draw.random() < 0.1:
                pieces.append(draw.randbytes(draw.randint(1, 30)))
        client = await open_websocket(server)
        joined = b"".join(pieces)
        cut = draw.randint(0, len(joined))
        for part in (joined[:cut], joined[cut:]):
            await client.connection.send(part)
        with contextlib.suppress(OSError):  # closed already
            client.connection.writer.write_eof()
        await asyncio.wait_for(client.connection.ended(), 20)
    await gone(server)
    assert await server.control()
