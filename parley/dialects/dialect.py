"""The definition of a dialect: a table of routes, how each reads its body and writes its answer, and the error form.

Everything here is pure: bytes in, neutral data out, and back. Ids and clocks are passed in, so that the same call gives
the same bytes. The server knows only the declarations in this file, ``facts`` and ``admin_requests``; it never sees an
API's field name. A new API is a module that builds one ``Dialect``, and a line in ``dialects/mounts.py``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from parley.dialects.batch_job import BatchJob
from parley.dialects.bench import BenchApi
from parley.dialects.reasoning_seal import RANDOM_SEAL, ReasoningSeal
from parley.dialects.records import NO_RECORDS, InlinedRequest, TenantRecords
from parley.errors import ParleyError
from parley.metrics.model_metrics import ModelMetrics, ModelSnapshot
from parley.types import (
    ALL_ENGINE_FEATURES,
    ALL_MODEL_ABILITIES,
    ALL_MODEL_TASKS,
    NO_TENANT,
    EngineFeature,
    EngineOutput,
    Event,
    KeyLimitStates,
    MediaKind,
    ModelAbility,
    ModelTask,
    PoolingTask,
    Request,
    Tenant,
    TokenInfo,
    Usage,
)


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """The operator's choices for OpenAI's and vLLM's APIs, made by flags with vLLM's names.

    ``max_logprobs``: the largest number of alternatives per token; -1: no limit; None: as each API has it. Without a
    limit, or with one of at least the vocabulary's size, requests may ask for the whole vocabulary.
    ``force_include_usage``: every chunk of every stream has its usage. ``return_tokens_as_token_ids``:
    log-probabilities name tokens by their ids unless a request says otherwise. ``per_request_metrics``: answers with
    one choice say where their time went. ``enable_mm_embeds``: requests may have embeddings of media that the client
    computed. ``trust_request_mm_kwargs``: requests may set options for loading and processing media, which decide how
    much work they are.
    """

    max_logprobs: int | None = None
    force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    per_request_metrics: bool = False
    enable_mm_embeds: bool = False
    trust_request_mm_kwargs: bool = False


DEFAULT_API_OPTIONS = ApiOptions()


@dataclass(slots=True)  # only named_bytes ever changes; besides, a frozen one takes nine times as long to make
class RequestContext:
    """The facts that a dialect needs, besides the body, to read a request and write its answer."""

    # the answer
    unique_id: str  # without a prefix
    created: int  # seconds since the epoch
    fingerprint: str  # of the model
    _: KW_ONLY

    # the requested model; before it is loaded, its numbers are 0
    model_names: Collection[str] = ()
    adapters: Collection[str] = ()  # their names
    context_length: int = 0  # tokens
    vocabulary_size: int = 0  # tokens
    device: str = "cpu"  # its kind
    cached_tokens: int = 0  # tokens in the KV cache now
    cache_capacity: int = 0  # tokens that the KV cache can hold
    page_tokens: int = 0  # tokens in a page of the prefix cache; 0 without one
    waiting_sequences: int = 0
    generation_defaults: Mapping[str, float] = field(default_factory=dict)  # of generation_config.json, by its names
    generates: bool = True  # False: it computes numbers and no text
    pooling_tasks: frozenset[PoolingTask] = frozenset({"embed"})
    labels: Sequence[str] = ()  # names of its classes, for a classifier
    media_limits: Mapping[MediaKind, int] = field(default_factory=dict)  # items in a request, of kinds that it reads
    media_family: str = ""  # its model type, if it reads media
    abilities: frozenset[ModelAbility] = ALL_MODEL_ABILITIES  # by its chat template and tokenizer
    engine_features: frozenset[EngineFeature] = ALL_ENGINE_FEATURES

    # the server
    api_options: ApiOptions = DEFAULT_API_OPTIONS
    reasoning_seal: ReasoningSeal = RANDOM_SEAL  # of reasoning that clients send back
    records: TenantRecords = NO_RECORDS

    # the HTTP request
    path_parts: Mapping[str, str] = field(default_factory=dict)  # decoded, by the names in the route
    headers: Mapping[bytes, bytes] = field(default_factory=dict)  # by lower-case names
    query_string: bytes = b""
    tenant: str = ""  # its id
    client: Tenant = NO_TENANT  # set only for routes that manage endpoints
    named_bytes: int = 0  # of the stored files that the request has named so far, while it is read

    def seal_reasoning(self, data: bytes) -> str:
        """Return reasoning as a text that the tenant can send back."""
        return self.reasoning_seal.seal(self.tenant, data)

    def open_reasoning(self, text: str) -> bytes:
        """Return reasoning that was sealed for the tenant. Raises ValueError for any other text."""
        return self.reasoning_seal.open(self.tenant, text)


class RequestTimings(msgspec.Struct, frozen=True):
    """The seconds of each phase of an answered request: validation, the engine's queue, inference, in total.

    ``prefill``: the part of inference up to the first token. ``decode``: from the first token to the last. Both are
    None if there are no tokens, and ``prefill`` is None if another instance computed it.
    """

    total: float
    validation: float
    queue: float
    inference: float
    prefill: float | None = None
    decode: float | None = None


class Answer(NamedTuple):
    """A complete answer: HTTP status, body, content type (no header is sent if it is empty)."""

    status: int = 200
    body: bytes = b""
    content_type: bytes = b"application/json"


class Acknowledgement(Answer):
    """The answer to a generating request that asks for nothing to be generated, and is no refusal."""


QuerySchemas = Mapping[str, Mapping[str, Any]]  # JSON schemas by the names of parameters
HeaderList = Sequence[tuple[bytes, bytes]]
MetricsWriter = Callable[[Sequence[ModelSnapshot]], str]  # writes the metric series of all models


class Reply(ABC):
    """One request of one API and everything that is answered to it, as a stream or in one piece.

    The server reads ``request``, passes events as they arrive, and takes bytes. For a stream it calls ``render_chunk``
    for each batch of events (an empty result means that there is nothing to send yet), then ``finish_stream`` or
    ``fail_stream`` once. For an answer in one piece it calls ``add_events`` for each batch, then ``render_body``, then
    reads ``content_type``, ``content_coding`` (gzip or deflate; the server compresses) and ``answer_headers``.
    ``field_names`` maps the neutral fields that the server's errors mention ("prompt") to this API's own names.
    ``ping_bytes`` are sent into a silent stream, every ``ping_interval`` seconds if this API has a customary interval
    and the server has no other setting; if empty, nothing is sent. ``endpoint_name``: the endpoint that the request is
    for; ``served_model``: its model that the server chose, under the endpoint's name for it. ``timings`` are set before
    ``finish_stream`` and ``render_body``.

    ``background_name``: if not empty, the request runs in the background, as a stream, and keeps a record of this name
    itself; the client gets ``render_accepted``, or follows the stream if it asked for one.
    """

    content_type: bytes = b"application/json"
    content_coding: bytes = b""
    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    field_names: ClassVar[Mapping[str, str]] = {}
    ping_bytes: ClassVar[bytes] = b": ping\n\n"
    ping_interval: ClassVar[float | None] = None
    request: Request
    endpoint_name: str = ""
    served_model: str = ""
    background_name: str = ""
    timings: RequestTimings | None = None

    @abstractmethod
    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return the part of the stream that these events produce."""

    @abstractmethod
    def finish_stream(self, usage: Usage) -> bytes:
        """Return the last bytes of a stream after every choice has ended."""

    @abstractmethod
    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the last bytes of a stream that ends with an error. If it raises the error, the connection is cut."""

    def render_accepted(self) -> bytes:
        """Return the answer to a request that runs in the background."""
        raise AssertionError("it does not run in the background")

    def render_ping(self) -> bytes:
        """Return the bytes to send into a silent stream now."""
        return self.ping_bytes

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return the answer to an error before anything is sent, or None for the dialect's usual error answer."""
        return None

    @abstractmethod
    def add_events(self, events: Sequence[Event]) -> None:
        """Add these events to the answer in one piece."""

    @abstractmethod
    def render_body(self, usage: Usage) -> bytes:
        """Return the complete answer in one piece."""

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the headers of this answer. ``timings`` is None for a stream, whose headers are sent first."""
        return ()


class UnstreamedReply(Reply):
    """A reply that is never a stream. Its request must not ask for one."""

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Raise AssertionError: there is no stream."""
        raise AssertionError("no stream was asked for")

    def finish_stream(self, usage: Usage) -> bytes:
        """Raise AssertionError: there is no stream."""
        raise AssertionError("no stream was asked for")

    def fail_stream(self, error: ParleyError) -> bytes:
        """Raise AssertionError: there is no stream."""
        raise AssertionError("no stream was asked for")


class RenderedPrompt(NamedTuple):
    """A prompt as the engine would get it, and the largest number of tokens that it would generate.

    ``reasoning_ended``: as in ``TokensPrompt``. ``spans``: of the tokens' characters in the text that the model reads;
    None if they were not asked for, or the prompt has no text.
    """

    token_ids: list[int]
    max_tokens: int
    reasoning_ended: bool | None = None
    spans: list[tuple[int, int]] | None = None


class PromptRenderer(Reply):
    """A request whose prompts are answered as tokens, instead of being continued. ``wants_spans``: with the spans of
    their characters."""

    wants_spans: bool = False

    @abstractmethod
    def render_prompts(self, prompts: Sequence[RenderedPrompt]) -> bytes:
        """Return the answer."""


class AnswerRenderer(Reply):
    """A request whose answer the client has as tokens, and wants as this API writes it.

    ``outputs``: the whole output of each choice, in their order. ``prompt_tokens``: of all prompts.
    """

    outputs: Sequence[EngineOutput] = ()
    prompt_tokens: int = 0


class ChunkRenderer(Reply):
    """A request whose answer so far the client has as tokens, and whose newest chunk it wants as this API writes it.

    ``outputs``: of the only choice in the chunks so far, this one last; empty if this chunk has no choice.
    """

    outputs: Sequence[EngineOutput] = ()

    @abstractmethod
    def render_answer(self, frames: bytes, tokens: list[TokenInfo]) -> bytes:
        """Return the answer. ``frames``: the bytes of the chunk in a stream of this API; ``tokens``: those of all
        chunks, if the request asks for log-probabilities."""


RouteKind = Literal[
    "generate",  # reader(body, RequestContext) -> Reply, or an Answer where the body decides the form of its refusal
    "embed",  # the same, for requests that return only vectors
    # From prompts to tokens, or from tokens: reader(body, RequestContext) -> PromptRenderer | AnswerRenderer |
    # ChunkRenderer
    "render",
    "tokenize",  # reader(body, RequestContext) -> TokenizeRequest; writer(TokenizeResult) -> bytes
    "detokenize",  # reader(body) -> DetokenizeRequest; writer(str, …) -> bytes, with a text for each list of ids
    "models",  # writer(list[ModelCard]) -> bytes
    "model",  # the path contains {model}; writer(ModelCard) -> bytes
    "tokenizer",  # the tokenizer's configuration; writer(dict) -> bytes
    "version",  # writer(str) -> bytes
    "server_info",  # writer(ServerInfo) -> bytes
    "abort",  # abort an open request: reader(body, RequestContext) -> AbortRequest
    "abort_list",  # abort several, for any model: reader(body, RequestContext) -> AbortList
    "adapter",  # load or unload an adapter: reader(body, RequestContext) -> AdapterChange | Answer
    "load",  # the number of requests being served; writer(int) -> bytes
    "reset",  # clear the prefix cache: reader(RequestContext) -> bool (preempt running?); writer(done) -> bytes
    "reset_media",  # drop the processed media that are kept for later requests: an empty 200
    "health",  # an empty 200 while the engine serves, otherwise an error
    "live",  # 200 as long as the process answers at all; writer(bool) -> Answer gives it the API's own form
    "ready",  # 200 when requests are accepted, otherwise 503 with progress; writer(bool) -> Answer as above
    "stored",  # read or change stored records: reader(body, RequestContext) -> Answer | StreamReplay | BatchJob
    "socket",  # a WebSocket, whose messages are POST requests: reader(SocketOpening) -> SocketSession
    "info",  # information about the server: reader(body, RequestContext, ServerFacts) -> Answer
    "summed_info",  # the same, with numbers that are summed over several servers
    "endpoint",  # show or change endpoints: reader(body, RequestContext, ServerFacts, all) -> Answer | EndpointChange
    "probe",  # as above, but a probe: clients without an API key may call it
    "self_test",  # generate one token as a test: reader(RequestContext) -> timeout in s; writer(success) -> Answer
    "pause",  # pause or resume requests: reader(body, RequestContext, ServerFacts) -> PauseAnswer
    "pull",  # download a model: reader(body, RequestContext, ServerFacts) -> PullRequest | Answer
    "stop",  # shut the server down: reader(RequestContext) -> bool (at once?); writer(first call?) -> Answer
    "metrics",  # of the whole server; a reader as for "endpoint" raises if there is no page for this client
    "page",  # a file of the web page, by the path
    "activity",  # data of the status page
    "usage",  # usage of each API key
    # of an instance of a cluster
    "results",  # the results of requests that a coordinator handed over to the instance
    "results_flow",  # pause some of these results
    "role",  # take the role in the path
    "instance_status",  # role and resources
]


KIND_TASKS: dict[RouteKind, frozenset[ModelTask]] = {  # a model needs one of these; any model suits other kinds
    "generate": frozenset({"generate"}),
    "render": frozenset({"generate"}),
    "embed": ALL_MODEL_TASKS - {"generate", "transcribe"},
}


class _ModelMember(msgspec.Struct):
    model: str = ""


_MODEL_DECODER = msgspec.json.Decoder(_ModelMember)


def model_in_body(body: bytes) -> str:
    """Return the model named in the member ``model`` of a JSON body, or "". Nothing else in the body is read."""
    try:
        return _MODEL_DECODER.decode(body).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


@dataclass(frozen=True, slots=True)
class ModelList:
    """How a coordinator makes one list of its instances' lists of models. ``whole_query``: the query that asks for a
    whole list, where a query asks for pages; ``read_page`` then returns the page of the whole list that the client's
    query asks for."""

    whole_query: bytes = b""
    read_page: Callable[[bytes, RequestContext], bytes] | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """One path of an API and the operation that the server performs there.

    The reader gets the braced parts of the path in its RequestContext. A generating route with ``{model}`` in its path
    is for that model, which is resolved before the body is read; with ``{endpoint}`` and ``{served}``, for an endpoint
    and one of its models. Where several APIs share a path, claims decide which route a request belongs to.
    """

    method: str
    path: str
    kind: RouteKind
    reader: Callable[..., Any] | None = None
    writer: Callable[[Any], Any] | None = None
    model_reader: Callable[[bytes], str] | None = None  # returns the model's name in a body; None: the main model
    # Tasks of which a model needs one to suit the route; None: those of its kind. The first model that suits answers a
    # request that names none.
    tasks: frozenset[ModelTask] | None = None
    resolve_model_first: bool = False  # the model is resolved before the rest of the body is read
    names_endpoint: bool = False  # the name in the body or the path is an endpoint's
    claiming_members: tuple[str, ...] = ()  # a body with one of these members belongs to this route
    claiming_header: bytes = b""  # so does any request with this header
    claiming_media_type: bytes = b""  # so does any whose Accept header names this media type
    yields_unclaimed: bool = False  # this route gets no unclaimed body if another route of the path can take it
    for_encoders: bool = False  # precedes others if the main model is an encoder; else gets no request
    # Returns the answer to a tokenizing request whose headers are refused, else None; the readers of generating routes
    # see the headers themselves.
    refuse_headers: Callable[[Mapping[bytes, bytes]], Answer | None] | None = None
    reads_form: bool = False  # the body is multipart/form-data rather than JSON
    # Where bodies refer to records, returns the request with these records for a coordinator, which keeps them.
    inliner: Callable[[bytes, RequestContext], InlinedRequest] | None = None
    inliner_pattern: re.Pattern[bytes] | None = None  # ``inliner`` reads only matching bodies; None: all
    # Of a route that creates batches: returns one that has not ended, by its record's name and its ``result_expiry``.
    batch_restorer: Callable[[TenantRecords, str, int | None], BatchJob | None] | None = None
    model_list: ModelList | None = None  # of a route whose answer has an entry for each model, but for "models"
    reads_many: bool = False  # a route of kind "stored" that may read many records, and so runs in a thread
    query: QuerySchemas = field(default_factory=dict, hash=False)  # schemas of the query's parameters
    body_paths: tuple[str, ...] = ()  # other routes of its API whose bodies it reads as well
    content_types: tuple[str, ...] = ("application/json",)  # of answers without a ``Reply``
    render_error: Callable[[ParleyError], Answer] | None = None  # for errors in another form than those of its API

    @property
    def suitable_tasks(self) -> frozenset[ModelTask] | None:
        """The tasks of which a model needs one to answer the route's requests; None: any model can."""
        return KIND_TASKS.get(self.kind) if self.tasks is None else self.tasks

    def suits_model(self, model_tasks: Set[ModelTask]) -> bool:
        """Whether a model with these tasks can answer the route's requests."""
        tasks = self.suitable_tasks
        return tasks is None or not tasks.isdisjoint(model_tasks)

    @property
    def claims(self) -> bool:
        """Whether the route claims some requests for a path that several APIs share."""
        return bool(self.claiming_members or self.claiming_header or self.claiming_media_type)

    def refers_to_records(self, body: bytes) -> bool:
        """Whether a body may refer to records, or become one, so that ``inliner`` has to read it."""
        return self.inliner is not None and (self.inliner_pattern is None or bool(self.inliner_pattern.search(body)))

    def claims_request(self, member_names: Set[str], headers: Mapping[bytes, bytes]) -> bool:
        """Whether the route claims a request with these members in its body and these headers."""
        return (
            self.claiming_header in headers
            or not member_names.isdisjoint(self.claiming_members)
            or self.claims_accept(headers)
        )

    def claims_accept(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the route claims a request because of the media types in its header Accept."""
        media_types = (part.partition(b";")[0].strip().lower() for part in headers.get(b"accept", b"").split(b","))
        return bool(self.claiming_media_type) and self.claiming_media_type in media_types


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
