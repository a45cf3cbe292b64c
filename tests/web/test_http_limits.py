"""HTTP from a hostile client: heads, chunks and bodies that are too large, too slow or malformed."""

import asyncio
import gzip
import json
import resource
import zlib

import msgspec
import pytest
from support.http_client import HELLO_CHAT, MODEL_INFO, Connection, build_request
from support.loop_clock import pass_time

from parley.web.connection_limit import ConnectionLimit, divide_descriptors
from parley.web.http_protocol import PARSED_SIZE

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
BODY = json.dumps(HELLO_CHAT).encode()


async def answer_status(connection: Connection) -> int:
    return (await connection.answer()).status


async def test_rejects_a_request_head_over_the_limit(serve):
    server = await serve(header_limit=4096)
    connection = await server.connect()
    await connection.send(build_request("POST", CHAT, HELLO_CHAT, {"x-fill": "a" * 5000}))
    answer = await connection.answer()
    assert (answer.status, answer.error["type"]) == (431, "invalid_request_error")
    assert (await server.get("/v1/" + "a" * 5000)).status == 431
    assert await server.control()


async def test_rejects_more_headers_than_the_limit(serve):
    server = await serve(header_count=20)
    assert (await server.get("/v1/models", **{f"x-{n}": "1" for n in range(25)})).status == 431
    assert (await server.get("/v1/models", **{f"x-{n}": "1" for n in range(15)})).status == 200


@pytest.mark.parametrize("line", [b"x-fill: ", b"GET /", b"x: y\r\n"], ids=["one header", "one line", "many headers"])
async def test_cuts_off_an_endless_request_head(serve, line):
    server = await serve()
    connection = await server.connect()
    start = b"" if line.startswith(b"GET") else HEAD
    sent = 0
    try:
        await connection.send(start + line)
        while sent < 100 << 20:
            piece = line * 10_000 if line.endswith(b"\n") else b"a" * 65_536
            await connection.send(piece)
            sent += len(piece)
    except ConnectionError:
        pass
    assert sent < 16 << 20
    connection.close()
    assert await server.control()


async def test_slow_request_head_times_out_with_408(serve):
    server = await serve(header_timeout=60)
    for start in (b"", b"POST", HEAD):
        connection = await server.connect()
        await connection.send(start)
        await pass_time(60)
        assert b" 408 " in (await connection.ended())[:16]
    assert await server.control()


async def test_slow_request_body_times_out_with_408(serve):
    server = await serve(body_timeout=60)
    connection = await server.connect()
    await connection.send(HEAD + b"content-length: 100\r\n\r\n{")
    await server.until(lambda: bool(server.parts.registry.options.body_budget.held_bytes))
    await pass_time(60)
    assert await answer_status(connection) == 408
    connection.close()
    assert await server.control()


async def test_rejects_a_large_content_length_before_reading_the_body(serve):
    server = await serve(body_limit=1000)
    connection = await server.connect()
    await connection.send(HEAD + b"content-length: 100000000\r\n\r\n")
    answer = await connection.answer()
    assert answer.status == 413
    assert "1000" in answer.error["message"]
    connection.close()


@pytest.mark.parametrize("connection_header", ["", "connection: close\r\n"], ids=["keep-alive", "close"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/mindie/v1/chat/completions"])
async def test_answers_a_client_that_sends_a_rejected_body_to_its_end(serve, path, connection_header):
    """Most clients send the whole body before they read. MindIE's answers close every connection."""
    server = await serve(body_limit=1000)
    connection, size = await server.connect(), 16 << 20
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{connection_header}content-length: {size}\r\n\r\n"
    await connection.send(head.encode())
    for _ in range(size >> 16):
        await connection.send(b" " * (1 << 16))
    assert await answer_status(connection) == 413
    if connection_header or "mindie" in path:
        assert await connection.ended() == b""
    connection.close()
    assert await server.control()


async def test_rejects_a_large_chunked_body_while_reading_it(serve):
    server = await serve(body_limit=1000)
    connection = await server.connect()
    await connection.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"64\r\n" + b" " * 100 + b"\r\n" * 1)
    for _ in range(20):
        await connection.send(b"64\r\n" + b" " * 100 + b"\r\n")
    assert await answer_status(connection) == 413
    connection.close()
    assert await server.control()


async def test_bodies_may_be_larger_for_a_model_that_reads_images(serve):
    seeing = msgspec.structs.replace(MODEL_INFO, media_kinds=frozenset({"image"}))
    server = await serve(info=seeing, body_limit=1000, media_body_limit=5000)
    body = {"prompt": "a b", "max_tokens": 2}
    assert (await server.post("/v1/completions", body | {"user": "u" * 3000})).status == 200
    answer = await server.post("/v1/completions", body | {"prompt": "a " * 600})
    assert answer.status == 413
    assert answer.error["message"] == "The text of the request has 1200 characters; 1000 are allowed."
    assert (await server.post("/v1/completions", body | {"user": "u" * 6000})).status == 413
    reading = await serve(body_limit=1000, media_body_limit=5000)
    assert (await reading.post("/v1/completions", body | {"user": "u" * 3000})).status == 413


async def test_cuts_off_a_client_that_keeps_sending_a_rejected_body(serve, monkeypatch):
    monkeypatch.setattr("parley.web.http_protocol.LINGER_SECONDS", 0.1)
    server = await serve(body_limit=1000)
    connection = await server.connect()
    await connection.send(HEAD + b"content-length: 100000000\r\n\r\n")
    assert await answer_status(connection) == 413
    with pytest.raises(ConnectionError):
        while True:
            await connection.send(b" " * 1000)
            await asyncio.sleep(0.01)


ENDLESS_REQUESTS = [  # their beginnings, and the status of their answer
    (b"no HTTP\r\n\r\n", 400),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nabcde\r\nno size\r\n", 400),
    (b"POST /v1/completions HTTP/1.1\r\nx: ", 408),
    (b"POST /v1/completions HTTP/1.1\r\nx: " + b"a" * 70_000, 431),
]


@pytest.mark.parametrize(("beginning", "status"), ENDLESS_REQUESTS, ids=["line", "chunk", "slow head", "long head"])
async def test_client_that_reads_only_after_sending_gets_the_refusal(serve, beginning, status):
    """A connection that is closed with unread data is reset, and the client's next write fails."""
    server = await serve(header_timeout=0.2 if status == 408 else 60)
    connection = await server.connect()
    await connection.send(beginning)
    if status == 408:
        await asyncio.sleep(0.4)
    for _ in range(20):
        await connection.send(b"a" * 10_000)
        await asyncio.sleep(0.005)
    assert await answer_status(connection) == status
    assert await connection.ended() == b""


async def test_cuts_off_a_client_that_keeps_sending_a_refused_head(serve, monkeypatch):
    monkeypatch.setattr("parley.web.http_protocol.LINGER_SECONDS", 0.1)
    limit = ConnectionLimit()
    server = await serve(connection_limit=limit)
    connection = await server.connect()
    await connection.send(b"no HTTP\r\n\r\n")
    assert await answer_status(connection) == 400
    assert len(limit._connections) == 1
    with pytest.raises(ConnectionError):
        while True:
            await connection.send(b" " * 1000)
            await asyncio.sleep(0.01)
    assert not limit._connections


async def test_pipelined_body_has_the_full_time_limit(serve, monkeypatch):
    """The server must not take it for the unread rest of the request before it, which has a short limit."""
    monkeypatch.setattr("parley.web.http_protocol.LINGER_SECONDS", 0.1)
    server = await serve(tick=0.05)
    connection = await server.connect()
    stream = {**HELLO_CHAT, "stream": True, "max_tokens": 12}
    both = build_request("POST", CHAT, HELLO_CHAT) + build_request("POST", CHAT, stream)
    await connection.send(both[:-1])
    assert await answer_status(connection) == 200
    await asyncio.sleep(0.2)
    await connection.send(both[-1:])
    assert (await connection.answer()).events
    connection.close()


@pytest.mark.parametrize("between", [0, 1])
async def test_pipelined_head_has_the_full_time_limit(serve, monkeypatch, between):
    """Its time starts when the requests before it are answered, and a 408 must not interrupt their answers."""
    monkeypatch.setattr("parley.web.http_protocol.LINGER_SECONDS", 0.1)
    server = await serve(header_timeout=60)
    server.engine.step_gate.clear()
    connection = await server.connect()
    stream = {**HELLO_CHAT, "stream": True, "max_tokens": 12}
    last = build_request("POST", CHAT, HELLO_CHAT)
    await connection.send(build_request("POST", CHAT, stream) * (1 + between) + last[:30])
    await server.until(lambda: server.engine.open_stream_count == 1)
    await pass_time(60)
    server.engine.step_gate.set()
    for _ in range(1 + between):
        assert (await connection.answer()).events
    await pass_time(40)
    await connection.send(last[30:])
    assert await answer_status(connection) == 200
    await connection.send(last[:30])
    await pass_time(60)
    assert b" 408 " in (await connection.ended())[:16]


@pytest.mark.parametrize(
    ("between", "wrong"),
    [(0, b"no HTTP\r\n\r\n"), (1, b"no HTTP\r\n\r\n"), (0, b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000)],
    ids=["none", "none after another", "endless"],
)
async def test_invalid_pipelined_request_does_not_corrupt_a_running_answer(serve, between, wrong):
    server = await serve(tick=0.02)
    connection = await server.connect()
    stream = build_request("POST", CHAT, {**HELLO_CHAT, "stream": True})
    await connection.send(stream)
    assert (await connection.head())[0] == 200
    server.engine.step_gate.clear()  # the answer runs until everything has been sent
    await connection.send(stream * between + wrong[:20])
    await asyncio.sleep(0.02)
    await connection.send(wrong[20:])
    await asyncio.sleep(0.02)
    server.engine.step_gate.set()
    assert b"HTTP/1.1" not in await connection.ended()
    assert await server.control()


def test_connection_limit_raises_the_descriptor_limit():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] // 2, before[1]))
        alone = divide_descriptors(1).clients
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        assert (
            divide_descriptors(2).clients.served_limit <= alone.served_limit < alone.refused_limit < before[1]
            or before[1] == resource.RLIM_INFINITY
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_few_descriptors_for_clients_are_a_warning_unless_few_are_wanted(caplog):
    few = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert divide_descriptors(1, set_aside=few, max_connections=5).clients.served_limit == 1
    assert not caplog.messages
    divide_descriptors(1, set_aside=few)
    [message] = caplog.messages
    assert message.endswith("has room for 1 connection of clients only; raise it (ulimit -n 4096).")


async def test_rejects_connections_over_the_limit_with_429(serve):
    limit = ConnectionLimit(2, 3)
    server, second_server = await serve(connection_limit=limit, tick=0.02), await serve(connection_limit=limit)
    idle, busy, late = [await port.connect() for port in (server, server, second_server)]
    await busy.send(build_request("POST", CHAT, {**HELLO_CHAT, "stream": True}))
    await busy.head()
    server.engine.step_gate.clear()  # it stays busy until the other requests have come
    await late.send(build_request("POST", CHAT, HELLO_CHAT))
    answer = await late.answer()
    assert (answer.status, answer.error["code"], answer.headers["connection"]) == (429, "rate_limit_exceeded", "close")
    assert await late.ended() == b""
    await idle.send(build_request("GET", "/v1/models"))
    assert await answer_status(idle) == 200
    another = await server.connect()  # replaces the idle connection
    assert await idle.ended() == b""
    await another.send(build_request("POST", CHAT, HELLO_CHAT))
    await server.until(lambda: server.engine.open_stream_count == 2)
    server.engine.step_gate.set()
    assert await answer_status(another) == 200
    assert b"[DONE]" in await asyncio.wait_for(busy.reader.readuntil(b"[DONE]"), 60)
    for connection in (busy, another):
        connection.close()


def encode_chunks(data: bytes, size: int) -> bytes:
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def test_reads_a_body_of_seventy_thousand_one_byte_chunks(serve):
    server = await serve()
    body = BODY[:-1] + b" " * 70_000 + b"}"
    connection = await server.connect()
    await connection.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + encode_chunks(body, 1))
    assert await answer_status(connection) == 200
    connection.close()


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"0\r\nx-fill: ", b"a" * 65_536),
        (b"0\r\n", b"x-fill: y\r\n" * 6_000),
        (b"1;", b"a" * 65_536),
        (b"0", b"0" * 65_536),
    ],
    ids=["one trailer", "many trailers", "extension of a chunk", "size of a chunk"],
)
async def test_cuts_off_endless_framing_after_the_head(serve, start, piece):
    """The parser keeps a trailer until its end, and each further part of it would take longer."""
    server = await serve()
    connection = await server.connect()
    sent = 0
    try:
        await connection.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + encode_chunks(BODY, 10)[:-5] + start)
        while sent < 100 << 20:
            await connection.send(piece)
            sent += len(piece)
    except ConnectionError:
        pass
    assert sent < 16 << 20
    connection.close()
    assert await server.control()


async def test_head_that_follows_others_at_once_is_no_trailer(serve):
    """All of it may arrive together, and be more than the limit of one head."""
    server = await serve(header_limit=4096)
    probe = build_request("GET", "/health", None, {"x-fill": "a" * 3000})
    connection = await server.connect()
    await connection.send(probe + HEAD + b"content-length: %d\r\nx-fill: %b\r\n\r\n" % (len(BODY), b"a" * 3000))
    assert await answer_status(connection) == 200
    await connection.send(BODY)
    assert await answer_status(connection) == 200
    connection.close()


async def test_trailers_are_no_headers(serve):
    """They must not pass for headers, which proxies in front replace or check."""
    server = await serve(api_keys=("right",))
    request = HEAD + b"%btransfer-encoding: chunked\r\n\r\n" + encode_chunks(BODY, 50)[: -len(b"\r\n")]
    for header, trailer, status in [
        (b"", b"authorization: Bearer right\r\n", 401),
        (b"authorization: Bearer right\r\n", b"authorization: Bearer wrong\r\nhost: x\r\n", 200),
    ]:
        connection = await server.connect()
        await connection.send(request.replace(b"%b", header) + trailer + b"\r\n")
        assert await answer_status(connection) == status
        connection.close()


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"content-length: 0\r\ncontent-length: 44\r\n\r\n" + SMUGGLED,
        HEAD + b"content-length: 5, 5\r\n\r\n{}   " + SMUGGLED,
        HEAD + b"content-length: -5\r\n\r\n{}   " + SMUGGLED,
        HEAD + b"content-length: 0x5\r\n\r\n{}   " + SMUGGLED,
        HEAD + b"transfer-encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"content-length : 2\r\n\r\n{}" + SMUGGLED,
        HEAD + b" folded: x\r\n\r\n" + SMUGGLED,
        b"POST /v1/completions HTTP/9.9\r\n\r\n" + SMUGGLED,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"CONNECT example.com:80 HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
        b"POST http://[::bad HTTP/1.1\r\nhost: localhost\r\n\r\n" + SMUGGLED,
        b"GET /v1/models HTTP/1.1\r\n\r\n" + SMUGGLED,
        b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n" + SMUGGLED,
        b"GET /v1/models HTTP/1.1\r\nhost: local host\r\n\r\n" + SMUGGLED,
        b"GET /v1/models HTTP/1.1\r\nhost: localhost/x\r\n\r\n" + SMUGGLED,
        b"GET /v1/models\r\n",
        b"\r\nGET /v1/models\r\n\r\n" + SMUGGLED,
        b"GET /v1/models HTTP/0.9\r\nhost: localhost\r\n\r\n" + SMUGGLED,
        b"GET /v1/models HTTP/2.0\r\nhost: localhost\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        HEAD.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"GET http://evil/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" + SMUGGLED,
        b"GET http://localhost:1/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" + SMUGGLED,
        b"GET http://evil@localhost/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" + SMUGGLED,
        b"GET ftp://localhost/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" + SMUGGLED,
    ],
    ids=range(31),
)
async def test_rejects_ambiguous_framing_and_ignores_smuggled_requests(serve, sent):
    server = await serve(header_timeout=1, keep_alive=1)
    connection = await server.connect()
    await connection.send(sent)
    answered = await connection.ended()
    assert answered.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 405 "))
    assert b'"object":"list"' not in answered
    assert answered.count(b"HTTP/1.1 ") == 1
    assert await server.control()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_has_stopped_sending_gets_all_its_answers(serve, stream):
    server = await serve(tick=0.01)
    connection = await server.connect()
    await connection.send(2 * build_request("POST", CHAT, {**HELLO_CHAT, "stream": stream}))
    connection.writer.write_eof()
    answered = await connection.ended()
    assert answered.count(b"HTTP/1.1 200 ") == 2
    assert answered.count(b"[DONE]" if stream else b'"finish_reason":') == 2
    await server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_distinguishes_a_closed_client_from_one_that_stopped_sending(serve, stream):
    """Its system answers the interim response with a reset, and the request ends long before its answer would."""
    server = await serve(tick=0.05)
    connection = await server.connect()
    await connection.send(build_request("POST", CHAT, {**HELLO_CHAT, "max_tokens": 4000, "stream": stream}))
    await server.until(lambda: server.engine.open_stream_count == 1)
    connection.writer.close()
    await server.until(lambda: server.engine.open_stream_count == 0)
    assert server.engine.stats.generated_tokens < 1000
    await server.wait_until_idle()


async def test_client_that_stops_sending_inside_a_request_is_disconnected(serve):
    server = await serve()
    connection = await server.connect()
    await connection.send(build_request("POST", CHAT, HELLO_CHAT)[:-1])
    connection.writer.write_eof()
    assert await connection.ended() == b""
    await server.wait_until_idle()


async def test_garbage_after_a_request_does_not_corrupt_its_answer(serve):
    server = await serve(tick=0.001)
    connection = await server.connect()
    await connection.send(
        build_request("POST", CHAT, HELLO_CHAT | {"stream": True, "max_tokens": 2000, "ignore_eos": True})
    )
    await server.until(lambda: server.engine.stats.generated_tokens > 10)
    await connection.send(b"\x00\x01 rubbish\r\n\r\n")
    answered = await connection.ended()
    assert answered.count(b"HTTP/1.1") == 1
    await server.wait_until_idle()


@pytest.mark.parametrize("coding", ["gzip", "deflate", "x-gzip", "GZIP"])
async def test_reads_gzip_and_deflate_bodies(serve, coding):
    server = await serve()
    packed = zlib.compress(BODY) if coding == "deflate" else gzip.compress(BODY)
    answer = await server.call("POST", CHAT, packed, {"content-encoding": coding})
    assert answer.status == 200


async def test_rejects_a_compressed_body_that_expands_over_the_limit(serve):
    server = await serve(body_limit=1 << 20)
    bomb = gzip.compress(b" " * (64 << 20))
    assert len(bomb) < 1 << 20
    assert (await server.call("POST", CHAT, bomb, {"content-encoding": "gzip"})).status == 413


@pytest.mark.parametrize(
    ("packed", "coding"),
    [
        (b"not gzip", "gzip"),
        (gzip.compress(BODY)[:-9], "gzip"),
        (gzip.compress(BODY) + b"more", "gzip"),
        (b"", "gzip"),
        (BODY, "br"),
        (BODY, "gzip, gzip"),
    ],
    ids=range(6),
)
async def test_rejects_bodies_that_cannot_be_decompressed(serve, packed, coding):
    server = await serve()
    assert (await server.call("POST", CHAT, packed, {"content-encoding": coding})).status == 400


async def test_clients_that_do_not_read_do_not_block_others(serve):
    server = await serve(tick=0.001, write_timeout=0.5)
    quiet = [await server.connect() for _ in range(50)]
    server.engine.step_gate.clear()  # no stream ends before all are open
    for connection in quiet:
        connection.writer.transport.pause_reading()
        await connection.send(
            build_request("POST", CHAT, HELLO_CHAT | {"stream": True, "max_tokens": 3000, "ignore_eos": True})
        )
    await server.until(lambda: server.engine.open_stream_count == 50)
    server.engine.step_gate.set()
    for _ in range(5):
        assert await server.control()
    for connection in quiet:
        connection.close()
    await server.wait_until_idle()


async def test_answers_expect_100_continue(serve):
    server = await serve()
    connection = await server.connect()
    await connection.send(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
    assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await connection.send(BODY)
    assert await answer_status(connection) == 200
    connection.close()


@pytest.mark.parametrize("cut", [None, 1, 60, -len(BODY), -1], ids=str)
async def test_ignores_an_h2c_upgrade_offer(serve, cut):
    server = await serve()
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQ"}
    data = build_request("POST", CHAT, HELLO_CHAT, offer)
    connection = await server.connect()
    for _ in range(2):
        await connection.send(data[:cut])
        if cut is not None:
            await asyncio.sleep(0.02)
            await connection.send(data[cut:])
        assert await answer_status(connection) == 200
    await connection.send(data * 50 + build_request("GET", "/v1/models"))
    assert [await answer_status(connection) for _ in range(51)] == [200] * 51
    connection.close()
    await server.wait_until_idle()


async def test_rejects_the_connect_method(serve):
    server = await serve()
    for target in (b"/v1/models", b"localhost:80"):
        connection = await server.connect()
        await connection.send(
            b"CONNECT %b HTTP/1.1\r\nhost: localhost\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n" % target
        )
        assert await answer_status(connection) in (400, 405)
        connection.close()
    assert await server.control()


async def test_pipelined_requests_do_not_count_as_one_large_head(serve):
    server = await serve(header_limit=4096)
    connection = await server.connect()
    one = build_request("GET", "/v1/models", None, {"x-fill": "a" * 1000})
    many = one * 100
    await connection.send(many[:500])
    await asyncio.sleep(0.02)
    await connection.send(many[500:-500])  # starts and ends inside a head
    await asyncio.sleep(0.02)
    await connection.send(many[-500:])
    assert [await answer_status(connection) for _ in range(100)] == [200] * 100
    connection.close()


@pytest.mark.parametrize("target", [b"http://localhost/v1/models?a=b", b"HTTPS://LOCALHOST/v1/models"])
async def test_accepts_a_url_of_the_host_as_request_target(serve, target):
    server = await serve()
    connection = await server.connect()
    await connection.send(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % target)
    assert await answer_status(connection) == 200
    connection.close()


async def test_pipelined_requests_are_parsed_only_as_they_are_answered(serve):
    """A parsed request takes a hundred times the memory of its bytes."""
    server = await serve()
    server.engine.step_gate.clear()
    connection = await server.connect()
    await connection.send(build_request("POST", CHAT, HELLO_CHAT))
    one = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    count = 20_000
    sending = asyncio.create_task(connection.send(one * count))
    (protocol,) = server.server.server_state.connections
    most = PARSED_SIZE // len(one) + 1
    await server.until(lambda: bool(protocol._unparsed_data))
    assert 0 < len(protocol.pipeline) <= most
    server.engine.step_gate.set()
    assert await answer_status(connection) == 200
    for _ in range(count // 10):
        assert await answer_status(connection) == 200
        assert len(protocol.pipeline) <= most and len(protocol._unparsed_data) <= 1 << 20
    connection.close()
    sending.cancel()
    await server.wait_until_idle()


async def test_body_of_a_pipelined_request_may_be_large(serve):
    server = await serve()
    connection = await server.connect()
    large = build_request("POST", CHAT, {**HELLO_CHAT, "ignored": "a" * 600_000})
    sending = asyncio.create_task(connection.send((build_request("POST", CHAT, HELLO_CHAT) + large) * 3))
    for _ in range(6):
        assert await answer_status(connection) == 200
    await sending
    connection.close()
    await server.wait_until_idle()
