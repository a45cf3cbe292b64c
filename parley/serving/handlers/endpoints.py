"""The handler of endpoints, whose models share requests."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from parley.dialects.dialect import Route
from parley.serving.registry import ModelRegistry
from parley.serving.request_reader import request_context
from parley.web.exchange import Exchange


async def handle_endpoint(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Show or change the endpoints whose models share requests."""
    assert route.reader is not None
    body = await exchange.read_body()
    context = replace(request_context(registry, registry.main_model, exchange), client=exchange.tenant)
    answer = await registry.endpoint_store.change_endpoints(
        partial(route.reader, body, context, registry.server_facts()), len(body)
    )
    await exchange.send_answer(answer)
