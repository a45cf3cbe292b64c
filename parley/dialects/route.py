"""A path of an API, the kind of operation that the server performs there, and which requests belong to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from parley.dialects.batch_job import BatchJob
from parley.dialects.records import InlinedRequest, TenantRecords
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.errors import ParleyError
from parley.types import ALL_MODEL_TASKS, ModelTask

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


QuerySchemas = Mapping[str, Mapping[str, Any]]  # JSON schemas by the names of parameters


@dataclass(frozen=True, slots=True)
class ModelListMerge:
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
    # A model suits the route if it has one of these tasks; None: the tasks follow from the kind. The first model that
    # suits answers a request that names none.
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
    model_list: ModelListMerge | None = None  # of a route whose answer has an entry for each model, but for "models"
    reads_many: bool = False  # a route of kind "stored" that may read many records, and so runs in a thread
    query: QuerySchemas = field(default_factory=dict, hash=False)  # schemas of the query's parameters
    body_paths: tuple[str, ...] = ()  # other routes of its API whose bodies it reads as well
    content_types: tuple[str, ...] = ("application/json",)  # of answers without a ``Reply``
    render_error: Callable[[ParleyError], Answer] | None = None  # for errors in another form than those of its API

    @property
    def suitable_tasks(self) -> frozenset[ModelTask] | None:
        """A model with one of these tasks can answer the route's requests; None: any model can."""
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
