"""The facts about a request that decide on its instances: model, prompt hashes, prompt length and tenant."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from parley.coordinator import refusals
from parley.coordinator.proxy.client_identity import ClientIdentity
from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.coordinator.proxy.paths import ApiPath
from parley.coordinator.routing.implied_model import ModelRequirement
from parley.coordinator.routing.instance import ClusterInstance, least_loaded
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.coordinator.routing.policies import SchedulingRequest
from parley.dialects.mounts import known_spelling, names_any_model
from parley.dialects.route import Route, RouteKind
from parley.disagg.wire.prompt_hash import PromptHashes, hash_prompt

# Answered from a model's files, whichever model it is; answers of other kinds for any model are about the server.
MODEL_KINDS: frozenset[RouteKind] = frozenset({"tokenize", "detokenize", "tokenizer", "server_info"})


class RequestedModel(NamedTuple):
    """The model of a request: its name, or, if the request names none, what it needs of a model. ``route``: a route
    with the same needs."""

    name: str
    requirement: ModelRequirement | None
    route: Route


class SchedulingFacts:
    """Reads from requests the facts that decide on their instances."""

    def __init__(self, scheduler: InstanceScheduler, identity: ClientIdentity):
        self._scheduler, self._table, self._identity = scheduler, scheduler.table, identity

    async def scheduling_request(
        self, path: ApiPath, client: DownstreamClient, body: bytes
    ) -> tuple[SchedulingRequest, RequestedModel]:
        """Return the facts about a request that decide on its instances. Raises ParleyError."""
        table = self._table
        options, tenant = table.options, self._identity.tenant_of(client)
        prompt_info = await self._hash_prompt(client, body, tenant if table.has_private_prefixes else "")
        requested = await self._find_model(path, client, body, prompt_info.model)
        turns = prompt_info.conversation_hashes() if options.algorithm_type == "cache_affinity" else None
        scheduling_request = SchedulingRequest(
            prompt_info.token_count,
            prompt_info.marks,
            client.client_timeout(),
            requested.name,
            turns,
            tenant=tenant,
            requirement=requested.requirement,
        )
        return scheduling_request, requested

    async def instances_to_ask(self, path: ApiPath, client: DownstreamClient, body: bytes) -> list[ClusterInstance]:
        """Return the instances to ask for the requested model, the best one first: those that have it, or all usable
        ones if any model will do. Raises ParleyError if none has it."""
        requested = await self._find_model(path, client, body, (await self._hash_prompt(client, body)).model)
        requirement = requested.requirement
        if holders := await self.holders_to_ask(requested.name, requirement):
            return holders
        usable = self._table.usable_instances()
        if usable and requirement and requirement.tasks is None and requested.route.kind not in MODEL_KINDS:
            return least_loaded(usable)
        raise refusals.coordinator_error(503, refusals.TEXTS.cluster_not_ready)

    async def holders_to_ask(self, model: str, requirement: ModelRequirement | None) -> list[ClusterInstance]:
        """Return the usable instances that have a model, the best one first, or all of these if no instance of the
        cluster has the model that is named. None if no usable instance has it.

        Instances that could not be used when they were last checked come last: the first ones may have begun to stop,
        and these may be ready by now.
        """

        def find_holders(instances: list[ClusterInstance]) -> list[ClusterInstance]:
            return self._table.model_holders(model, requirement, instances)

        usable = await self._scheduler.find_usable(lambda usable: bool(find_holders(usable)))
        holders = least_loaded(find_holders(usable))
        return holders and [*holders, *least_loaded(find_holders(self._table.possibly_usable_instances()))]

    def unsuited_model_holders(self, requested: RequestedModel) -> list[ClusterInstance]:
        """Return the usable instances of a model that cannot do what a request asks of it, so that one of them says so;
        none if it can, or if that is not known."""
        implied_models, name = self._table.implied_models, requested.name
        if requested.requirement is not None:
            model = implied_models.find_implied_model(requested.requirement).model
            name = "" if model is None else model.names[0]
        if not name or not implied_models.lacks_task(name, requested.route):
            return []
        usable = self._table.usable_instances()
        holders = self._table.model_holders(requested.name, requested.requirement, usable)
        return [instance for instance in holders if instance.role == "mixed"]  # others take no whole requests

    async def _find_model(
        self, path: ApiPath, client: DownstreamClient, body: bytes, name_in_body: str
    ) -> RequestedModel:
        """Return the model of a request. Raises ParleyError."""
        route = await client.to_thread_if_large(len(body), partial(path.route_for_model, body, client.headers))
        known_names = self._table.model_names()
        named = path.named_model(route, body, client.path_params)
        name = name_in_body if named is None else named
        name = known_spelling(name, known_names) or name
        if path.names_endpoint and name not in known_names:  # an endpoint, whose models only instances know
            client.log_entry.model = name
            return RequestedModel("", None, route)
        requirement = None
        if names_any_model(name, known_names):
            key_models = client.tenant.models
            requirement = ModelRequirement(route.suitable_tasks, key_models, path.depends_on_main_model)
            model = self._table.implied_models.find_implied_model(requirement).model
            name, client.log_entry.model = "", name if model is None else model.names[0]
        else:
            client.log_entry.model = name
        return RequestedModel(name, requirement, route)

    async def _hash_prompt(self, client: DownstreamClient, body: bytes, owner: str = "") -> PromptHashes:
        rate = self._table.options.string_token_rate
        return await client.to_thread_if_large(len(body), partial(hash_prompt, body, rate, owner))
