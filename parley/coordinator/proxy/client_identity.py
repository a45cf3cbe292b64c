"""Finds the tenant of a client, and has an instance check the client's API key if the coordinator knows no keys."""

from __future__ import annotations

from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.coordinator.proxy.downstream.client_keys import ClientKeys
from parley.coordinator.proxy.paths import ApiPath
from parley.coordinator.proxy.upstream import forward
from parley.coordinator.proxy.upstream.connections import InstanceConnections
from parley.coordinator.routing.instance import least_loaded
from parley.coordinator.routing.instance_table import InstanceTable
from parley.web.auth import presented_key, tenant_id


class ClientIdentity:
    """Finds the tenants of clients. ``client_keys``: the clients' keys; None: instances check them."""

    def __init__(self, table: InstanceTable, connections: InstanceConnections, client_keys: ClientKeys | None):
        self._table, self._connections, self._client_keys = table, connections, client_keys

    def tenant_of(self, client: DownstreamClient) -> str:
        """Return the id of the client's tenant, as instances know it; "" if they have no API keys."""
        if self._client_keys is not None:
            return client.tenant.id
        if not self._table.checks_keys:
            return ""
        return tenant_id(presented_key(client.headers), self._table.options.secret)

    async def check_key(self, client: DownstreamClient) -> None:
        """Check the client's API key if only instances know it. Raises ClientRefused, ParleyError."""
        table = self._table
        if table.checks_keys and self._client_keys is None:
            instances = table.usable_instances() or list(table)[:1]
            await forward.check_client(self._connections, client, instances)

    async def check_with_instance(self, path: ApiPath, client: DownstreamClient) -> None:
        """Ask an instance to check a request that the coordinator answers: its key, and the object that its path names.
        Without usable instances nothing is checked. Raises ClientRefused, ParleyError."""
        names_object = path.route.reader is not None  # the path names an endpoint, which may not exist
        usable = self._table.usable_instances()
        if usable and (names_object or self._client_keys is None):
            refusing = (*forward.KEY_REFUSALS, 404) if names_object else forward.KEY_REFUSALS
            await forward.check_client(self._connections, client, least_loaded(usable), refusing)
