"""HTTP connections for fetching: to addresses that were checked before, with a limit on the bytes that a server sends.

``httpcore2`` sends a request and parses the answer. It follows no redirects, decodes no content, and knows neither
proxies nor cookies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from io import BytesIO
from typing import Any

import httpcore2

from parley.serving.media.addresses import FetchAddress, IpAddress

CONNECT_SECONDS = 5.0
MIN_RATE = 1000  # bytes per second of a body, measured over RATE_SECONDS
RATE_SECONDS = 5.0
MAX_TRIED = 4  # addresses of a host to try
MAX_OVERHEAD = 64 << 10  # bytes of headers and of chunk framing
OVERHEAD_SHARE = 1 / 64  # a further overhead that is allowed, as a share of the body
HEADERS = (
    (b"User-Agent", b"parley"),
    (b"Accept", b"*/*"),
    (b"Accept-Encoding", b"identity"),
    (b"Connection", b"close"),
)


def system_tls_context() -> ssl.SSLContext:
    """Return settings of TLS with the system's certificate authorities, or those of ``SSL_CERT_FILE`` if it is set."""
    return httpcore2.default_ssl_context()


class TrafficMeter:
    """Compares all bytes that a server sent with those of the body.

    Parsing costs processor time for each part of a body. Without a limit, a server could send endless headers, or a
    body in millions of tiny parts.
    """

    def __init__(self) -> None:
        self.received = self.body = 0

    def check_overhead(self) -> None:
        """Raise RemoteProtocolError if the body is too small a part of the received bytes."""
        if self.received - self.body > MAX_OVERHEAD + self.body * OVERHEAD_SHARE:
            raise httpcore2.RemoteProtocolError("The headers or the chunk sizes are too long for a body of this size.")


class MeteredStream(httpcore2.AsyncNetworkStream):
    """A network stream that counts the bytes read. All earlier bytes have been parsed at the next read."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, meter: TrafficMeter):
        self._stream, self._meter = stream, meter

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read the next bytes. Raises RemoteProtocolError after too many that were not the body."""
        self._meter.check_overhead()
        data = await self._stream.read(max_bytes, timeout)
        self._meter.received += len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all bytes."""
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.AsyncNetworkStream:
        """Return an encrypted stream over this one, which counts decrypted bytes."""
        return MeteredStream(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._meter)

    def get_extra_info(self, info: str) -> Any:
        """Return a property of the stream."""
        return self._stream.get_extra_info(info)


class PinnedBackend(httpcore2.AnyIOBackend):
    """Connects to the first of the given addresses that answers, without resolving the host's name again."""

    def __init__(self, addresses: Sequence[IpAddress], meter: TrafficMeter):
        self._addresses, self._meter = addresses[:MAX_TRIED], meter
        self._stream: httpcore2.AsyncNetworkStream | None = None

    async def close_connection(self) -> None:
        """Close the connection in any state, also after an interrupted handshake."""
        if self._stream is not None:
            await self._stream.aclose()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Return a connection to one of the addresses. Raises ConnectError, ConnectTimeout."""
        failure: Exception = httpcore2.ConnectError("The host has no address.")
        for address in self._addresses:
            try:
                seconds = CONNECT_SECONDS / len(self._addresses)
                self._stream = await super().connect_tcp(str(address), port, seconds, local_address, socket_options)
                return MeteredStream(self._stream, self._meter)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


class FetchedAnswer:
    """The answer to a GET request. ``headers``: with names in lower case; ``size``: of the body, if announced."""

    def __init__(self, response: httpcore2.Response, meter: TrafficMeter):
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers}
        self._response, self._meter = response, meter

    @property
    def size(self) -> int | None:
        """The number of bytes in the body, if the server announces it."""
        length = self.headers.get(b"content-length", b"")
        return int(length) if length.isdigit() and b"transfer-encoding" not in self.headers else None

    async def read_body(self, count_bytes: Callable[[int], None]) -> bytes:
        """Return the body. ``count_bytes`` is called with the size of each part before the part is stored, and may
        raise.

        Raises TimeoutError if too few bytes come.
        """
        loop = asyncio.get_running_loop()
        body = BytesIO()  # in the end it gives its memory away, where joining parts would copy them all at once
        goal = MIN_RATE * RATE_SECONDS
        async with asyncio.timeout(RATE_SECONDS) as time_limit, aclosing(self._response.aiter_stream()) as stream:
            async for part in stream:
                count_bytes(len(part))
                body.write(part)
                self._meter.body += len(part)
                if self._meter.body >= goal:
                    goal = self._meter.body + MIN_RATE * RATE_SECONDS
                    time_limit.reschedule(loop.time() + RATE_SECONDS)
                await asyncio.sleep(0)  # many parts may come at once, and others need the event loop as well
        return body.getvalue()


@asynccontextmanager
async def open_answer(
    address: FetchAddress, ip_addresses: Sequence[IpAddress], ssl_context: ssl.SSLContext | None
) -> AsyncIterator[FetchedAnswer]:
    """Send a GET request and yield the answer; the connection ends with the context.

    A certificate is verified for the host's name. Raises TimeoutError, and ConnectionError if the server cannot be
    reached, breaks off or does not speak HTTP; in the context as well.
    """
    meter = TrafficMeter()
    host, target = address.host.encode(), address.target.encode()
    url = httpcore2.URL(scheme=address.scheme.encode(), host=host, port=address.port, target=target)
    headers = [(b"Host", address.authority.encode()), *HEADERS]
    request = httpcore2.Request(b"GET", url, headers=headers, extensions={"timeout": {"connect": CONNECT_SECONDS}})
    backend = PinnedBackend(ip_addresses, meter)
    connection = httpcore2.AsyncHTTPConnection(url.origin, ssl_context, network_backend=backend)
    try:
        yield FetchedAnswer(await connection.handle_async_request(request), meter)
    except httpcore2.TimeoutException as error:
        raise TimeoutError from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
        raise ConnectionError from error
    finally:
        await backend.close_connection()
