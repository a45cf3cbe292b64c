"""Passes a request to the main process over HTTP, and its answer to the client.

A connection to the main process is a socket pair, one end of which is sent there; so no other process can connect, and
no file or port remains. A header, which is never taken from a client, says who the client is.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from parley.errors import NotReady, Overloaded
from parley.web.exchange import Exchange
from parley.web.http_client import (
    ConnectionBroken,
    HttpClientConnection,
    InstanceHttpClient,
    InstanceUnreachable,
)

ORIGIN_HEADER = b"x-parley-origin"  # JSON: number of the port, the client's address or null, scheme, hosts
ORIGIN_KEY = "parley.origin"  # scope key in an API process: the request before a proxy's headers were applied
# Headers that belong to one connection, and those that the writer of an answer sets itself.
HOP_HEADERS = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect"))
OWN_HEADERS = frozenset((ORIGIN_HEADER, b"content-length", b"content-encoding", b"host"))
UNREAD_LIMIT = 1 << 20  # bytes of an answer that wait for the client before the main process has to wait


class MainHttpClient(InstanceHttpClient):
    """Connects to the main process. ``pass_socket``: where ends of connections are sent; ``connection_limit``: how many
    connections there may be."""

    def __init__(self, pass_socket: socket.socket, connection_limit: int):
        super().__init__("http://main")
        self._pass_socket, self._connection_limit = pass_socket, connection_limit
        self._open_connections: set[HttpClientConnection] = set()

    async def open_connection(self) -> HttpClientConnection:
        """Open a new connection. Raises InstanceUnreachable, Overloaded."""
        if len(self._open_connections) >= self._connection_limit:
            raise Overloaded("Too many requests to the server's main process are open.")
        try:
            own_end, other_end = socket.socketpair()
        except OSError as error:  # too many open files
            raise InstanceUnreachable(f"No connection could be made: {type(error).__name__}.") from None
        try:
            socket.send_fds(self._pass_socket, [b"\0"], [other_end.fileno()])
        except OSError as error:
            own_end.close()
            raise InstanceUnreachable(f"The main process takes no connection: {type(error).__name__}.") from None
        finally:
            other_end.close()
        own_end.setblocking(False)
        connection = HttpClientConnection(self)
        self._open_connections.add(connection)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=own_end)
        except BaseException:
            self.forget_connection(connection)  # uvloop does not say that it is lost
            raise
        return connection

    def forget_connection(self, connection: HttpClientConnection) -> None:
        """Remove a connection that has ended."""
        self._open_connections.discard(connection)
        super().forget_connection(connection)


class PassedAnswer:
    """An answer of the main process on its way to the client."""

    def __init__(self, connection: HttpClientConnection):
        self._connection = connection
        self._parts: asyncio.Queue[tuple[int, list[tuple[bytes, bytes]]] | bytes | ConnectionBroken | None] = (
            asyncio.Queue()
        )
        self._unread = 0

    def receive_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Keep status and headers."""
        self._parts.put_nowait((status, headers))

    def receive_data(self, data: bytes) -> None:
        """Keep a part of the body; the main process waits if there are too many."""
        self._count_unread(len(data))
        self._parts.put_nowait(data)

    def receive_end(self, error: ConnectionBroken | None) -> None:
        """Keep the end."""
        self._parts.put_nowait(error)

    def abandon(self) -> None:
        """End the connection, unless the answer has arrived already: its rest is not needed."""
        self._connection.abort_silently(self)

    def _count_unread(self, size: int) -> None:
        self._unread += size
        self._connection.set_reading_paused(self, self._unread > UNREAD_LIMIT)

    async def write_to(self, exchange: Exchange) -> None:
        """Write the answer to the client. Raises ConnectionBroken."""
        while True:
            part = await self._parts.get()
            if isinstance(part, tuple):
                status, headers = part
                exchange.release_body()  # the main process has read it
                kept_headers = [(name, value) for name, value in headers if name not in HOP_HEADERS and name != b"date"]
                await exchange.pass_head(status, kept_headers)
            elif isinstance(part, bytes):
                await exchange.pass_part(part)
                self._count_unread(-len(part))
            elif part is not None:
                raise part
            else:
                await exchange.pass_part(b"", last=True)
                return


async def pass_request(client: MainHttpClient, port_number: int, exchange: Exchange, body: bytes) -> None:
    """Let the main process answer a request with this body. ``port_number``: the number of the port that it came
    to. Raises NotReady if the main process does not answer, Overloaded, ClientGone."""
    scope = exchange.scope
    method = scope["method"].encode()
    path, query, address, scheme = scope[ORIGIN_KEY]
    target = path + (b"?" + query if query else b"")
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    headers = [header for header in scope["headers"] if header[0] not in HOP_HEADERS and header[0] not in OWN_HEADERS]
    origin = [port_number, address, scheme, [host.decode("latin-1") for host in hosts]]
    headers.append((ORIGIN_HEADER, json.dumps(origin).encode()))
    try:
        connection = client.take_idle() or await client.open_connection()
        exchange.is_passed = True
        answer = PassedAnswer(connection)
        connection.send_request(
            client.format_request(method, target, headers, [body] if body else []), answer, bodiless=method == b"HEAD"
        )
        del body  # it may be large, and the answer long
        try:
            await exchange.while_connected(answer.write_to(exchange))
        except BaseException:
            answer.abandon()
            raise
    except (InstanceUnreachable, ConnectionBroken):
        if exchange.response_begun:
            exchange.abort_connection()
            return
        exchange.is_passed = False
        raise NotReady("The server's main process does not answer.", retry_after=2) from None


class ScopeKeeper:
    """Middleware that stores the original ASGI scope of each request to ``app``, in case the request is passed on."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            scope[ORIGIN_KEY] = scope["raw_path"], scope["query_string"], scope.get("client"), scope["scheme"]
        await self._app(scope, receive, send)


class PassedApp:
    """In the main process: answers requests that API processes pass, as if their clients were connected here. ``apps``:
    those of the ports, by number."""

    def __init__(self, apps: Mapping[int, ASGIApp]):
        self._apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        headers = scope["headers"]
        port_number, address, scope["scheme"], hosts = json.loads(dict(headers)[ORIGIN_HEADER])
        scope["client"] = None if address is None else tuple(address)
        scope["headers"] = [(name, value) for name, value in headers if name not in (ORIGIN_HEADER, b"host")]
        scope["headers"] += [(b"host", host.encode("latin-1")) for host in hosts]
        await self._apps[port_number](scope, receive, send)


def accept_passed(pass_socket: socket.socket) -> socket.socket | None:
    """Return the end of a connection that an API process has sent; None at the end of file. Raises BlockingIOError if
    there is none.

    An end that was lost because this process has too many open files is skipped; the other end sees it closed.
    """
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(pass_socket, 1, 1)
        except BlockingIOError:
            raise
        except OSError:
            return None
        if not data:
            return None
        if descriptors:
            connection = socket.socket(fileno=descriptors[0])
            connection.setblocking(False)
            return connection
