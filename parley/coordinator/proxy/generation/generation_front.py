"""Requests that generate: their limits, their attempts on instances, and those that run without their client."""

from __future__ import annotations

import asyncio
from functools import partial

from parley.coordinator import refusals
from parley.coordinator.proxy.client_identity import ClientIdentity
from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.coordinator.proxy.downstream.client_keys import ClientKeys
from parley.coordinator.proxy.front_load import FrontLoad
from parley.coordinator.proxy.generation.attempts import RequestRunner
from parley.coordinator.proxy.generation.background_cycle import BackgroundCycle
from parley.coordinator.proxy.generation.record_keeper import RecordKeeper
from parley.coordinator.proxy.generation.request_stops import RequestStops, parsing_context
from parley.coordinator.proxy.generation.scheduling_facts import SchedulingFacts
from parley.coordinator.proxy.generation.token_counts import AnswerMeter, reserve_tokens
from parley.coordinator.proxy.paths import ApiPath
from parley.coordinator.proxy.upstream import forward
from parley.coordinator.proxy.upstream.connections import InstanceConnections
from parley.coordinator.routing.instance import ClusterInstance, least_loaded
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.coordinator.routing.policies import SchedulingRequest
from parley.dialects.mounts import BODY_FAULT
from parley.dialects.records import InlinedRequest
from parley.dialects.reply import Reply
from parley.errors import ParleyError, ServerStopping
from parley.serving.server_options import ServerOptions
from parley.web.request_body import ClientGone

SHUTDOWN_TEXT = "The server is shutting down. This answer could not be finished."


class GenerationFront:
    """Has instances answer requests that generate, and those for vectors that a client's key pays for.

    * ``stops``: lists the open requests.
    * ``options``: the port's options.
    * ``strict``: report errors to all clients in the documented form.
    * ``client_keys``: the clients' keys; None: instances check them.
    """

    def __init__(
        self,
        scheduler: InstanceScheduler,
        connections: InstanceConnections,
        load: FrontLoad,
        identity: ClientIdentity,
        scheduling_facts: SchedulingFacts,
        record_keeper: RecordKeeper,
        stops: RequestStops,
        options: ServerOptions,
        *,
        strict: bool,
        client_keys: ClientKeys | None,
    ):
        self._scheduler, self._connections, self._load = scheduler, connections, load
        self._identity, self._scheduling_facts, self._record_keeper = identity, scheduling_facts, record_keeper
        self._options, self._strict, self._client_keys = options, strict, client_keys
        self._stops = stops
        self._client_ids: set[tuple[str, bytes]] = set()  # request ids chosen by clients, of open requests, by tenant

    def use_options(self, options: ServerOptions) -> None:
        """Use other options of the port from now on."""
        self._options = options

    def fail_open_requests(self) -> None:
        """End all open requests with an error."""
        for runner in self._stops:
            runner.fail_request(ServerStopping(SHUTDOWN_TEXT, retry_after=5))

    async def run_generation(self, path: ApiPath, client: DownstreamClient, body: bytes | None) -> None:
        """Run a generating request. Raises ParleyError before anything was sent, and ClientGone."""
        content_length = client.headers.get(b"content-length", b"")
        announced = int(content_length) if content_length.isdigit() else 0
        await self._load.check_room(announced, self._options.body_limit, always_ask_ready=self._strict)
        if self._client_keys is not None:
            body = await self._admit_to_limits(path, client, body)
        elif body is None:
            body = await client.read_body()
        if self._strict and not path.dialect.framed_answers:
            text = await client.to_thread_if_large(len(body), partial(BODY_FAULT, path.route.path, body))
            if text:
                raise refusals.coordinator_error(400, text)
        request_id = client.client_request_id
        client_id = (self._identity.tenant_of(client), request_id) if request_id else None
        if client_id in self._client_ids:
            raise refusals.coordinator_error(400, refusals.TEXTS.duplicate_id)
        inflated = len(body) if b"content-encoding" in client.headers else 0
        self._load.check_memory(inflated)
        self._load.body_bytes += inflated
        if client_id is not None:
            self._client_ids.add(client_id)
        try:
            inlined = await self._record_keeper.inline_records(path, client, body)
            if inlined is None:
                await client.while_connected(self._run_attempts(path, client, body))
            elif inlined.background_name:
                await self._run_in_background(path, client, inlined)
            else:
                client.watcher = inlined
                await client.while_connected(self._run_attempts(path, client, inlined.body, inlined))
        except ParleyError:
            # To word the error.
            _, client.dialect = await client.to_thread_if_large(
                len(body), partial(path.pick_route, body, client.headers)
            )
            raise
        finally:
            self._load.body_bytes -= inflated
            if client_id is not None:
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
        _, client.dialect = await client.to_thread_if_large(len(body), partial(path.pick_route, body, client.headers))
        self._client_keys.admit_request(client)
        return body

    async def embed_with_account(self, path: ApiPath, client: DownstreamClient, body: bytes) -> None:
        """Have one instance answer a request for vectors, and charge the client's key. Raises ParleyError,
        ClientGone."""
        assert self._client_keys is not None
        self._client_keys.admit_request(client)
        client_left = False
        try:
            scheduling_request, _ = await self._scheduling_facts.scheduling_request(path, client, body)
            if await self._reserve_tokens(path, client, body, scheduling_request):
                candidates = await self._scheduling_facts.instances_to_ask(path, client, body)
                work = forward.forward_to_one(self._connections, client, candidates, body)
                await client.while_connected(work)
        except (ClientGone, asyncio.CancelledError):
            client_left = True
            raise
        finally:
            self._client_keys.settle_request(client, client.forwarded_use(), client_left=client_left)

    async def _reserve_tokens(
        self, path: ApiPath, client: DownstreamClient, body: bytes, scheduling_request: SchedulingRequest
    ) -> bool:
        """Reserve the tokens that a request may use, if its client's key has limits of tokens. False if an instance has
        refused the request, and the client has that answer. Raises ParleyError, ClientGone."""
        rate = self._scheduler.options.string_token_rate
        if not all(instance.native for instance in self._scheduler.table.usable_instances()):
            client.meter = AnswerMeter(scheduling_request.model, scheduling_request.prompt_tokens, rate)
        requirement = scheduling_request.requirement
        holders = await self._scheduling_facts.holders_to_ask(scheduling_request.model, requirement)
        refusal = await reserve_tokens(self._connections, client, path, body, scheduling_request, holders)
        if refusal is not None:
            client.send_complete(*refusal)
        return refusal is None

    async def _run_attempts(
        self, path: ApiPath, client: DownstreamClient, body: bytes, inlined: InlinedRequest | None = None
    ) -> None:
        """Have instances answer the client. Raises ParleyError before anything was sent, and ClientGone."""
        scheduling_request, requested = await self._scheduling_facts.scheduling_request(path, client, body)
        if holders := self._scheduling_facts.unsuited_model_holders(requested):
            await self._forward_unsuited_request(path, client, body, scheduling_request, holders)
            return
        if client.account is not None and not await self._reserve_tokens(path, client, body, scheduling_request):
            return
        render_error_end = partial(self._render_error_end, path, client, body, inlined)
        runner = RequestRunner(self._scheduler, self._connections, client, body, scheduling_request, render_error_end)
        self._stops.add_run(runner, scheduling_request.tenant, scheduling_request.model, path, body)
        client_left = False
        try:
            await runner.run_attempts()
        except asyncio.CancelledError:
            client_left = True
            raise
        finally:
            self._stops.remove_run(runner)
            if client.account is not None and self._client_keys is not None:
                self._client_keys.settle_request(client, runner.used_tokens, client_left=client_left)

    async def _forward_unsuited_request(
        self,
        path: ApiPath,
        client: DownstreamClient,
        body: bytes,
        scheduling_request: SchedulingRequest,
        holders: list[ClusterInstance],
    ) -> None:
        """Have one instance refuse a request that its model cannot do; or answer it with vectors, which the client's
        key pays for, where the main model decides the API. Raises ParleyError, ClientGone."""
        is_charged, client_left = client.account is not None and path.depends_on_main_model, False
        try:
            if not is_charged or await self._reserve_tokens(path, client, body, scheduling_request):
                await forward.forward_to_one(self._connections, client, least_loaded(holders), body)
        except (ClientGone, asyncio.CancelledError):
            client_left = True
            raise
        finally:
            if is_charged and self._client_keys is not None:
                self._client_keys.settle_request(client, client.forwarded_use(), client_left=client_left)

    async def _run_in_background(self, path: ApiPath, client: DownstreamClient, inlined: InlinedRequest) -> None:
        """Run a request without its client. Raises ParleyError if it is refused, and ClientGone."""
        cycle, tenant, name = BackgroundCycle(inlined), self._identity.tenant_of(client), inlined.background_name
        detached = cycle.detach_client(client)
        work = self._run_detached(path, detached, cycle, inlined)
        runs = self._record_keeper.runs
        runs.start_run(tenant, name, cycle.kept_events, work, is_stream=inlined.is_stream)
        try:
            await self._record_keeper.answer_accepted(client, inlined, cycle)
        except BaseException:
            if not cycle.response_started:  # the client has not seen its name
                runs.stop_run(tenant, name)
            raise

    async def _run_detached(
        self, path: ApiPath, detached: DownstreamClient, cycle: BackgroundCycle, inlined: InlinedRequest
    ) -> None:
        """Have instances answer a request that runs in the background. It counts as an open one."""
        self._load.open_requests += 1
        self._load.body_bytes += len(inlined.body)
        try:
            await self._run_attempts(path, detached, inlined.body, inlined)
        except ParleyError as error:
            cycle.end_with_error(error)
        finally:
            self._load.open_requests -= 1
            self._load.body_bytes -= len(inlined.body)
            cycle.close()
            if detached.account is not None:
                detached.account.cancel()

    def _render_error_end(
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
        try:
            reply = route.reader(body, parsing_context(client))
            return reply.fail_stream(error) if isinstance(reply, Reply) else b""
        except ParleyError:
            return b""
