"""The inference port: matches the paths of all APIs, and has each request answered by this process, by one instance, by
all of them, or by a prefill and a decode instance.

Errors that a single server reports before it reads a body are reported here in the same words. Of a body, only the
parts needed for scheduling are read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parley.coordinator import refusals
from parley.coordinator.proxy import forward, merge_answers
from parley.coordinator.proxy.attempts import RequestRunner
from parley.coordinator.proxy.background_cycle import BackgroundCycle
from parley.coordinator.proxy.client import DownstreamClient
from parley.coordinator.proxy.client_keys import ClientKeys
from parley.coordinator.proxy.connections import InstanceConnections
from parley.coordinator.proxy.local_answers import LocalAnswers
from parley.coordinator.proxy.paths import ApiPath, PathTable
from parley.coordinator.proxy.record_keeper import RecordKeeper
from parley.coordinator.proxy.token_counts import AnswerMeter, reserve_tokens
from parley.coordinator.routing.admission import InstanceScheduler
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.policies import SchedulingRequest
from parley.dialects.dialect import Reply, RequestContext, RouteKind
from parley.dialects.mounts import BODY_FAULT, ApiMount
from parley.dialects.records import InlinedRequest
from parley.disagg.wire.prompt_hash import PromptHashes, hash_prompt
from parley.errors import SERVER_ERROR, NotAllowed, NotFound, ParleyError, Stopping
from parley.serving.options import ServerOptions
from parley.serving.pages.page_files import send_page_file
from parley.tracing.request_trace import SpanExporter
from parley.web.auth import ApiKeys, BrowserGuard, presented_key, tenant_id
from parley.web.framing.request_head import REQUEST_NUMBER_KEY, raise_head_error
from parley.web.logs import log_access
from parley.web.port import CorsByPath
from parley.web.request_body import ClientGone

log = logging.getLogger("parley.cluster")

SHUTDOWN_TEXT = "The server is shutting down. This answer could not be finished."
FOR_ALL_INSTANCES: frozenset[RouteKind] = frozenset({"adapter", "reset", "abort_list"})  # commands for all instances
# Answered here, for clients whose key an instance accepts.
GUARDED_KINDS: frozenset[RouteKind] = frozenset({"metrics", "load"})
PROBE_KINDS: frozenset[RouteKind] = frozenset({"live", "ready", "probe", "health", "metrics", "load"})


class InferenceFront:
    """The ASGI application of the inference port. Raises BadRecordFile.

    ``metrics_page`` renders the metrics; ``mounts``: the APIs that the port serves; ``options``: those of the
    port; ``memory_limit``: for the bodies held at a time, in bytes; ``strict``: report errors to all clients in the
    documented form; ``span_exporter`` sends the spans of requests elsewhere, None: they are not traced.
    ``client_keys``: the clients' keys; None: instances check them.
    """

    def __init__(
        self,
        scheduler: InstanceScheduler,
        connections: InstanceConnections,
        metrics_page: Callable[[], Awaitable[bytes]],
        mounts: Sequence[ApiMount],
        options: ServerOptions,
        memory_limit: int,
        strict: bool = False,
        span_exporter: SpanExporter | None = None,
        client_keys: ClientKeys | None = None,
    ):
        self.open_requests = 0
        self.stopping = False  # True: new requests are refused
        self.body_bytes = 0  # bytes of bodies in memory
        self._runners: set[RequestRunner] = set()
        self._client_ids: set[tuple[str, bytes]] = set()  # request ids chosen by clients, of open requests, by tenant
        self._scheduler, self._connections = scheduler, connections
        self._options, self._memory_limit, self._strict = options, memory_limit, strict
        self._span_exporter = span_exporter
        self._record_keeper = RecordKeeper(scheduler.options, scheduler.table, knows_keys=client_keys is not None)
        self._paths = PathTable(mounts)
        self._client_keys = client_keys
        self._local_answers = LocalAnswers(
            scheduler.table, metrics_page, client_keys, strict, lambda: self.open_requests - 1
        )
        accepted_keys = ApiKeys(()) if client_keys is None else client_keys.keys
        self._browser_guard = BrowserGuard(options.host, options.hosts, options.cors, accepted_keys)

    def use_options(self, options: ServerOptions, memory_limit: int) -> None:
        """Take other options of the port and another limit from now on."""
        self._options, self._memory_limit = options, memory_limit

    def fail_open_requests(self) -> None:
        """End all open requests with an error."""
        for runner in self._runners:
            runner.fail_request(Stopping(SHUTDOWN_TEXT, retry_after=5))

    def web_origins(self, path: str) -> str:
        """Return a regular expression of the origins whose pages may call the API at a path, "" if none may."""
        return self._paths.error_dialect(path).web_origins

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
        body_size = 0

        async def receive_counted() -> Message:
            """Receive the next message of the body, within the memory limit. Raises ParleyError."""
            nonlocal body_size
            message = await receive()
            if size := len(message.get("body", b"")):
                body_size += size
                self.body_bytes += size
                if self.body_bytes > self._memory_limit:
                    raise refusals.coordinator_error(429, refusals.TEXTS.memory_exceeded, 1.0)
            return message

        client = DownstreamClient(scope, receive_counted, send, self._options, dialect)
        if self._span_exporter is not None:
            client.begin_trace(self._span_exporter)
        client.route_path = "" if path is None else path.route.path
        self.open_requests += 1
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
            self.open_requests -= 1
            self.body_bytes -= body_size
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
        raise_head_error(client.scope, is_probe=kind in PROBE_KINDS - GUARDED_KINDS)
        self._browser_guard.check_headers(client.headers, client.dialect.web_origins)
        if self._client_keys is not None:
            self._client_keys.let_in(client, path)
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
                await client.send_response(answer.body, answer.status, answer.content_type)
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
        body, kind = None, path.kind
        if kind is None:  # the path belongs to two APIs
            body = await client.read_body()
            route, client.dialect = await client.run_work(len(body), partial(path.pick_route, body, client.headers))
            kind = route.kind
        if kind == "generate":
            await self._run_generation(path, client, body)
            return
        if self._client_keys is not None:
            self._client_keys.check_api(client)
        if kind in GUARDED_KINDS:
            await self._check_with_instance(path, client)
        if await self._local_answers.answer_request(kind, path, client, is_ready=self._is_ready):
            return
        if kind == "stored" and self._record_keeper.serves(client):
            await self._answer_stored(path, client)
            return
        if kind == "tokenize" and self._strict and not self._is_ready:
            raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)
        body = await client.read_body() if body is None else body
        usable = self._usable_instances()
        if kind == "embed" and self._client_keys is not None:
            await self._embed_with_account(path, client, body, usable)
            return
        if (inlined := await self._inline_records(path, client, body)) is not None:
            body = inlined.body
        work = await self._choose_forwarding(kind, path, client, usable, body)
        patience = self._scheduler.options.tokenizer_timeout if kind == "tokenize" else None
        try:
            async with asyncio.timeout(patience):
                await client.while_connected(work)
        except TimeoutError:
            if client.status:
                raise ClientGone from None
            raise refusals.coordinator_error(408, refusals.TEXTS.tokenizer_timeout) from None

    async def _check_with_instance(self, path: ApiPath, client: DownstreamClient) -> None:
        """Let an instance check a request that is answered here: its key, and what the path names. Without usable
        instances nothing is checked. Raises ClientRefused, ParleyError."""
        names_object = path.route.reader is not None  # an endpoint, which there may not be
        usable = self._scheduler.table.usable_instances()
        if usable and (names_object or self._client_keys is None):
            refusing = (*forward.KEY_REFUSALS, 404) if names_object else forward.KEY_REFUSALS
            await forward.check_client(self._connections, client, self._sorted_by_load(usable)[0], refusing)

    async def _choose_forwarding(
        self, kind: RouteKind, path: ApiPath, client: DownstreamClient, usable: list[ClusterInstance], body: bytes
    ) -> Coroutine[Any, Any, None]:
        """Return the forwarding of a request: to one instance, to all, or to all with one answer made of theirs."""
        connections, method = self._connections, client.scope["method"]
        if kind == "summed_info" and method != "HEAD":
            return forward.forward_and_merge(connections, client, usable, body, merge_answers.sum_pages)
        if kind == "models" and method != "HEAD" and len({each.models for each in usable}) > 1:
            return forward.forward_and_merge(connections, client, usable, body, merge_answers.unite_lists)
        if kind == "activity" and method != "HEAD":
            return forward.forward_and_merge(connections, client, usable, body, merge_answers.merge_activity)
        if kind == "abort":
            return forward.forward_to_able(connections, client, usable, body)
        if kind in FOR_ALL_INSTANCES or (kind == "endpoint" and method not in ("GET", "HEAD")):
            return forward.forward_to_all(connections, client, usable, body)
        holders = await self._instances_holding_model(path, client, body, usable)
        return forward.forward_to_one(connections, client, self._sorted_by_load(holders), body)

    async def _answer_stored(self, path: ApiPath, client: DownstreamClient) -> None:
        """Read or change the client's records. Raises ParleyError, ClientGone."""
        body = await client.read_body()
        await self._check_key(client)
        await self._record_keeper.answer_stored(path.route, client, self._tenant_of(client), body)

    async def _inline_records(self, path: ApiPath, client: DownstreamClient, body: bytes) -> InlinedRequest | None:
        """Return the request with the records that it refers to; None if bodies of this path refer to none.

        Raises ParleyError, ClientRefused, ClientGone.
        """
        if path.route.inliner is None or not self._record_keeper.serves(client):
            return None
        try:
            return await self._record_keeper.inline_records(path.route, client, self._tenant_of(client), body)
        except ParleyError:
            await self._check_key(client)
            raise

    async def _check_key(self, client: DownstreamClient) -> None:
        """Check the client's API key if only instances know it. Raises ClientRefused, ParleyError."""
        table = self._scheduler.table
        if table.checks_keys and self._client_keys is None:
            now = table.clock()
            instance = min(table, key=lambda each: (not each.is_usable(now), each.id))
            await forward.check_client(self._connections, client, instance)

    def _usable_instances(self) -> list[ClusterInstance]:
        """Return the usable instances. Raises ParleyError if there is none."""
        usable = self._scheduler.table.usable_instances()
        if not usable:
            raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)
        return usable

    async def _instances_holding_model(
        self, path: ApiPath, client: DownstreamClient, body: bytes, usable: list[ClusterInstance]
    ) -> list[ClusterInstance]:
        """Return the instances that have the requested model, or all if none has it."""
        model = client.path_params.get("model", "") or (await self._inspect_body(client, body)).model
        model = self._scheduler.table.served_name(model)
        return [each for each in usable if model in each.models] or usable

    def _sorted_by_load(self, usable: list[ClusterInstance]) -> list[ClusterInstance]:
        return sorted(usable, key=lambda each: (not each.native, each.tasks, each.id))

    @property
    def _is_ready(self) -> bool:
        return not self.stopping and self._scheduler.can_serve()

    # -- generation

    async def _run_generation(self, path: ApiPath, client: DownstreamClient, body: bytes | None) -> None:
        """Run a generating request. Raises ParleyError before anything was sent, and ClientGone."""
        content_length = client.headers.get(b"content-length", b"")
        announced = int(content_length) if content_length.isdigit() else 0
        # A body above its own limit gets 413 instead.
        memory_full = self.body_bytes + announced > self._memory_limit and announced <= self._options.body_limit
        too_many = self.open_requests > self._scheduler.options.max_requests
        # "Not ready" takes precedence over other errors. If it is the only one, the scheduler reports it.
        if (memory_full or too_many or self.stopping or self._strict) and not self._is_ready:
            raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)
        if memory_full or too_many:
            raise refusals.coordinator_error(
                429, refusals.TEXTS.too_many_requests if too_many else refusals.TEXTS.memory_exceeded, 1.0
            )
        if self._client_keys is not None:
            body = await self._admit_to_limits(path, client, body)
        elif body is None:
            body = await client.read_body()
        if self._strict and not path.dialect.framed_answers:
            text = await client.run_work(len(body), partial(BODY_FAULT, path.route.path, body))
            if text:
                raise refusals.coordinator_error(400, text)
        client_id = (self._tenant_of(client), client.client_request_id)
        if client_id in self._client_ids:
            raise refusals.coordinator_error(400, refusals.TEXTS.duplicate_id)
        inflated = len(body) if b"content-encoding" in client.headers else 0
        if self.body_bytes + inflated > self._memory_limit:
            raise refusals.coordinator_error(429, refusals.TEXTS.memory_exceeded, 1.0)
        self.body_bytes += inflated
        if client.client_request_id:
            self._client_ids.add(client_id)
        try:
            inlined = await self._inline_records(path, client, body)
            if inlined is None:
                await client.while_connected(self._run_attempts(path, client, body))
            elif inlined.background_name:
                await self._run_in_background(path, client, inlined)
            else:
                client.watcher = inlined
                await client.while_connected(self._run_attempts(path, client, inlined.body, inlined))
        except ParleyError:
            # To word the error.
            _, client.dialect = await client.run_work(len(body), partial(path.pick_route, body, client.headers))
            raise
        finally:
            self.body_bytes -= inflated
            self._client_ids.discard(client_id)

    async def _admit_to_limits(self, path: ApiPath, client: DownstreamClient, body: bytes | None) -> bytes:
        """Count a request for the limits of its client's key, and return its body. The body is read first only if it
        decides the API. Raises ParleyError, ClientGone."""
        assert self._client_keys is not None
        if path.has_one_route:
            self._client_keys.admit_request(client)
            return await client.read_body() if body is None else body
        if body is None:
            body = await client.read_body()
        _, client.dialect = await client.run_work(len(body), partial(path.pick_route, body, client.headers))
        self._client_keys.admit_request(client)
        return body

    async def _embed_with_account(
        self, path: ApiPath, client: DownstreamClient, body: bytes, usable: list[ClusterInstance]
    ) -> None:
        """Have one instance answer a request for vectors, which its client's key pays for. Raises ParleyError,
        ClientGone."""
        assert self._client_keys is not None
        self._client_keys.admit_request(client)
        left = False
        try:
            scheduling_request = await self._scheduling_request(path, client, body)
            if await self._reserve_tokens(path, client, body, scheduling_request):
                holders = await self._instances_holding_model(path, client, body, usable)
                work = forward.forward_to_one(self._connections, client, self._sorted_by_load(holders), body)
                await client.while_connected(work)
        except (ClientGone, asyncio.CancelledError):
            left = True
            raise
        finally:
            self._client_keys.settle_request(client, client.forwarded_use(), left=left)

    async def _reserve_tokens(
        self, path: ApiPath, client: DownstreamClient, body: bytes, scheduling_request: SchedulingRequest
    ) -> bool:
        """Reserve the tokens that a request may use, if its client's key has limits of tokens. False if an instance has
        refused the request, and the client has that answer. Raises ParleyError, ClientGone."""
        usable = self._scheduler.table.usable_instances()
        holders = self._sorted_by_load([each for each in usable if scheduling_request.model in each.models] or usable)
        rate = self._scheduler.options.string_token_rate
        if not all(each.native for each in usable):
            client.meter = AnswerMeter(scheduling_request.model, scheduling_request.length, rate)
        refusal = await reserve_tokens(self._connections, client, path, body, scheduling_request, holders)
        if refusal is not None:
            client.send_complete(*refusal)
        return refusal is None

    async def _run_attempts(
        self, path: ApiPath, client: DownstreamClient, body: bytes, inlined: InlinedRequest | None = None
    ) -> None:
        """Have instances answer the client. Raises ParleyError before anything was sent, and ClientGone."""
        scheduling_request = await self._scheduling_request(path, client, body)
        if client.account is not None and not await self._reserve_tokens(path, client, body, scheduling_request):
            return
        closing = partial(self._error_ending, path, client, body, inlined)
        runner = RequestRunner(self._scheduler, self._connections, client, body, scheduling_request, closing)
        self._runners.add(runner)
        left = False
        try:
            await runner.run_attempts()
        except asyncio.CancelledError:
            left = True
            raise
        finally:
            self._runners.discard(runner)
            if client.account is not None and self._client_keys is not None:
                self._client_keys.settle_request(client, runner.used_tokens, left=left)

    async def _run_in_background(self, path: ApiPath, client: DownstreamClient, inlined: InlinedRequest) -> None:
        """Run a request without its client. Raises ParleyError if it is refused, and ClientGone."""
        cycle, tenant, name = BackgroundCycle(inlined), self._tenant_of(client), inlined.background_name
        detached = cycle.detach_client(client)
        work = self._run_detached(path, detached, cycle, inlined)
        runs = self._record_keeper.runs
        runs.start(tenant, name, cycle.kept, work, is_stream=inlined.is_stream)
        try:
            await self._record_keeper.answer_accepted(client, inlined, cycle)
        except BaseException:
            if not cycle.response_started:  # the client has not seen its name
                runs.stop(tenant, name)
            raise

    async def _run_detached(
        self, path: ApiPath, detached: DownstreamClient, cycle: BackgroundCycle, inlined: InlinedRequest
    ) -> None:
        """Have instances answer a request that runs in the background. It counts as an open one."""
        self.open_requests += 1
        self.body_bytes += len(inlined.body)
        try:
            await self._run_attempts(path, detached, inlined.body, inlined)
        except ParleyError as error:
            cycle.end_with_error(error)
        finally:
            self.open_requests -= 1
            self.body_bytes -= len(inlined.body)
            cycle.close()
            if detached.account is not None:
                detached.account.cancel()

    async def _inspect_body(self, client: DownstreamClient, body: bytes, owner: str = "") -> PromptHashes:
        rate = self._scheduler.options.string_token_rate
        return await client.run_work(len(body), partial(hash_prompt, body, rate, owner))

    def _tenant_of(self, client: DownstreamClient) -> str:
        """Return the id of the client's tenant, as instances know it; "" if they have no API keys."""
        if self._client_keys is not None:
            return client.tenant.id
        if not self._scheduler.table.checks_keys:
            return ""
        return tenant_id(presented_key(client.headers), self._scheduler.options.secret)

    async def _scheduling_request(self, path: ApiPath, client: DownstreamClient, body: bytes) -> SchedulingRequest:
        options, table, tenant = self._scheduler.options, self._scheduler.table, self._tenant_of(client)
        prompt_info = await self._inspect_body(client, body, tenant if table.has_private_prefixes else "")
        model = client.path_params.get("model", "") or ("" if path.shares else prompt_info.model)
        model = client.log_entry.model = table.served_name(model)
        turns = prompt_info.conversation_hashes() if options.algorithm_type == "cache_affinity" else None
        return SchedulingRequest(
            prompt_info.token_count, prompt_info.marks, client.client_timeout(), model, turns, tenant=tenant
        )

    def _error_ending(
        self, path: ApiPath, client: DownstreamClient, body: bytes, inlined: InlinedRequest | None, error: ParleyError
    ) -> bytes:
        """Return the last bytes of a stream that ends with an error; none if the API has no form for it."""
        if inlined is not None and (last_events := inlined.fail_stream(error)) is not None:
            return last_events
        route, dialect = path.pick_route(body, client.headers)
        if self._strict or dialect.documented_errors:
            error.message = error.documented or error.message
            if not dialect.framed_answers:
                return error.message.encode()
        assert route.reader is not None
        context = RequestContext(client.request_uuid, 0, "", path_parts=client.path_params, headers=client.headers)
        try:
            reply = route.reader(body, context)
            return reply.fail_stream(error) if isinstance(reply, Reply) else b""
        except ParleyError:
            return b""


def wrap_cors(front: InferenceFront, options: ServerOptions) -> ASGIApp:
    """Wrap the front in CORS handling."""
    return CorsByPath(front, options.cors, front.web_origins)
