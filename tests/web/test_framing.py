"""Generated request heads: what two servers could read in different ways is refused, and its connection closed."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzz_settings, run_in_loop

BODY = b'{"prompt":"a","max_tokens":1}'
CHUNKED_BODY = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
LENGTH = b"content-length: %d" % len(BODY)
CHUNKED = b"transfer-encoding: chunked"
GOOD_HOSTS = [b"host: localhost", b"Host:localhost", b"HOST: localhost:80", b"host: "]
ODD_HOSTS = [b"host: local host", b"host: a/b", b"host: a@b", b"host: [::", b"host: a:b", b"host : localhost"]
ODD_CODINGS = [b"transfer-encoding: gzip, chunked", b"transfer-encoding: identity", b"transfer-encoding: xchunked",
               b"transfer-encoding : chunked", b"transfer-encoding: chunked, chunked"]  # fmt: skip
ODD_LENGTHS = [b"content-length: +29", b"content-length: 29, 29", b"content-length: 0x1d", b"content-length: -1",
               b"content-length: 2 9", b"content-length: "]  # fmt: skip
versions = st.sampled_from([b"HTTP/1.1"] * 6 + [b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.10", b"http/1.1", b""])
hosts = st.lists(st.sampled_from(GOOD_HOSTS), min_size=1, max_size=1) | st.lists(
    st.sampled_from(GOOD_HOSTS + ODD_HOSTS), max_size=2
)
framings = st.sampled_from([[LENGTH], [CHUNKED]]) | st.lists(
    st.sampled_from([LENGTH, CHUNKED, *ODD_CODINGS, *ODD_LENGTHS]), min_size=1, max_size=2
)


def is_plain(version: bytes, host: list[bytes], framing: list[bytes]) -> bool:
    """Whether every server reads the head in the same way."""
    return version == b"HTTP/1.1" and len(host) == 1 and host[0] in GOOD_HOSTS and framing in ([LENGTH], [CHUNKED])


async def test_generated_heads_are_answered_once_or_refused(serve):
    server = await serve(header_timeout=2, keep_alive=0.2)
    before = await server.control()

    @fuzz_settings(5)
    @given(version=versions, host=hosts, framing=framings, lines=st.randoms())
    async def fuzz(version, host, framing, lines):
        headers = [*host, *framing]
        lines.shuffle(headers)
        start = b"POST /v1/completions" + (b" " + version if version else b"")
        body = CHUNKED_BODY if CHUNKED in framing else BODY
        connection = await server.connect()
        await connection.send(b"\r\n".join([start, *headers, b"", body]) + SMUGGLED)
        answers = (await asyncio.wait_for(connection.ended(), 20)).split(b"HTTP/1.1 ")[1:]
        statuses = [int(answer[:3]) for answer in answers if not answer.startswith(b"100")]
        if is_plain(version, host, framing):
            assert statuses == [200, 200], (headers, answers)
        else:
            assert statuses == [400], (version, headers, answers)

    await run_in_loop(fuzz)
    await server.wait_until_idle()
    assert await server.control() == before
