"""Authenticated connections between peers (sockets, TLS, shared secret): accepts them, and opens them.

A connection begins with 16 bytes that state its purpose: a link, or a page channel of a link. Then comes TLS if it is
configured. A link continues with the handshake that proves the secret (``handshake``), a page channel with the ticket
that this handshake gave to both sides of the link. An unauthenticated connection gets a thread only for TLS or a
ticket, no buffer beyond these few bytes, little time, and no information. This module does not know the messages of a
link.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from parley.disagg.kv import handshake
from parley.disagg.kv.tcp import PageChannel
from parley.disagg.kv.transport import LinkError

log = logging.getLogger("parley.kv")

HANDSHAKE_TIMEOUT_S = 10.0  # time for both sides to authenticate each other
MIN_TIMEOUT_S = 0.001  # the least timeout of a socket: 0 would make it non-blocking
LINK_PREAMBLE, PAGES_PREAMBLE = b"parley-kv 1 link", b"parley-kv 1 data"
MAX_UNAUTHENTICATED = 64  # unauthenticated connections at a time; one more replaces the oldest
READ_BUFFER_BYTES = 1 << 20
OTHER_SECRET = "has another cluster secret than this instance: give both the same --cluster-secret, or neither one"
NO_PEER_PORT = (
    "is another kind of server: give the --peer-port of an instance that has the same cluster secret (in a d-target as "
    "IP;PORT)"
)
CLOSED_AT_ONCE = (
    "hangs up at once: it is not the --peer-port of an instance, or it does not let this one in (--cluster-cert, "
    "--cluster-network)"
)


class AuthenticatedConnection(NamedTuple):
    """A connection after the handshake. ``ticket``: secret shared by the two sides only."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ticket: bytes
    name: str  # address of the other side


class KVListener:
    """Accepts connections. ``on_link`` must return within the rest of HANDSHAKE_TIMEOUT_S that authentication has
    left. ``admits_host``: whether the host at an IP address may connect; None: every host may."""

    def __init__(
        self,
        secret: bytes,
        tls: ssl.SSLContext | None,
        on_link: Callable[[AuthenticatedConnection], Awaitable[None]],
        on_page_channel: Callable[[bytes, PageChannel], bool],
        admits_host: Callable[[str], bool] | None = None,
    ):
        self.port = 0
        self._secret = secret
        self._tls = tls
        self._on_link = on_link
        self._on_page_channel = on_page_channel
        self._admits_host = admits_host
        self._listening_sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], None] = {}  # the tasks of connections, the oldest first
        self._threads = ThreadPoolExecutor(MAX_UNAUTHENTICATED, "parley-kv-listen")

    async def listen(self, host: str, port: int) -> None:
        """Listen at all addresses of a host, or (empty) of this machine; port 0 takes any. Raises OSError."""
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, *_, address in dict.fromkeys(addresses):
                listening_socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
                self._listening_sockets.append(listening_socket)
                listening_socket.setblocking(False)
                listening_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening_socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening_socket.bind((address[0], self.port or port, *address[2:]))
                listening_socket.listen(1024)
                self.port = listening_socket.getsockname()[1]
        except BaseException:
            self._close_sockets()
            raise
        for listening_socket in self._listening_sockets:
            self._start_task(self._accept_connections(listening_socket))

    async def close_listener(self) -> None:
        """Close sockets and threads, cancel all tasks; return when they have ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_sockets()
        await asyncio.to_thread(self._threads.shutdown, True)

    def _close_sockets(self) -> None:
        """Close the listening sockets."""
        for listening_socket in self._listening_sockets:
            listening_socket.close()
        self._listening_sockets = []

    def _start_task(self, coroutine: Any) -> asyncio.Task[None]:
        """Run a coroutine as a task that ``close_listener`` cancels."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def unauthenticated_count(self) -> int:
        """Number of open connections that have not proved the secret yet."""
        return len(self._unauthenticated)

    def _mark_authenticated(self, task: asyncio.Task[None] | None) -> None:
        """Stop counting a connection as unauthenticated. Its task may have ended."""
        if task is not None:
            self._unauthenticated.pop(task, None)

    async def _accept_connections(self, listening_socket: socket.socket) -> None:
        """Accept connections of one listening socket, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening_socket)
            except OSError as error:  # for example, too many open files
                log.warning("a connection for KV pages could not be accepted: %s", error)
                await asyncio.sleep(0.2)
                continue
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                self._mark_authenticated(oldest)
                oldest.cancel()
            task = self._start_task(self._identify_connection(sock))
            self._unauthenticated[task] = None
            task.add_done_callback(self._mark_authenticated)

    async def _identify_connection(self, sock: socket.socket) -> None:
        """Identify a new connection and hand it to the link or page handler."""
        address = "unknown address"
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                try:
                    address = _remote_address(sock)
                    if self._admits_host is not None and not self._admits_host(sock.getpeername()[0]):
                        raise LinkError("its host is not a member of the cluster (--cluster-network)")
                    sock.setblocking(False)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    preamble = await _receive_exactly(sock, len(LINK_PREAMBLE))
                    if preamble not in (LINK_PREAMBLE, PAGES_PREAMBLE):
                        raise LinkError("it uses another protocol")
                except BaseException:
                    sock.close()
                    raise
                if preamble == LINK_PREAMBLE:
                    await self._authenticate_link(sock, address)
                else:
                    await self._authenticate_channel(sock)
        except (LinkError, OSError, EOFError, handshake.HandshakeFailed) as error:
            log.info("a connection from %s was closed: %s", address, str(error) or type(error).__name__)

    async def _authenticate_link(self, sock: socket.socket, address: str) -> None:
        """Authenticate a link and pass it on."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(READ_BUFFER_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            ticket = await run_handshake(handshake.receiver_handshake(self._secret), reader, writer)
        except BaseException:
            writer.transport.abort()
            raise
        self._mark_authenticated(asyncio.current_task())
        await self._on_link(AuthenticatedConnection(reader, writer, ticket, address))

    async def _authenticate_channel(self, sock: socket.socket) -> None:
        """Read the ticket of a page channel and pass it on."""
        ticket_read = asyncio.get_running_loop().run_in_executor(self._threads, self._read_ticket, sock)
        try:
            channel, ticket = await asyncio.shield(ticket_read)
        except asyncio.CancelledError:
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            with suppress(OSError, EOFError):
                (await ticket_read)[0].close_channel()
            raise
        if not self._on_page_channel(ticket, channel):
            channel.close_channel()
            raise LinkError("its ticket belongs to no link")

    def _read_ticket(self, sock: socket.socket) -> tuple[PageChannel, bytes]:
        """Read the ticket of a page channel. Blocks, in a thread: page channels need blocking sockets, also with
        TLS. Raises OSError, also when HANDSHAKE_TIMEOUT_S are over: a slow sender must not keep the thread."""
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        try:
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
            ticket = b""
            while len(ticket) < handshake.PROOF_BYTES:
                sock.settimeout(max(MIN_TIMEOUT_S, deadline - time.monotonic()))
                data = sock.recv(handshake.PROOF_BYTES - len(ticket))
                if not data:
                    raise EOFError("it sent no ticket")
                ticket += data
        except BaseException:
            sock.close()
            raise
        return PageChannel(sock), ticket


async def connect_to_listener(
    host: str, port: int, secret: bytes, tls: ssl.SSLContext | None
) -> tuple[AuthenticatedConnection, Callable[[], PageChannel]]:
    """Connect to a listener. Returns the authenticated connection, and a function that opens a page channel to it; that
    one blocks and raises OSError.

    Raises OSError (``ssl.SSLError`` too), and LinkError if the secrets differ or no instance listens there.
    """
    loop = asyncio.get_running_loop()
    sock = await _connect_socket(host, port)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        family, address = sock.family, sock.getpeername()
        await loop.sock_sendall(sock, LINK_PREAMBLE)
    except BaseException:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(
        sock=sock, limit=READ_BUFFER_BYTES, ssl=tls, server_hostname=host if tls is not None else None
    )
    try:
        ticket = await run_handshake(handshake.sender_handshake(secret), reader, writer)
    except handshake.HandshakeFailed as error:
        writer.transport.abort()
        raise LinkError(NO_PEER_PORT if isinstance(error, handshake.UnknownAnswer) else OTHER_SECRET) from None
    except (EOFError, ConnectionError):
        writer.transport.abort()
        raise LinkError(CLOSED_AT_ONCE) from None
    except BaseException:
        writer.transport.abort()
        raise

    def open_page_channel() -> PageChannel:
        """Open a page channel of the same link."""
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(PAGES_PREAMBLE)
            if tls is not None:
                sock = tls.wrap_socket(sock, server_hostname=host)
            sock.sendall(ticket)
        except BaseException:
            sock.close()
            raise
        return PageChannel(sock)

    return AuthenticatedConnection(reader, writer, ticket, f"{host}:{port}"), open_page_channel


async def run_handshake(
    steps: handshake.HandshakeSteps, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bytes:
    """Run the steps of a handshake and return the ticket.

    Raises HandshakeFailed, also if the other side began the handshake and hung up; else EOFError, OSError.
    """
    answered = False
    try:
        step = next(steps)
        while True:
            if isinstance(step, bytes):
                if writer.is_closing():
                    raise EOFError("it closed the connection")
                writer.write(step)
                step = next(steps)
            else:
                step = steps.send(await reader.readexactly(step))
                answered = True
    except StopIteration as end:
        return bytes(end.value)
    except (EOFError, ConnectionError):
        if answered:
            raise handshake.HandshakeFailed from None
        raise


async def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes. Raises EOFError if the connection ends before."""
    data = b""
    while len(data) < count:
        chunk = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not chunk:
            raise EOFError("it closed the connection")
        data += chunk
    return data


async def _connect_socket(host: str, port: int) -> socket.socket:
    """Connect to the first address of the host that answers. Raises OSError."""
    loop = asyncio.get_running_loop()
    failure = OSError("the host has no address")
    for family, *_, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            failure = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise failure


def _remote_address(sock: socket.socket) -> str:
    """Return the address of the other side as ``host:port``."""
    host, port, *_ = sock.getpeername()
    return f"{host}:{port}"
