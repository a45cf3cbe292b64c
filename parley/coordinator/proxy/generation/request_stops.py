"""Stops the requests of clients by their ids: on the instances that run them, and those that wait in the coordinator.

A request waits here while no instance has room for it, and between two attempts. It then ends as a queued one of a
single server does: an instance renders the end of its answer, with the outputs so far.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial

from parley.coordinator import refusals
from parley.coordinator.proxy.client_identity import ClientIdentity
from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.coordinator.proxy.generation.attempts import RequestRunner
from parley.coordinator.proxy.paths import ApiPath
from parley.coordinator.proxy.upstream import forward
from parley.coordinator.proxy.upstream.connections import InstanceConnections
from parley.coordinator.routing.instance_table import InstanceTable
from parley.dialects.admin_requests import AbortList, AbortRequest
from parley.dialects.records import INLINED_RECORDS, NO_RECORDS, TenantRecords
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.errors import ParleyError


class OpenRun:
    """An open request: its runner, its owner, and what the client sent."""

    def __init__(self, runner: RequestRunner, tenant: str, model: str, path: ApiPath, body: bytes):
        self.runner, self.tenant, self.model = runner, tenant, model
        self._path, self._body = path, body
        self._cancel_ids: frozenset[str] | None = None

    async def read_cancel_ids(self) -> frozenset[str]:
        """Return the ids that stop the request, as an instance would know them; none for a malformed request. The body
        is parsed once."""
        if self._cancel_ids is None:
            self._cancel_ids = await self.runner.client.to_thread_if_large(len(self._body), self._parse_cancel_ids)
        return self._cancel_ids

    def _parse_cancel_ids(self) -> frozenset[str]:
        client = self.runner.client
        try:
            route, _ = self._path.pick_route(self._body, client.headers)
            assert route.reader is not None
            reply = route.reader(self._body, parsing_context(client))
        except ParleyError:
            return frozenset()
        return frozenset((reply.request.id, *reply.request.cancel_ids)) if isinstance(reply, Reply) else frozenset()


def parsing_context(client: DownstreamClient) -> RequestContext:
    """Return the facts known here of the context in which instances read a client's request."""
    records: TenantRecords = INLINED_RECORDS if client.records_inlined else NO_RECORDS
    return RequestContext(
        client.request_uuid,
        0,
        "",
        path_parts=client.path_params,
        headers=client.headers,
        query_string=client.scope.get("query_string", b""),
        records=records,
    )


class RequestStops:
    """The open requests, by which clients' commands to stop requests find those that wait here."""

    def __init__(self, table: InstanceTable, connections: InstanceConnections, identity: ClientIdentity):
        self._table, self._connections, self._identity = table, connections, identity
        self._open_runs: dict[RequestRunner, OpenRun] = {}  # oldest first

    def __iter__(self) -> Iterator[RequestRunner]:
        return iter(tuple(self._open_runs))

    def add_run(self, runner: RequestRunner, tenant: str, model: str, path: ApiPath, body: bytes) -> None:
        """Add a request that begins."""
        self._open_runs[runner] = OpenRun(runner, tenant, model, path, body)

    def remove_run(self, runner: RequestRunner) -> None:
        """Remove a request that has ended."""
        del self._open_runs[runner]

    async def stop_one(self, path: ApiPath, client: DownstreamClient, body: bytes) -> None:
        """Stop the request that a client names, and answer the client. Raises ParleyError."""
        instances = self._table.running_instances()
        answer = await forward.ask_able(self._connections, client, instances, body) if instances else None
        if answer is None or answer.status == 404:
            abort_request = await self._read_command(path, client, body)
            assert isinstance(abort_request, AbortRequest)
            model = self._table.served_name(client.path_params.get("model", ""))
            async for open_run in self._find_runs(client, frozenset((abort_request.request_label,))):
                if open_run.model in ("", model) and open_run.runner.stop_request():
                    success = abort_request.success
                    await client.send_answer(success)
                    return
        if answer is None:
            raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)
        client.send_complete(*answer)

    async def stop_listed(self, path: ApiPath, client: DownstreamClient, body: bytes) -> None:
        """Stop the requests that a client lists, and answer the client. Raises ParleyError."""
        instances = self._table.running_instances()
        if not instances:
            raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)
        answers = await forward.collect_answers(self._connections, client, instances, body)
        answer = next((answer for answer in answers if answer.status >= 400), answers[0])
        if answer.status < 400:
            abort_list = await self._read_command(path, client, body)
            assert isinstance(abort_list, AbortList)
            async for open_run in self._find_runs(client, abort_list.labels):
                # Requests of an instance that does not answer would continue on another
                if len(answers) < len(instances) or not open_run.runner.runs_on(instances):
                    open_run.runner.stop_request()
        client.send_complete(*answer)

    async def _find_runs(self, client: DownstreamClient, cancel_ids: frozenset[str]) -> AsyncIterator[OpenRun]:
        """Yield the open requests of a client that have one of these ids."""
        tenant = self._identity.tenant_of(client)
        for open_run in tuple(self._open_runs.values()):
            if open_run.tenant != tenant or cancel_ids.isdisjoint(await open_run.read_cancel_ids()):
                continue
            if open_run.runner in self._open_runs:  # it may have ended meanwhile
                yield open_run

    async def _read_command(self, path: ApiPath, client: DownstreamClient, body: bytes) -> object:
        """Read a client's command. Raises ParleyError."""
        route, _ = path.pick_route(body, client.headers)
        assert route.reader is not None
        return await client.to_thread_if_large(len(body), partial(route.reader, body, parsing_context(client)))
