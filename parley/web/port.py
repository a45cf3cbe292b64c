"""An HTTP port: its socket, uvicorn with our protocol class, and the start-up of a process that listens.

This module does not depend on the application that is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from ssl import SSLContext
from typing import Any, Protocol, runtime_checkable

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from parley.settings.option_kinds import UNIX_PREFIX
from parley.web.connection_limit import ConnectionLimit
from parley.web.framing import HAS_HTTP2
from parley.web.http_options import HttpOptions
from parley.web.http_protocol import LimitedHttpProtocol
from parley.web.listener import ConnectionListener
from parley.web.shared_listener import ConnectionCounts, SharedListener
from parley.web.unix_listener import UnixListener, open_unix_listener

LISTEN_BACKLOG = 2048


def freeze_objects() -> None:
    """Keep garbage collection out of requests.

    Objects that exist now stay, so they are excluded from further collections. The thresholds are raised, because most
    objects of a request are freed by their reference counts when it ends.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket; ``::`` accepts IPv4 as well. ``host``: or ``unix:`` and a path. Raises OSError."""
    if host.startswith(UNIX_PREFIX):
        return open_unix_listener(host[len(UNIX_PREFIX) :], LISTEN_BACKLOG)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    dual_stack = host == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=dual_stack)
    # Connections inherit it. asyncio's own loop does not set it for them, and a token would wait 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def port_number(listener: socket.socket) -> int:
    """Return the port of a listening socket; 0 for a Unix socket."""
    return 0 if listener.family == socket.AF_UNIX else int(listener.getsockname()[1])


def remove_unix_socket(listener: socket.socket) -> None:
    """Remove the file of a Unix socket that was listened on; nothing for other sockets."""
    if isinstance(listener, UnixListener):
        listener.remove_file()


def describe_address(host: str, port: int) -> str:
    """Return the address of a listener in words."""
    return host if host.startswith(UNIX_PREFIX) else f"{host} port {port}"


def explain_listen_error(host: str, port: int, error: OSError) -> str:
    """Return an error of ``open_listener`` in words, and what to do about a place that is taken."""
    advice = " Choose another, or end the program that listens there." if error.errno == errno.EADDRINUSE else ""
    return f"cannot listen on {describe_address(host, port)}: {listen_error_reason(error)}.{advice}"


def listen_error_reason(error: OSError) -> str:
    """Return the reason of an error of ``open_listener`` in words."""
    code = error.errno or 0
    return os.strerror(code) if code > 0 else "the address is not known"


def uvicorn_config(options: HttpOptions, app: ASGIApp, tls: SSLContext | None = None) -> uvicorn.Config:
    """Return the uvicorn configuration for an application and port."""
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=LimitedHttpProtocol.bind_options(options),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(options.keep_alive),
        timeout_graceful_shutdown=2,
        ssl_context_factory=None if tls is None else lambda config, usual: tls,
    )


@runtime_checkable
class AnnouncingConnection(Protocol):
    """A connection that can tell its client of the server's end."""

    def announce_shutdown(self) -> None:
        """Tell the client that the server will stop soon."""


class HttpServer(uvicorn.Server):
    """A uvicorn server without signal handling, for sockets that listen already.

    ``counts``: the connections of the processes that share these sockets; None: no others do.
    """

    servers: list[ConnectionListener]  # type: ignore[assignment]

    def __init__(self, config: uvicorn.Config, counts: ConnectionCounts | None = None):
        super().__init__(config)
        self._counts = counts
        self.servers = []
        self._sockets: list[socket.socket] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, except for the limits on TLS handshakes and the number accepted at once."""
        self._sockets = list(sockets or ())
        protocol_class: Any = self.config.http
        limit: ConnectionLimit = protocol_class.options.connection_limit
        for sock in self._sockets:
            if self._counts is not None:
                self.servers.append(SharedListener(sock, self.config.ssl, self._create_protocol, limit, self._counts))
            else:
                if self.config.ssl is not None and HAS_HTTP2:
                    import parley.web.framing.http2_protocol  # noqa: F401  # now, and not while the first client waits
                self.servers.append(ConnectionListener(sock, self.config.ssl, self._create_protocol, limit))
        self.started = True

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections on duplicates of these sockets, until ``stop_listening``; they stay open themselves."""
        await self.startup([sock.dup() for sock in sockets])

    def stop_listening(self) -> None:
        """Leave new connections to other processes that accept on the same sockets, whose duplicates are closed."""
        for server in self.servers:
            server.close()
        for sock in self._sockets:
            sock.close()
        self.servers, self._sockets = [], []

    async def serve_connection(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere."""
        await asyncio.get_running_loop().connect_accepted_socket(self._create_protocol, connection)

    def _create_protocol(self) -> LimitedHttpProtocol:
        protocol_class: Any = self.config.http
        protocol: LimitedHttpProtocol = protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: the process handles them itself."""
        yield

    def announce_shutdown(self) -> None:
        """Ask clients of HTTP/2 to send further requests elsewhere: the server will stop soon."""
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, AnnouncingConnection):
                connection.announce_shutdown()

    def use_options(self, options: HttpOptions) -> None:
        """Use other options from now on, but keep the limit of connections."""
        protocol: Any = self.config.http
        protocol.options = replace(options, connection_limit=protocol.options.connection_limit)


class CorsByPath:
    """Adds CORS headers to an application's answers, so that pages of some other origins may read them: of ``origins``,
    and of origins that match the regular expression that ``web_origins`` returns for the path ("": none).
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], web_origins: Callable[[str], str]):
        self._app, self._origins, self._web_origins = app, origins, web_origins
        self._by_pattern = {"": self._with_origins(None) if origins else app}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer a request, with CORS headers if the page that sends it may read the answer."""
        pattern = ""
        if scope["type"] == "http" and b"origin" in dict(scope["headers"]):
            pattern = self._web_origins(scope["path"])
        if pattern not in self._by_pattern:
            self._by_pattern[pattern] = self._with_origins(pattern)
        return self._by_pattern[pattern](scope, receive, send)

    def _with_origins(self, pattern: str | None) -> ASGIApp:
        return CORSMiddleware(
            self._app,
            allow_origins=self._origins,
            allow_origin_regex=pattern,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
