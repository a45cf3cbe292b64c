"""The handler of endpoints, whose models share requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from parley.dialects.admin_requests import EndpointChange
from parley.dialects.facts import Endpoint
from parley.dialects.reply import Answer
from parley.dialects.route import Route
from parley.serving.handlers.visible_models import visible_endpoints
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_reader import request_context
from parley.types import NO_TENANT
from parley.web.exchange import Exchange


async def handle_endpoint(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Show or change the endpoints whose models share requests."""
    assert route.reader is not None
    body = await exchange.read_body()
    context = replace(request_context(registry, registry.main_model, exchange), client=exchange.tenant)
    reads = route.method == "GET"
    facts = registry.server_facts(exchange.tenant if reads else NO_TENANT)

    def read_body(endpoints: Mapping[str, Endpoint]) -> Answer | EndpointChange:
        assert route.reader is not None
        visible = visible_endpoints(registry, exchange.tenant, endpoints) if reads else endpoints
        result: Answer | EndpointChange = route.reader(body, context, facts, visible)
        return result

    await exchange.send_answer(await registry.endpoint_store.change_endpoints(read_body, len(body)))
