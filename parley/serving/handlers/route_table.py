"""The handler of each kind of route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from parley.dialects.route import Route, RouteKind
from parley.serving.admin.adapters import handle_adapter
from parley.serving.admin.control import (
    handle_cache_reset,
    handle_media_reset,
    handle_pause,
    handle_self_test,
    handle_stop,
)
from parley.serving.admin.pull import handle_pull
from parley.serving.generate_handler import handle_generate
from parley.serving.handlers.abort import handle_abort, handle_abort_list
from parley.serving.handlers.endpoints import handle_endpoint
from parley.serving.handlers.health import handle_health, handle_live, handle_open_requests, handle_ready
from parley.serving.handlers.metrics import handle_metrics
from parley.serving.handlers.server_facts import (
    handle_info,
    handle_model,
    handle_models,
    handle_server_info,
    handle_version,
)
from parley.serving.handlers.stored_records import handle_stored
from parley.serving.handlers.tokens import handle_detokenize, handle_tokenize, handle_tokenizer
from parley.serving.keys.usage_page import handle_usage
from parley.serving.model_registry import ModelRegistry
from parley.serving.render_requests import handle_render
from parley.serving.socket_handshake import handle_socket
from parley.serving.web_pages.activity import handle_activity
from parley.serving.web_pages.page_files import handle_page
from parley.web.exchange import Exchange

RouteHandler = Callable[[ModelRegistry, Route, Exchange], Awaitable[None]]

PROBE_KINDS: frozenset[RouteKind] = frozenset(
    {"live", "ready", "probe", "self_test", "health", "metrics", "load", "instance_status", "page", "activity"}
)

SERVER_HANDLERS: dict[RouteKind, RouteHandler] = {  # all kinds but those that only members of a cluster serve
    "generate": handle_generate,
    "embed": handle_generate,
    "render": handle_render,
    "tokenize": handle_tokenize,
    "detokenize": handle_detokenize,
    "models": handle_models,
    "model": handle_model,
    "tokenizer": handle_tokenizer,
    "version": handle_version,
    "server_info": handle_server_info,
    "abort": handle_abort,
    "abort_list": handle_abort_list,
    "adapter": handle_adapter,
    "load": handle_open_requests,
    "reset": handle_cache_reset,
    "reset_media": handle_media_reset,
    "health": handle_health,
    "stored": handle_stored,
    "socket": handle_socket,
    "info": handle_info,
    "summed_info": handle_info,
    "endpoint": handle_endpoint,
    "probe": handle_info,
    "self_test": handle_self_test,
    "pause": handle_pause,
    "pull": handle_pull,
    "stop": handle_stop,
    "live": handle_live,
    "ready": handle_ready,
    "metrics": handle_metrics,
    "page": handle_page,
    "activity": handle_activity,
    "usage": handle_usage,
}
