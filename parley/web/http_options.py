"""Options of an HTTP port as plain data: limits, timeouts and the origins of web pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from parley.web.connection_limit import MAX_GRPC_CONNECTIONS, ConnectionLimit
from parley.web.request_body import BodyBudget


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Limits of an HTTP port, and the browser origins that may use it. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    body_limit: int = 32 << 20
    header_limit: int = 64 << 10  # request line and all headers together
    header_count: int = 128
    # From the first byte of a request to the end of its headers; and for handshakes of TLS, gRPC.
    header_timeout: float = 15.0
    body_timeout: float = 60.0  # from the headers to the end of the body
    body_rate: int = 1024  # bytes per second that an unfinished body has to bring
    body_budget: BodyBudget = field(default_factory=BodyBudget, compare=False)  # shared by the ports of a process
    write_timeout: float = 60.0  # until a client that does not read its response is disconnected
    max_connections: int | None = None  # connections of clients; None: as many as file descriptors allow
    connection_limit: ConnectionLimit = field(default_factory=ConnectionLimit, compare=False)  # ports may share one
    grpc_connections: int = field(default=MAX_GRPC_CONNECTIONS, compare=False)  # connections of each gRPC port
    keep_alive: float = 75.0  # how long an idle connection is kept
    http2: bool = True  # False: HTTP/1.1 only
    ping_interval: float | None = None  # between comments in a silent event stream; proxies cut idle connections

    access_log: bool = True
    log_bodies: bool = False  # of requests and answers, in the access log

    cors: tuple[str, ...] = ()  # origins that browsers may call from; "*" for all
    hosts: tuple[str, ...] = ()  # extra Host names; checked only when listening on a loopback address
