"""How an HTTP port behaves, as plain data: its limits, its time-outs, and its encryption."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from parley.web.connection_limit import Room


class Tls(NamedTuple):
    """How a port is encrypted, by files in PEM format.

    ``password``: a file with that of the key. With ``clients``, files of certificate authorities, a client must have a
    certificate of one of them that is on none of the lists in ``revoked``.
    """

    certificate: Path
    key: Path
    password: Path | None = None
    clients: tuple[Path, ...] = ()
    revoked: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Limits of an HTTP port, and the browsers that may use it. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    body_limit: int = 32 << 20
    header_limit: int = 64 << 10  # request line and all headers together
    header_count: int = 128
    header_timeout: float = 15.0  # from the first byte of a request to the end of its headers
    body_timeout: float = 60.0  # for the whole body
    write_timeout: float = 60.0  # for a client that does not read its answer
    connections: int | None = None  # of clients at a port; one more is closed without an answer
    room: Room | None = None  # that connections at all ports share; None: any number
    keep_alive: float = 75.0  # how long an idle connection is kept
    ping_interval: float | None = None  # comments in a silent event stream, for proxies that cut idle connections

    cors: tuple[str, ...] = ()  # origins that browsers may call from; "*" for all
    hosts: tuple[str, ...] = ()  # extra Host names; checked only when listening on a loopback address
