"""The definition of a dialect: a table of routes, how each reads its body and writes its answer, and the error form.

Everything here is pure: bytes in, neutral data out, and back. Ids and clocks are passed in, so that the same call gives
the same bytes. The server knows only the declarations in this file, ``route``, ``reply``, ``render_reply``,
``request_context``, ``facts`` and ``admin_requests``; it never sees an API's field name. A new API is a module that
builds one ``Dialect``, and a line in ``dialects/mounts.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from parley.dialects.bench import BenchApi
from parley.dialects.reply import Answer, HeaderList
from parley.dialects.route import Route
from parley.errors import ParleyError
from parley.metrics.model_metrics import ModelMetrics, ModelSnapshot
from parley.types import KeyLimitStates

MetricsWriter = Callable[[Sequence[ModelSnapshot]], str]  # writes the metric series of all models


@dataclass(frozen=True, slots=True)
class PromptMembers:
    """The members of a JSON body that determine which cached prefixes its request can use.

    ``conversations`` hold messages, ``prompts`` hold any other prompt, and ``preceding`` members come before either in
    the model's input, and so do those with ``media``, such as images in base64. ``scored`` members list texts that
    are each computed with the prompt, such as the documents of a query. ``salts`` separate equal prompts, in addition
    to ``model``. ``dropped_texts`` match JSON text in ``preceding`` members that never reaches the model.
    ``read_non_json`` reads the model and the prompt of a body that is not JSON, and returns "" for both if it cannot
    read the body.
    """

    conversations: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    preceding: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    scored: tuple[str, ...] = ()
    salts: tuple[str, ...] = ()
    dropped_texts: tuple[re.Pattern[bytes], ...] = ()
    read_non_json: Callable[[bytes], tuple[str, bytes]] | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: its routes, the form of its errors and headers, and its names for the server's metrics and models."""

    name: str
    title: str
    base_path: str  # its base URL in its clients' terms, relative to the server's root
    routes: Sequence[Route]
    render_error: Callable[[ParleyError], Answer]  # the field of the error is in the API's own words already
    prompt_members: PromptMembers = field(kw_only=True)  # where a coordinator finds prompts, for routing
    # Returns the API's own response headers, given the seconds that the request has taken so far.
    common_headers: Callable[[float], HeaderList] = field(default=lambda seconds: ())
    # Returns headers that report the limits of the client's key, given the time in seconds since the epoch.
    limit_headers: Callable[[KeyLimitStates, float], HeaderList] = field(default=lambda states, now: ())
    whole_answer_headers: HeaderList = ()  # of answers that are no streams
    body_limit: int | None = None  # in bytes, where it is below the server's
    retry_hints: bool = True  # errors may say when to retry
    chunk_per_event: bool = False  # each event of a stream is one HTTP chunk, for clients that rely on it
    other_bases: Sequence[str] = ()  # further paths that belong to this API with everything below them
    shared_metrics: MetricsWriter | None = None  # for the page that all APIs at the root share
    own_metrics: MetricsWriter | None = None  # the whole page, where this API has one of its own
    # Adds the buckets of both to the histograms of a model, given the length of its context in tokens.
    add_buckets: Callable[[ModelMetrics, int], None] | None = None
    any_model: str = ""  # regular expression of names that stand for any model, in requests of every API
    bench_apis: Mapping[str, BenchApi] = field(default_factory=dict, hash=False)  # for ``parley bench``, by option
    documented_errors: bool = False  # a coordinator's errors are the plain texts that MindIE documents
    no_memory_body: bytes = b""  # a coordinator's refusal when memory is exhausted; empty: the usual one
    framed_answers: bool = False  # an answer consists of messages, so a coordinator cannot answer in plain text
    default_tag: str = ""  # the end that a model's name may have or lack, in requests of every API
    name_prefixes: Sequence[str] = ()  # beginnings that it may have
    web_origins: str = ""  # pattern of origins whose pages may call this API, in addition to the server's options
    body_schemas: str = ""  # the name of its schemas of bodies in bodies.json; without one they are not known
    id_header: bytes = b""  # the name of the header that carries the request's unique id in all answers
    id_prefix: bytes = b""  # before the id in that header
