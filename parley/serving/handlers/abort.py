"""Handlers that cancel open requests of a client by their ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from parley.dialects.admin_requests import AbortList, AbortRequest
from parley.dialects.route import Route
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_reader import request_context
from parley.web.exchange import Exchange


async def handle_abort(
    registry: ModelRegistry, route: Route, exchange: Exchange, drop_results: Callable[[str], bool] = lambda label: False
) -> None:
    """Cancel an open request of the client. ``drop_results`` discards waiting results of a finished request; True if
    there were any. Its ids are known to coordinators only."""
    assert route.reader is not None
    model = registry.find_model(exchange.path_params.get("model", ""), exchange.tenant)
    body = await exchange.read_body()
    abort_request: AbortRequest = await exchange.to_thread_if_large(
        len(body), partial(route.reader, body, request_context(registry, model, exchange))
    )
    open_request = model.find_open_request(abort_request.request_label, exchange.tenant)
    if open_request is not None:
        open_request.cancel_by_id(abort_request.request_label)
    dropped = not exchange.tenant.id and drop_results(abort_request.request_label)
    was_aborted = open_request is not None or dropped
    await exchange.send_answer(abort_request.success if was_aborted else abort_request.not_found)


async def handle_abort_list(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Cancel open requests of the client, of any model."""
    assert route.reader is not None
    body = await exchange.read_body()
    abort_list: AbortList = await exchange.to_thread_if_large(
        len(body), partial(route.reader, body, request_context(registry, registry.main_model, exchange))
    )
    for open_request in registry.open_requests:
        if exchange.tenant.may_see(open_request.tenant) and (
            abort_labels := abort_list.labels.intersection(open_request.cancel_ids)
        ):
            open_request.cancel_by_id(min(abort_labels))
    await exchange.send_answer(abort_list.answer)
