"""The inference port: matches the paths of all APIs, and has each request answered by this process, by one instance, by
all of them, or by a prefill and a decode instance.

Errors that a single server reports before it reads a body are reported here in the same words. Of a body, only the
parts needed for scheduling are read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parley.coordinator import refusals
from parley.coordinator.proxy.client_identity import ClientIdentity
from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.coordinator.proxy.downstream.client_keys import ClientKeys
from parley.coordinator.proxy.front_load import FrontLoad
from parley.coordinator.proxy.generation.generation_front import GenerationFront
from parley.coordinator.proxy.generation.record_keeper import RecordKeeper
from parley.coordinator.proxy.generation.request_stops import RequestStops, parsing_context
from parley.coordinator.proxy.generation.scheduling_facts import SchedulingFacts
from parley.coordinator.proxy.local_answers import LocalAnswers
from parley.coordinator.proxy.paths import ApiPath, PathTable
from parley.coordinator.proxy.upstream import forward, merge_answers
from parley.coordinator.proxy.upstream.connections import InstanceConnections
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.dialects.mounts import ApiMount
from parley.dialects.request_context import RequestContext
from parley.dialects.route import ModelListMerge, Route, RouteKind
from parley.errors import SERVER_ERROR, NotAllowed, NotFound, ParleyError
from parley.serving.records.connection_records import ConnectionStore
from parley.serving.server_options import ServerOptions
from parley.serving.socket_handshake import serve_websocket
from parley.serving.web_pages.page_files import send_page_file
from parley.tracing.request_trace import SpanExporter
from parley.types import Tenant
from parley.web.auth import ApiKeys, BrowserGuard
from parley.web.framing.request_head import REQUEST_NUMBER_KEY, raise_head_error
from parley.web.logs import log_access
from parley.web.port import CorsByPath
from parley.web.request_body import ClientGone

log = logging.getLogger("parley.cluster")

# Commands for all instances.
FOR_ALL_INSTANCES: frozenset[RouteKind] = frozenset({"adapter", "reset", "reset_media"})
# Answered here, for clients whose key an instance accepts.
GUARDED_KINDS: frozenset[RouteKind] = frozenset({"metrics", "load"})
PROBE_KINDS: frozenset[RouteKind] = frozenset({"live", "ready", "probe", "health", "metrics", "load"})
OPEN_PROBE_KINDS = PROBE_KINDS - GUARDED_KINDS
READY_SECONDS = 1.0  # seconds between two checks whether requests can be served
ACCEPT_ALL_CLIENTS, REFUSE_ALL_KEYS = ApiKeys(()), ApiKeys((), hashed_keys=())


class CountedReceive:
    """An ASGI ``receive`` that counts the bytes of a body. ``body_size``: those that have arrived."""

    def __init__(self, receive: Receive, load: FrontLoad):
        self.body_size = 0
        self._receive, self._load = receive, load

    async def __call__(self) -> Message:
        """Receive the next message, within the memory limit. Raises ParleyError."""
        message = await self._receive()
        if size := len(message.get("body", b"")):
            self.body_size += size
            self._load.add_body_bytes(size)
        return message


class InferenceFront:
    """The ASGI application of the inference port. Raises BadRecordFile.

    * ``metrics_page``: renders the metrics.
    * ``mounts``: the APIs that the port serves.
    * ``options``: the port's options.
    * ``memory_limit``: the most bytes of bodies held at a time.
    * ``strict``: report errors to all clients in the documented form.
    * ``span_exporter``: sends the spans of requests elsewhere; None: requests are not traced.
    * ``client_keys``: the clients' keys; None: instances check them.
    """

    apis = "coordinator"  # of its only port

    def __init__(
        self,
        scheduler: InstanceScheduler,
        connections: InstanceConnections,
        metrics_page: Callable[[Tenant], Awaitable[bytes]],
        mounts: Sequence[ApiMount],
        options: ServerOptions,
        memory_limit: int,
        strict: bool = False,
        span_exporter: SpanExporter | None = None,
        client_keys: ClientKeys | None = None,
    ):
        self.load = FrontLoad(scheduler, memory_limit)
        self._scheduler, self._connections = scheduler, connections
        self._options, self._strict = options, strict
        self._span_exporter = span_exporter
        table = scheduler.table
        self._identity = ClientIdentity(table, connections, client_keys)
        self._scheduling_facts = SchedulingFacts(scheduler, self._identity)
        self._record_keeper = RecordKeeper(
            table, self._identity, knows_keys=client_keys is not None, is_ending=lambda: self.load.stopping
        )
        self._stops = RequestStops(table, connections, self._identity)
        self._generation = GenerationFront(
            scheduler,
            connections,
            self.load,
            self._identity,
            self._scheduling_facts,
            self._record_keeper,
            self._stops,
            options,
            strict=strict,
            client_keys=client_keys,
        )
        self._paths = PathTable(mounts)
        self._connection_records = ConnectionStore()
        self._client_keys = client_keys
        self._local_answers = LocalAnswers(
            scheduler.table, metrics_page, client_keys, strict, lambda: self.load.open_requests - 1
        )
        accepted_keys = ACCEPT_ALL_CLIENTS if client_keys is None else client_keys.keys
        self._browser_guard = BrowserGuard(options.host, options.hosts, options.cors, accepted_keys)

    def use_options(self, options: ServerOptions, memory_limit: int) -> None:
        """Use other options of the port and another limit from now on."""
        self._options, self.load.memory_limit = options, memory_limit
        self._generation.use_options(options)

    def fail_open_requests(self) -> None:
        """End all open requests with an error."""
        self._generation.fail_open_requests()

    def web_origins(self, path: str) -> str:
        """Return a regular expression of the origins whose pages may call the API at a path, "" if none may."""
        return self._paths.error_dialect(path).web_origins

    @property
    def keys(self) -> ApiKeys:
        """The keys that this port itself accepts, without those that only instances know."""
        if self._client_keys is not None:
            return self._client_keys.keys
        return REFUSE_ALL_KEYS if self._record_keeper.only_instances_check_keys else ACCEPT_ALL_CLIENTS

    @property
    def route_table(self) -> Mapping[tuple[str, str], ApiPath]:
        """The paths without parameters, by method and path."""
        return self._paths.fixed_paths

    @property
    def record_faults(self) -> int:
        """How often the store of responses could not be used."""
        return self._record_keeper.record_faults

    async def resume_batches(self) -> None:
        """Resume the batches of coordinators that have ended, until this one ends."""
        while not self.load.is_ready:
            await asyncio.sleep(READY_SECONDS)
        await self._record_keeper.resume_batches(self)

    async def close(self) -> None:
        """Close the stores that outlive requests."""
        await self._record_keeper.close()
        if self._client_keys is not None:
            await self._client_keys.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Route an HTTP request, and send any error in the form of the path's API. Other ASGI scopes are ignored."""
        if scope["type"] != "http":
            return
        path: ApiPath | None = None
        try:
            path, scope["path_params"] = self._paths.match_path(
                scope["method"], scope["path"], self._scheduler.table.model_names
            )
            dialect, path_error = path.dialect, None
        except (NotFound, NotAllowed) as error:
            dialect, path_error = self._paths.error_dialect(scope["path"]), error
        receive_counted = CountedReceive(receive, self.load)
        client = DownstreamClient(scope, receive_counted, send, self._options, dialect)
        if self._span_exporter is not None:
            client.begin_trace(self._span_exporter)
        client.route_path = "" if path is None else path.route.path
        self.load.open_requests += 1
        try:
            if not await self._refuse_head(path, client):
                if path is None:
                    assert path_error is not None
                    raise path_error
                client.log_entry.is_probe = path.kind in PROBE_KINDS
                await self._route_request(path, client)
        except ClientGone:
            client.abort_connection()
        except forward.ClientRefused as refused:
            client.send_complete(*refused.answer)
        except ParleyError as error:
            await self._send_error(client, error)
        except asyncio.CancelledError:
            client.abort_connection()
            raise
        except Exception:
            log.exception("Request %s failed.", client.request_id)
            await self._send_error(client, ParleyError(SERVER_ERROR))
        finally:
            self.load.open_requests -= 1
            self.load.body_bytes -= receive_counted.body_size
            client.finish_trace()
            if self._client_keys is not None:
                self._client_keys.finish_request(client)
            if self._options.access_log:
                log_access(client)

    async def _refuse_head(self, path: ApiPath | None, client: DownstreamClient) -> bool:
        """Check the head of a request and its client's key. True if an answer that refuses it was sent.

        Raises ParleyError, ClientGone.
        """
        kind = None if path is None else path.kind
        raise_head_error(client.scope, is_probe=kind in OPEN_PROBE_KINDS)
        self._browser_guard.check_headers(client.headers, client.dialect.web_origins)
        if self._client_keys is not None:
            self._client_keys.authenticate_client(client, path)
        max_requests = self._scheduler.options.max_requests
        # A gRPC call has no such number: its own limit of streams applies.
        if self._strict and client.scope.get(REQUEST_NUMBER_KEY, 1) > max_requests:
            await self._refuse_and_close(client, 429, refusals.TEXTS.connection_limit.format(max_requests))
            return True
        return False

    # -- errors

    async def _send_error(self, client: DownstreamClient, error: ParleyError) -> None:
        client.log_entry.record_error(error)
        if client.status:
            client.abort_connection()
            return
        try:
            strict = self._strict or client.dialect.documented_errors
            if strict and isinstance(error, NotFound | NotAllowed):
                await self._refuse_and_close(client, 400, refusals.TEXTS.unknown_request)
                return
            answer = refusals.documented_answer(error, client.dialect, strict)
            if answer is not None:
                await client.send_answer(answer)
                return
            allowed = error.allowed if isinstance(error, NotAllowed) else ""
            await client.send_error(error, ((b"allow", allowed.encode()),) if allowed else ())
        except ClientGone:
            client.abort_connection()

    async def _refuse_and_close(self, client: DownstreamClient, status: int, text: str) -> None:
        """Refuse with the documented text and close the connection. Raises ClientGone."""
        await client.send_response(
            refusals.plain_body(text), status, refusals.PLAIN_TEXT_TYPE, ((b"connection", b"close"),)
        )

    # -- routing

    async def _route_request(self, path: ApiPath, client: DownstreamClient) -> None:
        """Answer a request. Raises ParleyError, ClientGone."""
        if (page := path.find_page(client.headers)) is not None:
            client.log_entry.is_probe = True
            await send_page_file(page, client)
            return
        body, kind, route = None, path.kind, path.route
        if kind is None or (kind == "stored" and not path.has_one_route):  # the path belongs to two APIs
            body = await client.read_body()
            route, client.dialect = await client.to_thread_if_large(
                len(body), partial(path.pick_route, body, client.headers)
            )
            kind = route.kind
        if kind == "generate":
            await self._generation.run_generation(path, client, body)
            return
        if self._client_keys is not None:
            self._client_keys.check_api(client)
        if kind in GUARDED_KINDS:
            await self._identity.check_with_instance(path, client)
        if await self._local_answers.answer_request(kind, path, client, is_ready=self.load.is_ready):
            return
        if kind == "socket":
            await self._identity.check_key(client)
            with self.load.set_aside():
                await serve_websocket(self._connection_records, path.route, client)
            return
        if kind == "stored" and self._record_keeper.serves(client):
            await self._record_keeper.answer_stored(route, client, self, body)
            return
        if kind == "tokenize" and self._strict and not await self.load.becomes_ready():
            raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)
        body = await client.read_body() if body is None else body
        if kind == "abort" or kind == "abort_list":
            stop = self._stops.stop_one if kind == "abort" else self._stops.stop_listed
            await client.while_connected(stop(path, client, body))
            return
        await self._forward_request(route, path, client, body)

    async def _forward_request(self, route: Route, path: ApiPath, client: DownstreamClient, body: bytes) -> None:
        """Have instances answer a request that does not generate. Raises ParleyError, ClientGone."""
        kind, usable = route.kind, await self._usable_instances()
        if kind == "embed" and self._client_keys is not None:
            await self._generation.embed_with_account(path, client, body)
            return
        if (inlined := await self._record_keeper.inline_records(path, client, body)) is not None:
            body = inlined.body
        forwarding = await self._choose_forwarding(route, path, client, usable, body)
        timeout = self._scheduler.options.tokenizer_timeout if kind == "tokenize" else None
        try:
            async with asyncio.timeout(timeout):
                await client.while_connected(forwarding)
        except TimeoutError:
            if client.status:
                raise ClientGone from None
            raise refusals.coordinator_error(408, refusals.TEXTS.tokenizer_timeout) from None

    async def _choose_forwarding(
        self, route: Route, path: ApiPath, client: DownstreamClient, instances: list[ClusterInstance], body: bytes
    ) -> Coroutine[Any, Any, None]:
        """Return the forwarding of a request: to one instance, to all, or to all with one answer made of theirs."""
        connections, method, kind = self._connections, client.scope["method"], route.kind
        if kind == "summed_info" and method != "HEAD":
            return forward.forward_and_merge(connections, client, instances, body, merge_answers.sum_pages)
        model_list = ModelListMerge() if kind == "models" else route.model_list
        if model_list is not None and method != "HEAD" and len({instance.models for instance in instances}) > 1:
            query = model_list.whole_query or None
            merge = partial(_unite_model_lists, model_list, parsing_context(client))
            return forward.forward_and_merge(connections, client, instances, body, merge, query)
        if kind == "activity" and method != "HEAD":
            return forward.forward_and_merge(connections, client, instances, body, merge_answers.merge_activity)
        if kind in FOR_ALL_INSTANCES or (kind == "endpoint" and method not in ("GET", "HEAD")):
            return forward.forward_to_all(connections, client, instances, body)
        candidates = await self._scheduling_facts.instances_to_ask(path, client, body)
        return forward.forward_to_one(connections, client, candidates, body)

    async def _usable_instances(self) -> list[ClusterInstance]:
        """Return the usable instances. Raises ParleyError if there is none."""
        usable = await self._scheduler.find_usable(bool)
        if not usable:
            raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)
        return usable


def _unite_model_lists(model_list: ModelListMerge, context: RequestContext, pages: Iterable[bytes]) -> bytes:
    whole_list = merge_answers.unite_lists(pages)
    return whole_list if model_list.read_page is None else model_list.read_page(whole_list, context)


def wrap_cors(front: InferenceFront, options: ServerOptions) -> ASGIApp:
    """Wrap the front in CORS handling."""
    return CorsByPath(front, options.cors, front.web_origins)
