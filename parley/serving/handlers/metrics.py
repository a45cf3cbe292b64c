"""The handler of the metrics page."""

from __future__ import annotations

from dataclasses import replace

from parley.dialects.route import Route
from parley.metrics.model_metrics import ModelSnapshot
from parley.serving.handlers.visible_models import allowed_model, visible_endpoints
from parley.serving.keys.scopes import may_use_model
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_reader import request_context
from parley.serving.web_pages import metrics_page
from parley.web.exchange import Exchange


async def handle_metrics(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Render the metrics page. Raises Forbidden if the client's key may use none of the models."""
    allowed_model(registry, route, exchange.tenant)
    if route.reader is not None:
        context = replace(request_context(registry, registry.main_model, exchange), client=exchange.tenant)
        endpoints = visible_endpoints(registry, exchange.tenant, registry.endpoint_store.by_name)
        route.reader(b"", context, registry.server_facts(exchange.tenant), endpoints)
    views = [
        ModelSnapshot(
            model=model.name,
            metrics=model.metrics,
            stats=model.engine.stats,
            info=model.engine.info,
            prefix_cache=model.settings.prefix_cache,
            ready=model.unready_error() is None,
            progress=model.load_progress,
            open_requests=len(model.open_requests),
            active_adapters=frozenset(
                open_request.adapter_state
                for open_request in model.open_requests
                if open_request.adapter_state is not None
            ),
            adapter_places=model.settings.max_adapters if model.adapters or registry.options.lora_root else 0,
            engine_restarts=model.engine.restarts,
        )
        for model in registry.models
        if may_use_model(exchange.tenant, model)
    ]
    responses = {"http": registry.http_responses, "grpc": registry.grpc_responses}
    page = metrics_page.render_metrics_page(
        views,
        responses,
        registry.http_requests,
        exchange.dialect,
        record_faults=registry.record_store.faults,
    )
    await exchange.send_response(page.encode(), content_type=metrics_page.METRICS_CONTENT_TYPE)
