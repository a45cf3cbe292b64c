"""A port: its socket, uvicorn with our framing on it, and what a process that listens does at its start.

Knows nothing of what is answered there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Iterator, Sequence
from ssl import SSLContext

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from parley.web.http_protocol import Protocol
from parley.web.options import HttpOptions

BACKLOG = 2048


def settle() -> None:
    """Spare requests the search for garbage in what is there by now, and stays; and most of it in what they make
    themselves, which goes without when they end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def keep_standard_streams() -> None:
    """Open what was closed of descriptors 0 to 2: a socket would take the number, and a client would get the log."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts from now on; ``::`` stands for IPv4 as well. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


def reason(error: OSError) -> str:
    """Why ``listen`` cannot, for people."""
    code = error.errno or 0
    return os.strerror(code) if code > 0 else "the address is not known"


def http(options: HttpOptions, app: ASGIApp, tls: SSLContext | None = None) -> uvicorn.Config:
    """How uvicorn is to serve the application."""
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=Protocol.bound(options),
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


class Server(uvicorn.Server):
    """uvicorn without its own idea of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def crossed(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application with CORS around it, if pages of any origin may call it."""
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["X-Request-Id"]
    )
