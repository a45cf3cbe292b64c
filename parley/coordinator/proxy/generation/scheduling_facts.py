"""The facts about a request that decide on its instances: model, prompt hashes, prompt length and tenant."""

from __future__ import annotations

from functools import partial

from parley.coordinator.proxy.client_identity import ClientIdentity
from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.coordinator.proxy.paths import ApiPath
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_table import InstanceTable
from parley.coordinator.routing.policies import SchedulingRequest
from parley.disagg.wire.prompt_hash import PromptHashes, hash_prompt


class SchedulingFacts:
    """Reads from requests the facts that decide on their instances."""

    def __init__(self, table: InstanceTable, identity: ClientIdentity):
        self._table, self._identity = table, identity

    async def scheduling_request(self, path: ApiPath, client: DownstreamClient, body: bytes) -> SchedulingRequest:
        """Return the facts about a request that decide on its instances. Raises ParleyError."""
        table = self._table
        options, tenant = table.options, self._identity.tenant_of(client)
        prompt_info = await self._hash_prompt(client, body, tenant if table.has_private_prefixes else "")
        model = client.path_params.get("model", "") or ("" if path.names_endpoint else prompt_info.model)
        model = client.log_entry.model = table.served_name(model)
        turns = prompt_info.conversation_hashes() if options.algorithm_type == "cache_affinity" else None
        return SchedulingRequest(
            prompt_info.token_count, prompt_info.marks, client.client_timeout(), model, turns, tenant=tenant
        )

    async def instances_holding_model(
        self, path: ApiPath, client: DownstreamClient, body: bytes, usable: list[ClusterInstance]
    ) -> list[ClusterInstance]:
        """Return the instances that have the requested model, or all if none has it."""
        model = client.path_params.get("model", "") or (await self._hash_prompt(client, body)).model
        model = self._table.served_name(model)
        return [instance for instance in usable if model in instance.models] or usable

    async def _hash_prompt(self, client: DownstreamClient, body: bytes, owner: str = "") -> PromptHashes:
        rate = self._table.options.string_token_rate
        return await client.to_thread_if_large(len(body), partial(hash_prompt, body, rate, owner))
