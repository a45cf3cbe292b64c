"""Keeps the records of a coordinator's clients, and their requests in the background, for all its instances."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from parley.coordinator.proxy.client_identity import ClientIdentity
from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.coordinator.proxy.generation.background_cycle import BackgroundCycle
from parley.coordinator.proxy.paths import ApiPath
from parley.coordinator.routing.instance_table import InstanceTable
from parley.dialects.batch_job import BatchJob
from parley.dialects.records import InlinedRequest, StreamReplay
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route
from parley.errors import ParleyError
from parley.serving.answer_writer import follow_events
from parley.serving.handlers.stored_records import replay_stream
from parley.serving.records.background import BackgroundRunner, tenant_records
from parley.serving.records.batch_resumption import BatchResumption, PortApp
from parley.serving.records.batch_runner import BatchRunner
from parley.serving.records.inner_sender import resume_info, sender_of_client
from parley.serving.records.open_store import open_record_store
from parley.web.auth import presented_keys
from parley.web.offload import OFFLOAD_SIZE


class RecordKeeper:
    """The records of all tenants. ``runs``: the requests in the background; ``knows_keys``: the coordinator checks the
    clients' keys; ``is_ending``: whether the coordinator ends. Raises BadRecordFile."""

    def __init__(
        self, table: InstanceTable, identity: ClientIdentity, *, knows_keys: bool, is_ending: Callable[[], bool]
    ):
        options = table.options
        self._identity, self._knows_keys = identity, knows_keys
        self._store = open_record_store(options.response_store, options.response_lifetime, options.response_store_file)
        self._table = table
        self.runs = BackgroundRunner(self._store)
        self._batch_runner = BatchRunner(self.runs, self._store, is_ending=is_ending)

    @property
    def record_faults(self) -> int:
        """How often the store could not be used."""
        return self._store.faults

    def serves(self, client: DownstreamClient) -> bool:
        """Whether this coordinator keeps the client's records.

        Servers other than parley keep their own, and know nothing of these. If a client sends several keys, only the
        server that checks them knows which one is accepted, and so whose records they are.
        """
        is_one_tenant = not self.only_instances_check_keys or len(set(presented_keys(client.headers))) < 2
        return bool(self._store.size) and is_one_tenant and all(instance.native for instance in self._table)

    @property
    def only_instances_check_keys(self) -> bool:
        """Whether a client's key is needed for its requests, because this coordinator does not know it."""
        return self._table.checks_keys and not self._knows_keys

    async def resume_batches(self, app: PortApp) -> None:
        """Resume the batches of coordinators that have ended, until this one ends."""
        records_of = partial(tenant_records, self._store, self.runs)
        await BatchResumption(self._batch_runner, [app], records_of).keep_resuming()

    async def close(self) -> None:
        """Stop the requests in the background, and close the store."""
        await self.runs.close()
        self._store.close()

    async def inline_records(self, path: ApiPath, client: DownstreamClient, body: bytes) -> InlinedRequest | None:
        """Return the request with the records that it refers to; None if bodies of this path refer to none.

        Raises ParleyError, ClientRefused, ClientGone.
        """
        if not path.route.refers_to_records(body) or not self.serves(client):
            return None
        assert path.route.inliner is not None
        try:
            inlined = await client.to_thread_if_large(
                len(body), partial(path.route.inliner, body, self._record_context(client))
            )
        except ParleyError:
            await self._identity.check_key(client)
            raise
        client.records_inlined = True
        return inlined

    async def answer_stored(self, route: Route, client: DownstreamClient, app: PortApp, body: bytes | None) -> None:
        """Read or change the client's records, stream a background request again, or begin a batch, whose requests go
        to ``app``. ``body``: None if it has not been read. Raises ParleyError, ClientGone."""
        assert route.reader is not None
        body = await client.read_body() if body is None else body
        await self._identity.check_key(client)
        read_request = partial(route.reader, body, self._record_context(client))
        size = OFFLOAD_SIZE + 1 if route.reads_many else len(body)
        result: Answer | StreamReplay | BatchJob = await client.to_thread_if_large(size, read_request)
        if isinstance(result, Answer):
            await client.send_answer(result)
        elif isinstance(result, BatchJob):
            tenant = self._identity.tenant_of(client)
            sender, resumption = sender_of_client(app, client.scope, result), None
            if not self.only_instances_check_keys:
                resumption = resume_info(client.scope, result, app.apis, app.keys.tenant_reference(client.tenant))
            await client.send_response(self._batch_runner.accept_batch(tenant, result, sender, resumption))
        else:
            await replay_stream(self.runs, self._identity.tenant_of(client), client, result)

    async def answer_accepted(self, client: DownstreamClient, inlined: InlinedRequest, cycle: BackgroundCycle) -> None:
        """Answer a client whose request runs in the background. Raises ParleyError if it was refused, ClientGone."""
        await client.while_connected(cycle.wait_until_begun())
        if cycle.status != 200:
            client.send_complete(cycle.status, list(cycle.headers), cycle.body)
        elif inlined.is_stream:
            await follow_events(client, cycle.kept_events, 0, Reply.media_type)
        else:
            await client.send_response(inlined.render_accepted())

    def _record_context(self, client: DownstreamClient) -> RequestContext:
        tenant = self._identity.tenant_of(client)
        return RequestContext(
            client.request_uuid,
            int(time.time()),
            "",
            path_parts=client.path_params,
            headers=client.headers,
            query_string=client.scope.get("query_string", b""),
            tenant=tenant,
            records=tenant_records(self._store, self.runs, tenant),
        )
