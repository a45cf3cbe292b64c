"""Handlers that say whether the server is alive, ready and healthy, and how many requests it serves."""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects.route import Route
from parley.serving.model_registry import ModelRegistry
from parley.web.exchange import Exchange


async def handle_live(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer 200: the process is alive."""
    if route.writer is not None:
        await exchange.send_answer(route.writer(True))
        return
    await exchange.send_response(b'{"status":"live"}')


async def handle_ready(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer 200 if all models take requests, otherwise 503 with the progress of loading."""
    unready_model = registry.first_unready_model()
    if route.writer is not None:
        await exchange.send_answer(route.writer(unready_model is None))
        return
    if unready_model is None:
        await exchange.send_response(b'{"status":"ready"}')
        return
    unready_error, progress = unready_model.unready_error(), unready_model.engine.progress
    assert unready_error is not None
    state: dict[str, Any] = {
        "status": unready_model.model_phase,
        "message": unready_error.message,
        "model": unready_model.name,
    }
    if unready_model.model_phase in ("loading", "restarting"):
        state |= {"stage": progress.stage, "progress": round(progress.fraction, 4)}
    state["models"] = {model.name: model.model_phase for model in registry.models}
    retry_header = (b"retry-after", b"%d" % max(1, round(unready_error.retry_after)))
    await exchange.send_response(msgspec.json.encode(state), 503, extra_headers=(retry_header,))


async def handle_health(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer 200 if all models take requests; otherwise raise NotReady."""
    registry.require_ready()
    await exchange.send_response(b"", content_type=b"")


async def handle_open_requests(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Return the number of open requests."""
    assert route.writer is not None
    await exchange.send_response(route.writer(len(registry.open_requests)))
