"""What the server is told at its start, as plain data. Knows neither flags nor files: the command line fills it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from parley.dialects.dialect import Dialect
from parley.server.room import Room
from parley.types import Settings

Role = Literal["none", "prefill", "decode", "flex", "mixed"]


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


class Listen(NamedTuple):
    """A port of its own for one API: the name of its prefix, an address, a port (0: any free one), its encryption."""

    api: str
    host: str
    port: int
    tls: Tls | None = None


class Offer(NamedTuple):
    """A model to be served: what clients may write as ``model``, the first being what answers carry, and how it runs.

    ``settings.model`` may be a name, which is looked up or fetched.
    """

    names: tuple[str, ...]
    settings: Settings


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Everything that ``server.run`` needs beside the models. Times in seconds, sizes in bytes.

    ``max_queue`` counts choices (prompts times n) that may wait for one model beyond the ``max_batch`` that run at
    once; a request that finds them all taken gets 429.
    """

    host: str = "127.0.0.1"
    port: int | None = 8000  # of all APIs. 0: any free port, printed at the start; None: only those of ``listen``
    listen: tuple[Listen, ...] = ()  # further ports, each for one API or for several that are given the same
    apis: Mapping[str, Dialect] = field(default_factory=dict)  # those of ``listen`` that are not as usual, by name
    grpc: tuple[Listen, ...] = ()  # ports for Triton's API over gRPC
    strict: bool = False  # the APIs that share the server's own port have their originals' limits and refusals
    tgi_compat: str = "3"  # the version of TGI on that port
    endpoints: str | None = None  # the file in which endpoints are kept; none: until the server ends
    api_keys: tuple[str, ...] = ()  # without keys every client is let in
    admin_keys: tuple[str, ...] = ()  # with which alone the server is changed; without any, with every key
    max_queue: int = 1024
    drain: float = 30.0  # how long running answers may go on after SIGTERM
    notes: tuple[str, ...] = ()  # to be said in the log at the start

    max_prompt: int | None = None  # tokens, where less than the model's context is allowed
    max_output: int | None = None  # tokens; longer answers are cut
    timeout: float | None = None  # for a request as a whole
    token_timeout: float | None = None  # between two outputs of a request, or before the first

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
    lora_root: str | None = None  # the folder below which clients may load adapters; none: they may not
    tokenizer_info: bool = False  # serve the tokenizer's configuration at /tokenizer_info
    engine: Literal["process", "thread", "scripted"] = "process"  # where the model runs; scripted: there is none

    # as an instance of a cluster
    role: Role = "mixed"
    peer_port: int | None = None  # where other instances hand requests over; 0: any free port; None: nowhere
    peer_lease: float = 30.0  # silence after which the other side of a hand-over is dead
    peer_checksum: bool = False  # compare pages that were handed over
    p_percentage: int = 50  # how much of a flex instance is for prefill
    cluster_secret: str = ""  # that all instances and coordinators of the cluster know
    peer_tls: Tls | None = None  # of what instances hand over, with certificates on both sides

    access_log: bool = True
    log_format: Literal["text", "json"] = "text"
