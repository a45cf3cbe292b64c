"""The API of Databricks' Foundation Models: its table of routes.

A request names an endpoint: a model of the server, or a name whose requests several models share. The body's members
decide the task. ``STRICT`` has the original's limits and refuses undocumented members; ``DIALECT`` lifts both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from parley.dialects.databricks import chat, completions, embeddings, endpoints, shared
from parley.dialects.databricks.shared import Rules
from parley.dialects.dialect import Dialect, Head, Kind, PromptMembers, Reply, Route, named
from parley.dialects.fields import decode

BESIDE = ("/api/2.0", "/ai-gateway")
BASES = ("/serving-endpoints", "/serving-endpoints/v1", "/ai-gateway/mlflow/v1", "/ai-gateway/openai/v1")
ROOT = "/api/2.0/serving-endpoints"
ONE = ROOT + "/{endpoint}"
PERMISSIONS = "/api/2.0/permissions/serving-endpoints/{id}"

MEMBERS = PromptMembers(conversations=("messages",), prompts=("prompt", "input"), before=("tools",))

UNBUILT = {
    ("POST", "/serving-endpoints/responses"): "The Responses API is",
    ("POST", "/serving-endpoints/anthropic/v1/messages"): "The Messages API is",
    ("PUT", ONE + "/rate-limits"): "Rate limits of an endpoint are",
    ("PUT", ONE + "/ai-gateway"): "A gateway is",
    ("PATCH", ONE + "/notifications"): "Notifications are",
    ("PATCH", ONE + "/telemetry-config"): "Telemetry of an endpoint is",
    ("PUT", PERMISSIONS): "Permissions of an endpoint are",
    ("PATCH", PERMISSIONS): "Permissions of an endpoint are",
    ("POST", "/api/2.0/external-function"): "External functions are",
}


def invoked(rules: Rules, body: bytes, head: Head) -> Reply:
    """Read a conversation, prompts, or texts to embed, whichever the body has. Raises BadRequest."""
    fields = decode(body, chat.WORDS)
    if fields.has("messages"):
        return chat.ChatReply(rules, fields, head)
    if fields.has("prompt"):
        return completions.read(rules, body, head)
    if fields.has("input"):
        return embeddings.read(rules, body, head)
    return chat.ChatReply(rules, fields, head)


def _named(body: bytes) -> str:
    """Return the endpoint that a body names."""
    return named(body).removeprefix(shared.SYSTEM)


def _asked(rules: Rules) -> tuple[Route, ...]:
    """Return the routes that query an endpoint, which the path or, as in OpenAI's API, the body names."""
    read = partial(invoked, rules)
    one = "/serving-endpoints/{endpoint}"
    paths: dict[str, tuple[Kind, Any]] = {
        "/chat/completions": ("generate", partial(chat.read, rules)),
        "/completions": ("generate", partial(completions.read, rules)),
        "/embeddings": ("embed", partial(embeddings.read, rules)),
    }
    return (
        *(
            Route("POST", base + path, kind, read=reads, model=_named, shares=True)
            for base in BASES
            for path, (kind, reads) in paths.items()
        ),
        Route("POST", one + "/invocations", "generate", read=read, shares=True),
        Route("POST", one + "/served-models/{served}/invocations", "generate", read=read, shares=True),
        Route("POST", one + "/served-models/{served}", "generate", read=read, shares=True),
    )


def _managed() -> tuple[Route, ...]:
    """Return the routes that manage endpoints. MLflow appends a slash to the collection's path."""
    calls: dict[tuple[str, str], Any] = {
        ("GET", ROOT): endpoints.list_,
        ("GET", ROOT + "/"): endpoints.list_,
        ("POST", ROOT): endpoints.create,
        ("POST", ROOT + "/"): endpoints.create,
        ("POST", ROOT + "/pt"): endpoints.create,
        ("PUT", ROOT + "/pt/{endpoint}/config"): endpoints.update,
        ("GET", ONE): endpoints.get,
        ("PUT", ONE + "/config"): endpoints.update,
        ("DELETE", ONE): endpoints.delete,
        ("PATCH", ONE + "/tags"): endpoints.tag,
        ("GET", ONE + "/openapi"): endpoints.describe,
        ("GET", ONE + "/served-models/{served}/logs"): endpoints.logs,
        ("GET", ONE + "/served-models/{served}/build-logs"): endpoints.logs,
        ("GET", PERMISSIONS): endpoints.permissions,
        ("GET", PERMISSIONS + "/permissionLevels"): endpoints.levels,
    }
    return (
        *(Route(method, path, "endpoint", read=read) for (method, path), read in calls.items()),
        Route("GET", ONE + "/metrics", "metrics"),
        *(
            Route(method, path, "ask", read=partial(endpoints.unavailable, what))
            for (method, path), what in UNBUILT.items()
        ),
    )


DIALECT = Dialect(
    name="databricks",
    title="Databricks",
    base="/serving-endpoints",
    error=shared.error,
    members=MEMBERS,
    routes=(*_asked(shared.LENIENT), *_managed()),
    beside=BESIDE,
)
STRICT = Dialect(
    name="databricks",
    title="Databricks",
    base="/serving-endpoints",
    error=shared.error,
    members=MEMBERS,
    body_limit=shared.BODY,
    routes=(*_asked(shared.STRICT), *_managed()),
    beside=BESIDE,
)
