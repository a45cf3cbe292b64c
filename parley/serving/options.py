"""What the server is told at its start, as plain data. Knows neither flags nor files: the command line fills it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from parley.dialects.dialect import Dialect
from parley.types import Settings
from parley.web.options import HttpOptions, Tls

EngineKind = Literal["process", "thread", "scripted"]  # a scripted engine has no model
Role = Literal["none", "prefill", "decode", "flex", "mixed"]


class Listen(NamedTuple):
    """A port of its own for one API: the name of its prefix, an address, a port (0: any free one), its encryption."""

    api: str
    host: str
    port: int
    tls: Tls | None = None


class Offer(NamedTuple):
    """A model to serve: the names that clients may write as ``model``, how it runs, and the kind of its engine.

    Answers carry the first name. ``settings.model`` may be a name, which is looked up or fetched.
    """

    names: tuple[str, ...]
    settings: Settings
    engine: EngineKind = "process"


@dataclass(frozen=True, kw_only=True)
class ServerOptions(HttpOptions):
    """Everything that ``start.run`` needs besides the models. Times in seconds, sizes in bytes.

    ``max_queue`` counts choices (prompts times n) that may wait for one model beyond the ``max_batch`` that run at
    once; a request that finds them all taken gets 429.
    """

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

    lora_root: str | None = None  # the folder below which clients may load adapters; none: they may not
    tokenizer_info: bool = False  # serve the tokenizer's configuration at /tokenizer_info

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
