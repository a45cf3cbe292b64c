"""Handlers that describe the server and its models."""

from __future__ import annotations

from functools import partial

from parley.dialects.facts import ModelCard, ServerInfo
from parley.dialects.route import Route
from parley.errors import NotFound, UnknownModel
from parley.serving.handlers.visible_models import allowed_model
from parley.serving.keys.scopes import check_key_name
from parley.serving.model_facts import describe_name
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_reader import request_context
from parley.types import Tenant
from parley.version import __version__
from parley.web.exchange import Exchange


async def handle_models(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """List the served models."""
    assert route.writer is not None
    await exchange.send_response(
        route.writer(registry.server_facts(exchange.tenant).cards), content_type=route.content_types[0].encode()
    )


async def handle_model(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Describe one model."""
    assert route.writer is not None
    name = exchange.path_params["model"]
    if not name:  # "/v1/models/" is the list with a slash too many, not a model with an empty name
        raise NotFound("No model is named. Leave out the trailing slash to list the models.")
    await exchange.send_response(route.writer(_find_model_card(registry, name, exchange.tenant)))


def _find_model_card(registry: ModelRegistry, name: str, tenant: Tenant) -> ModelCard:
    model = registry.find_model(name, tenant)
    check_key_name(tenant, model, name)
    return describe_name(model, model.answer_name(name))


async def handle_version(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Return the version of parley."""
    assert route.writer is not None
    await exchange.send_response(route.writer(__version__), content_type=route.content_types[0].encode())


async def handle_server_info(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Describe the server and the model that requests for the route are for."""
    assert route.writer is not None
    main = allowed_model(registry, route, exchange.tenant)
    settings, engine_info = main.settings, main.engine.info
    device = settings.device if engine_info is None else engine_info.device  # the option may be "auto"
    server_info = ServerInfo(describe_name(main, main.name), main.total_slots, __version__, settings.dtype, device)
    await exchange.send_response(route.writer(server_info))


async def handle_info(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer a question about the server or its models, as the dialect words it."""
    assert route.reader is not None
    body = await exchange.read_body()
    tenant, model = exchange.tenant, allowed_model(registry, route, exchange.tenant)
    read_body = partial(
        route.reader, body, request_context(registry, model, exchange), registry.server_facts(tenant, model)
    )
    try:
        answer = await exchange.to_thread_if_large(len(body), read_body)
    except UnknownModel as error:
        if error.name and (hidden_model := registry.get_model(error.name)) is not None:
            check_key_name(tenant, hidden_model, error.name)
        raise
    await exchange.send_answer(answer)
