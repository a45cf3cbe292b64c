"""The data of the status page: models, the last hour, and running requests, without any text of a request.

A client sees only its own requests. Administrators see all, and so do all clients of a server without keys.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from parley.dialects.route import Route
from parley.errors import InvalidValue, excerpt
from parley.serving.keys.scopes import may_use_model
from parley.serving.model_registry import ModelRegistry
from parley.serving.served_model import ServedModel
from parley.serving.web_pages.activity_history import SAMPLE_FIELDS, SAMPLE_SECONDS
from parley.types import Tenant
from parley.version import __version__
from parley.web.exchange import Exchange

MAX_LISTED_REQUESTS = 500  # the oldest ones


async def handle_activity(registry: ModelRegistry, route: Route, exchange: Exchange) -> None:
    """Answer with the state of the server as JSON. Raises InvalidValue for a wrong ``since`` in the query."""
    start = _read_start(exchange.scope["query_string"])
    history = registry.activity_history.samples_since(start)
    requests = _list_requests(registry, exchange.tenant)
    models = [model for model in registry.models if may_use_model(exchange.tenant, model)]
    state = {
        "time": time.time(),
        "version": __version__,
        "phase": registry.server_phase,
        "role": registry.options.role,
        "interval": SAMPLE_SECONDS,
        "fields": SAMPLE_FIELDS,
        "models": [_describe_model(model, history.get(model.name, ([], []))) for model in models],
        "sees_all": _sees_all(exchange.tenant),
        "request_count": len(requests),
        "requests": requests[:MAX_LISTED_REQUESTS],
    }
    await exchange.send_response(msgspec.json.encode(state), extra_headers=((b"cache-control", b"no-store"),))


def _read_start(query: bytes) -> float:
    value = dict(parse_qsl(query.decode("latin-1"))).get("since", "0")
    try:
        return float(value)
    except ValueError:
        raise InvalidValue(
            f"since must be a time in seconds since 1970, but is {excerpt(value)}.", field="since"
        ) from None


def _sees_all(tenant: Tenant) -> bool:
    return tenant.is_admin or not tenant.id


def _list_requests(registry: ModelRegistry, tenant: Tenant) -> list[dict[str, Any]]:
    sees_all = _sees_all(tenant)
    visible = [request.progress for request in registry.open_requests if sees_all or tenant.may_see(request.tenant)]
    visible.sort(key=lambda progress: -progress.seconds)
    return [progress._asdict() for progress in visible]


def _describe_model(model: ServedModel, history: tuple[list[float], list[list[float]]]) -> dict[str, Any]:
    info, stats, reason = model.engine.info, model.engine.stats, model.unready_error()
    described: dict[str, Any] = {
        "name": model.name,
        "names": [*model.names, *model.adapters],
        "phase": model.model_phase,
        "reason": "" if reason is None else reason.message,
        "progress": round(model.load_progress, 4),
        "restarts": model.engine.restarts,
        "slots": [model.used_slots, model.total_slots],
        "max_batch": model.settings.max_batch,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv": [stats.used_pages, stats.total_pages],
        "prefix": [stats.prefix_hits, stats.prefix_queries],
        "preemptions": stats.preemptions,
        "times": history[0],
        "samples": history[1],
    }
    if info is not None:
        described |= {
            "architecture": info.architecture,
            "parameters": info.parameters,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "device": info.device,
            "context": info.max_model_len,
            "generates": info.generates,
            "media": sorted(info.media_kinds),
            "page_tokens": info.page_tokens,
        }
    return described
