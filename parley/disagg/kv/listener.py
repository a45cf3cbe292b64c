"""Listener and connect: set up authenticated connections between peers (sockets, TLS, shared secret).

A connection begins with 16 bytes that state its purpose: a link, or a page channel of a link. Then comes TLS if it is
configured. A link continues with the handshake that proves the secret (``handshake``), a page channel with the ticket
that this handshake gave to both sides of the link. An unauthenticated connection gets no thread before one is needed,
no buffer beyond these few bytes, and little time, and learns nothing. The messages of a link are unknown here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from parley.disagg.kv import handshake
from parley.disagg.kv.tcp import Channel
from parley.disagg.kv.transport import LinkError

log = logging.getLogger("parley.kv")

GREET_S = 10.0  # time for both sides to authenticate each other
LINK, DATA = b"parley-kv 1 link", b"parley-kv 1 data"
STRANGERS = 64  # unauthenticated connections at a time; more are closed at once
BUFFER = 1 << 20


class Contact(NamedTuple):
    """A connection after the handshake. ``ticket``: secret shared by the two sides only."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ticket: bytes
    name: str  # address of the other side


class Gate:
    """Accepts connections. ``on_link`` must return within the rest of HANDSHAKE_TIMEOUT_S that authentication has
    left."""

    def __init__(
        self,
        secret: bytes,
        tls: ssl.SSLContext | None,
        link: Callable[[Contact], Awaitable[None]],
        pages: Callable[[bytes, Channel], bool],
    ):
        self.port = 0
        self._secret = secret
        self._tls = tls
        self._link = link
        self._pages = pages
        self._doors: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0
        self._threads = ThreadPoolExecutor(STRANGERS, "parley-kv-gate")

    async def listen(self, host: str, port: int) -> None:
        """Listen at all addresses of a host, or (empty) of this machine; port 0 takes any. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, *_, address in dict.fromkeys(found):
                door = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
                self._doors.append(door)
                door.setblocking(False)
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                door.bind((address[0], self.port or port, *address[2:]))
                door.listen(1024)
                self.port = door.getsockname()[1]
        except BaseException:
            self._shut()
            raise
        for door in self._doors:
            self._start(self._open(door))

    async def close(self) -> None:
        """Close sockets and threads, cancel all tasks; return when they have ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._shut()
        await asyncio.to_thread(self._threads.shutdown, True)

    def _shut(self) -> None:
        """Close the listening sockets."""
        for door in self._doors:
            door.close()
        self._doors = []

    def _start(self, action: Any) -> None:
        """Run a coroutine as a task that ``close_listener`` cancels."""
        task = asyncio.get_running_loop().create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, door: socket.socket) -> None:
        """Accept connections of one listening socket, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(door)
            except OSError as error:  # for example, too many open files
                log.warning("a connection for KV pages could not be accepted: %s", error)
                await asyncio.sleep(0.2)
                continue
            if self._strangers >= STRANGERS:
                sock.close()
                continue
            self._strangers += 1
            self._start(self._greet(sock))

    async def _greet(self, sock: socket.socket) -> None:
        """Identify a new connection and hand it to the link or page handler."""
        name = "unknown address"
        try:
            async with asyncio.timeout(GREET_S):
                try:
                    name = _name(sock)
                    sock.setblocking(False)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    first = await _exactly(sock, len(LINK))
                    if first not in (LINK, DATA):
                        raise LinkError("it uses another protocol")
                except BaseException:
                    sock.close()
                    raise
                if first == LINK:
                    await self._greet_link(sock, name)
                else:
                    await self._greet_pages(sock)
        except (LinkError, OSError, EOFError, handshake.Unproved) as error:
            log.info("a connection from %s was closed: %s", name, str(error) or type(error).__name__)
        finally:
            self._strangers -= 1

    async def _greet_link(self, sock: socket.socket, name: str) -> None:
        """Authenticate a link and pass it on."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(BUFFER)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            ticket = await _prove(handshake.taker(self._secret), reader, writer)
        except BaseException:
            writer.transport.abort()
            raise
        await self._link(Contact(reader, writer, ticket, name))

    async def _greet_pages(self, sock: socket.socket) -> None:
        """Read the ticket of a page channel and pass it on."""
        greeting = asyncio.get_running_loop().run_in_executor(self._threads, self._ticket, sock)
        try:
            channel, ticket = await asyncio.shield(greeting)
        except asyncio.CancelledError:
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            with suppress(OSError, EOFError):
                (await greeting)[0].close()
            raise
        if not self._pages(ticket, channel):
            channel.close()
            raise LinkError("its ticket belongs to no link")

    def _ticket(self, sock: socket.socket) -> tuple[Channel, bytes]:
        """Read the ticket of a page channel. Blocks, in a thread: page channels need blocking sockets, also with
        TLS."""
        try:
            sock.settimeout(GREET_S)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
            ticket = b""
            while len(ticket) < handshake.PROOF:
                data = sock.recv(handshake.PROOF - len(ticket))
                if not data:
                    raise EOFError("it sent no ticket")
                ticket += data
        except BaseException:
            sock.close()
            raise
        return Channel(sock), ticket


async def knock(
    host: str, port: int, secret: bytes, tls: ssl.SSLContext | None
) -> tuple[Contact, Callable[[], Channel]]:
    """Connect to a listener. Returns the authenticated connection, and a function that opens a page channel to it; that
    one blocks and raises OSError.

    Raises OSError (``ssl.SSLError`` too), and LinkError if the secrets differ.
    """
    loop = asyncio.get_running_loop()
    sock = await _connected(host, port)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        family, place = sock.family, sock.getpeername()
        await loop.sock_sendall(sock, LINK)
    except BaseException:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(
        sock=sock, limit=BUFFER, ssl=tls, server_hostname=host if tls is not None else None
    )
    try:
        ticket = await _prove(handshake.giver(secret), reader, writer)
    except (handshake.Unproved, EOFError, ConnectionError):
        writer.transport.abort()
        what = (
            "cluster secret" if tls is None else "cluster secret, or does not accept the certificate of this instance"
        )
        raise LinkError(f"does not have the same {what}") from None
    except BaseException:
        writer.transport.abort()
        raise

    def again() -> Channel:
        """Open a page channel of the same link."""
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(GREET_S)
            sock.connect(place)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(DATA)
            if tls is not None:
                sock = tls.wrap_socket(sock, server_hostname=host)
            sock.sendall(ticket)
        except BaseException:
            sock.close()
            raise
        return Channel(sock)

    return Contact(reader, writer, ticket, f"{host}:{port}"), again


async def _prove(steps: handshake.Steps, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Run the steps of a handshake and return the ticket. Raises HandshakeFailed, EOFError, OSError."""
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
    except StopIteration as end:
        return bytes(end.value)


async def _exactly(sock: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes. Raises EOFError if the connection ends before."""
    data = b""
    while len(data) < count:
        more = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not more:
            raise EOFError("it closed the connection")
        data += more
    return data


async def _connected(host: str, port: int) -> socket.socket:
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


def _name(sock: socket.socket) -> str:
    """Return the address of the other side as ``host:port``."""
    host, port, *_ = sock.getpeername()
    return f"{host}:{port}"
