"""Keeps the records of a coordinator's clients, and their requests in the background, for all its instances."""

from __future__ import annotations

import time
from functools import partial

from parley.coordinator.config import CoordinatorOptions
from parley.coordinator.proxy.background_cycle import BackgroundCycle
from parley.coordinator.proxy.client import DownstreamClient
from parley.coordinator.routing.instance_table import InstanceTable
from parley.dialects.dialect import Answer, Reply, RequestContext, Route
from parley.dialects.records import InlinedRequest, StreamReplay
from parley.serving.generate import follow_events
from parley.serving.handlers import replay_stream
from parley.serving.records.background import BackgroundRuns, tenant_records
from parley.serving.records.opening import open_record_store
from parley.web.auth import presented_keys


class RecordKeeper:
    """The records of all tenants. ``runs``: the requests in the background; ``knows_keys``: the coordinator checks the
    clients' keys. Raises BadRecordFile."""

    def __init__(self, options: CoordinatorOptions, table: InstanceTable, *, knows_keys: bool = False):
        self._knows_keys = knows_keys
        self._store = open_record_store(options.response_store, options.response_lifetime, options.response_store_file)
        self._table = table
        self.runs = BackgroundRuns(self._store)

    def serves(self, client: DownstreamClient) -> bool:
        """Whether it keeps the client's records.

        Servers other than parley keep their own, and know nothing of these. Of several keys of one client, only who
        checks them knows which one is accepted, and so whose records they are.
        """
        elsewhere = self._table.checks_keys and not self._knows_keys
        is_one_tenant = not elsewhere or len(set(presented_keys(client.headers))) < 2
        return bool(self._store.size) and is_one_tenant and all(each.native for each in self._table)

    async def close(self) -> None:
        """Stop the requests in the background, and close the store."""
        await self.runs.close()
        self._store.close()

    async def inline_records(self, route: Route, client: DownstreamClient, tenant: str, body: bytes) -> InlinedRequest:
        """Return the client's request with the records that it refers to. Raises ParleyError."""
        assert route.inliner is not None
        inlined = await client.run_work(len(body), partial(route.inliner, body, self._context(client, tenant)))
        client.records_inlined = True
        return inlined

    async def answer_stored(self, route: Route, client: DownstreamClient, tenant: str, body: bytes) -> None:
        """Read or change the client's records, or stream a background request again. Raises ParleyError, ClientGone."""
        assert route.reader is not None
        read = partial(route.reader, body, self._context(client, tenant))
        result: Answer | StreamReplay = await client.run_work(len(body), read)
        if isinstance(result, Answer):
            await client.send_response(result.body, result.status, result.content_type)
        else:
            await replay_stream(self.runs, tenant, client, result)

    async def answer_accepted(self, client: DownstreamClient, inlined: InlinedRequest, cycle: BackgroundCycle) -> None:
        """Answer a client whose request runs in the background. Raises ParleyError if it was refused, ClientGone."""
        await client.while_connected(cycle.wait_until_begun())
        if cycle.status != 200:
            client.send_complete(cycle.status, list(cycle.headers), cycle.body)
        elif inlined.is_stream:
            await follow_events(client, cycle.kept, 0, Reply.media_type)
        else:
            await client.send_response(inlined.render_accepted())

    def _context(self, client: DownstreamClient, tenant: str) -> RequestContext:
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
