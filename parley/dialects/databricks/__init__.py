"""The API of Databricks' Foundation Models: its table of routes.

A request names an endpoint: a model of the server, or a name behind which several share the requests. The body says
what is asked of it. ``STRICT`` has the original's limits and refuses what is not documented; ``DIALECT`` does not.
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
    ("PUT", ONE + "/rate-limits"): "Limits of an endpoint are",
    ("PUT", ONE + "/ai-gateway"): "A gateway is",
    ("PATCH", ONE + "/notifications"): "Notifications are",
    ("PATCH", ONE + "/telemetry-config"): "Telemetry of an endpoint is",
    ("PUT", PERMISSIONS): "Permissions of their own are",
    ("PATCH", PERMISSIONS): "Permissions of their own are",
    ("POST", "/api/2.0/external-function"): "External functions are",
}


def invoked(rules: Rules, body: bytes, head: Head) -> Reply:
    """A conversation, prompts or texts to embed, whichever the body has. Raises BadRequest."""
    fields = decode(body, chat.WORDS)
    if fields.has("messages"):
        return chat.ChatReply(rules, fields, head)
    if fields.has("prompt"):
        return completions.read(rules, body, head)
    if fields.has("input"):
        return embeddings.read(rules, body, head)
    return chat.ChatReply(rules, fields, head)


def _named(body: bytes) -> str:
    """The endpoint that a body names."""
    return named(body).removeprefix(shared.SYSTEM)


def _asked(rules: Rules) -> tuple[Route, ...]:
    """Where an endpoint is asked: by a path of its own, or in OpenAI's manner by the body."""
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
    """Where endpoints are made and looked at. MLflow writes a stroke behind the collection."""
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
