"""What a dialect is: a table of routes, how each reads its body and writes its answer, and how errors look.

Everything here is pure: bytes in, neutral data out, and back. Ids and clocks are handed in, so that the same call gives
the same bytes. The server knows only what this file, ``facts`` and ``wishes`` declare; it never sees an API's field
name. A new API is a module that builds one ``Dialect``, and a line in the server's table of surfaces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from parley.dialects.bench import Api
from parley.errors import ParleyError
from parley.metrics.recorded import View
from parley.types import Event, Request, Usage


@dataclass(frozen=True, slots=True)
class Head:
    """What a dialect is told beside the body.

    For the answer: a unique id without prefix, the time in whole seconds, the model's fingerprint. Of the model that
    the request is for: its ``context`` in tokens (0 before it is loaded), the kind of ``device`` it runs on, how many
    tokens its KV cache holds and could hold, how many sequences wait, and its makers' ``advice`` on sampling, under the
    names of generation_config.json. Of the request: the parts of its path that the route names, decoded, its headers,
    names in lower case, and what stands behind the path's ``?``.
    """

    id: str
    created: int
    fingerprint: str
    context: int = 0
    device: str = "cpu"
    path: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    query: bytes = b""
    cached: int = 0
    capacity: int = 0
    advice: Mapping[str, float] = field(default_factory=dict)
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the seconds of an answered request went: reading and checking, waiting for the engine, in the engine."""

    total: float
    validation: float
    queue: float
    inference: float


class Answer(NamedTuple):
    """An answer in one piece: HTTP status, body, content type (empty: none is sent)."""

    status: int = 200
    body: bytes = b""
    type: bytes = b"application/json"


Headers = Sequence[tuple[bytes, bytes]]
Series = Callable[[Sequence[View]], str]  # writes series of metrics, of each model in turn


class Reply(ABC):
    """One request of one API and everything that is answered to it, as a stream or in one piece.

    The server reads ``request``, feeds events as they come, and takes bytes. A stream is ``chunk`` for each batch of
    events (an empty result means that there is nothing to send yet), then ``end`` or ``fail`` once; in one piece it
    is ``add`` for each batch, then ``body``, then ``type``, ``coding`` and ``headers``; the server compresses what
    has a coding (gzip or deflate). ``names`` maps neutral fields, which errors of the server name ("prompt"), to this
    API's own. ``ping`` is sent into a silent stream, after ``silence`` seconds if this API has a custom of its own
    and the server was not told another; empty: nothing is. ``served``: which of an endpoint's models the server chose,
    as the endpoint calls it.
    """

    type: bytes = b"application/json"
    coding: bytes = b""
    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    names: ClassVar[Mapping[str, str]] = {}
    ping: ClassVar[bytes] = b": ping\n\n"
    silence: ClassVar[float | None] = None
    request: Request
    served: str = ""

    @abstractmethod
    def chunk(self, events: Sequence[Event]) -> bytes:
        """The part of the stream that these events make."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """The last bytes of a stream in which every choice has ended."""

    @abstractmethod
    def fail(self, error: ParleyError) -> bytes:
        """The last bytes of a stream that ends by an error; raised again, it cuts the connection."""

    def refusal(self, error: ParleyError) -> Answer | None:
        """The answer to an error as long as nothing was sent; None: the one that the dialect gives to all."""
        return None

    @abstractmethod
    def add(self, events: Sequence[Event]) -> None:
        """Take these events into the answer that is given in one piece."""

    @abstractmethod
    def body(self, usage: Usage) -> bytes:
        """The whole answer."""

    def headers(self, timings: Timings | None) -> Headers:
        """Headers of this answer; ``timings`` are None for a stream, whose headers leave first."""
        return ()


class Whole(Reply):
    """A reply that is never a stream; its request must not ask for one."""

    def chunk(self, events: Sequence[Event]) -> bytes:
        raise AssertionError("no stream was asked for")

    def end(self, usage: Usage) -> bytes:
        raise AssertionError("no stream was asked for")

    def fail(self, error: ParleyError) -> bytes:
        raise AssertionError("no stream was asked for")


Kind = Literal[
    "generate",  # read(body, Head) -> Reply, or the Answer if the body itself decides how its refusal looks
    "embed",  # the same, for vectors alone
    "tokenize",  # read(body) -> Tokenize; write(Tokenized) -> bytes
    "detokenize",  # read(body) -> Detokenize; write(str) -> bytes
    "models",  # write(list[Card]) -> bytes
    "model",  # the path holds {model}; write(Card) -> bytes
    "tokenizer",  # the tokenizer's configuration; write(dict) -> bytes
    "version",  # write(str) -> bytes
    "info",  # write(About) -> bytes
    "halt",  # end an open request: read(body, Head) -> Halt
    "adapter",  # load an adapter or unload one: read(body, Head) -> Adapt | Answer
    "load",  # requests being served; write(int) -> bytes
    "reset",  # forget cached prefixes: read(Head) -> bool (put back what runs); write(bool: was it done?) -> bytes
    "health",  # an empty 200 while the engine serves, else an error
    "live",  # 200 as long as the process answers at all; with write(bool) -> Answer in the API's own form
    "ready",  # 200 when requests are taken, else 503 with progress; with write(bool) -> Answer as above
    "ask",  # what the server says of itself: read(body, Head, Facts) -> Answer
    "count",  # the same, of numbers that add up over several servers
    "endpoint",  # look at endpoints or change one: read(body, Head, Facts, endpoints by name) -> Answer | Change
    "state",  # the same, for probes: clients without a key may ask
    "trial",  # have the model make one token: read(Head) -> seconds that it may take; write(bool: did it?) -> Answer
    "order",  # hold requests back, or take them again: read(body, Head, Facts) -> Told
    "stop",  # end the server: read(Head) -> bool (at once); write(bool: the first time?) -> Answer
    "metrics",
    # of an instance of a cluster
    "results",  # results of requests that a coordinator had it take over
    "results_flow",  # some of these are to wait
    "role",  # take the role that the path names
    "instance_status",  # role and resources
]


class _Named(msgspec.Struct):
    model: str = ""


_NAMED = msgspec.json.Decoder(_Named)


def named(body: bytes) -> str:
    """The model that a JSON body names in its member ``model``, looked at no deeper; empty if it names none."""
    try:
        return _NAMED.decode(body).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


@dataclass(frozen=True, slots=True)
class Route:
    """One path of an API and what the server does there.

    Parts of the path in braces reach ``read`` in its Head. A route that generates and names ``{model}`` is for that
    model: it is looked up before the body is read. ``model``: the name in a body, for routes whose bodies name their
    model; others are for the main one. ``first``: it is looked up before the rest of the body is read. ``shares``: the
    name, or ``{endpoint}`` in the path, is an endpoint's, and ``{served}`` one of its models. ``claims``: where several
    APIs share a path, a body with one of these members is for this route. ``yields``: a body that nobody claims is
    rather for another route.
    """

    method: str
    path: str
    kind: Kind
    read: Callable[..., Any] | None = None
    write: Callable[[Any], Any] | None = None
    model: Callable[[bytes], str] | None = None
    first: bool = False
    shares: bool = False
    claims: tuple[str, ...] = ()
    yields: bool = False


@dataclass(frozen=True, slots=True)
class PromptMembers:
    """The members of a JSON body that tell which cached prefixes its request can use.

    ``conversations``: those that hold the messages of a conversation. ``prompts``: those that hold any other prompt.
    ``before``: those that the model reads before either. ``salts``: those that keep equal prompts apart, besides
    ``model``. ``message`` reads the model and the prompt of a body that is no JSON.
    """

    conversations: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    salts: tuple[str, ...] = ()
    message: Callable[[bytes], tuple[str, bytes]] | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API. ``base`` is what a client of it calls its base URL, below the server's root.

    ``members``: where a coordinator finds the prompts of this API, by which it routes requests.
    ``error`` is the answer to an error; the server has already translated its field. ``headers`` are the API's
    own response headers, from the seconds that the request took so far. ``body_limit``: bytes of a body that this API
    takes at most, where that is less than the server does. ``hints``: may an error say when to come back? ``apart``: is
    each event of a stream a chunk of HTTP's, for clients that read it by these? ``beside``: other paths than the base
    below which everything is this API's. ``series``: the server's counts under this API's names, for the page of
    metrics that all APIs at the root share; ``page``: the whole page, where this API has one of its own. ``bench``: how
    ``parley bench`` asks this API for tokens, by the name of its option.

    Of a coordinator of a cluster: ``documented_errors``: this API's clients are told its errors as the plain texts that
    MindIE documents; ``no_memory``: its body for a request that finds no memory, empty for the usual one; ``framed``:
    an answer is messages, of which a plain text is no part.
    """

    name: str
    title: str
    base: str
    routes: Sequence[Route]
    error: Callable[[ParleyError], Answer]
    members: PromptMembers = field(kw_only=True)
    headers: Callable[[float], Headers] = field(default=lambda seconds: ())
    body_limit: int | None = None
    hints: bool = True
    apart: bool = False
    beside: Sequence[str] = ()
    series: Series | None = None
    page: Series | None = None
    bench: Mapping[str, Api] = field(default_factory=dict, hash=False)
    documented_errors: bool = False
    no_memory: bytes = b""
    framed: bool = False
    id_header: bytes = b""  # under which all answers have the request's unique id
