"""The API of Databricks' Foundation Models: its table of routes.

A request names an endpoint: a model of the server, or a name whose requests several models share. The body's members
decide the task. ``STRICT`` has the original's limits and refuses undocumented members; ``DIALECT`` lifts both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from parley.dialects.databricks import chat, completions, embeddings, endpoints, permissions, responses
from parley.dialects.databricks.api_rules import (
    LENIENT_DATABRICKS_RULES,
    MAX_DATABRICKS_BODY,
    STRICT_DATABRICKS_RULES,
    DatabricksRules,
)
from parley.dialects.databricks.config import SYSTEM_CATALOGUE
from parley.dialects.databricks.error_answers import databricks_error_answer
from parley.dialects.dialect import Dialect, PromptMembers
from parley.dialects.fields import decode_fields
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.route import ModelListMerge, Route, RouteKind, model_in_body
from parley.types import ALL_MODEL_TASKS

OTHER_BASES = ("/api/2.0", "/ai-gateway")
QUERY_BASES = ("/serving-endpoints", "/serving-endpoints/v1", "/ai-gateway/mlflow/v1", "/ai-gateway/openai/v1")
ENDPOINTS_PATH = "/api/2.0/serving-endpoints"
ENDPOINT_PATH = ENDPOINTS_PATH + "/{endpoint}"
HOST_METADATA_PATH = "/.well-known/databricks-config"
PERMISSIONS_PATH = "/api/2.0/permissions/serving-endpoints/{id}"

DATABRICKS_PROMPT_MEMBERS = PromptMembers(
    conversations=("messages",), prompts=("prompt", "input"), preceding=("tools",)
)

UNAVAILABLE_CALLS = {
    ("POST", "/serving-endpoints/anthropic/v1/messages"): "The Messages API is",
    ("PATCH", ENDPOINT_PATH + "/notifications"): "Notifications are",
    ("PATCH", ENDPOINT_PATH + "/telemetry-config"): "Telemetry of an endpoint is",
    ("POST", "/api/2.0/external-function"): "External functions are",
}


def read_databricks_invocation(rules: DatabricksRules, body: bytes, context: RequestContext) -> Reply:
    """Read a conversation, prompts, items of a response, or texts to embed, whichever the body has.

    Raises BadRequest.
    """
    fields = decode_fields(body, chat.CHAT_WORDING)
    if fields.has_value("messages"):
        return chat.DatabricksChatReply(rules, fields, context)
    if fields.has_value("prompt"):
        return completions.read_databricks_completion(rules, body, context)
    if responses.has_response_items(fields):
        return responses.read_databricks_response(rules, body, context)
    if fields.has_value("input"):
        return embeddings.read_databricks_embedding(rules, body, context)
    return chat.DatabricksChatReply(rules, fields, context)


def _endpoint_in_body(body: bytes) -> str:
    """Return the endpoint that a body names."""
    return model_in_body(body).removeprefix(SYSTEM_CATALOGUE)


def _query_routes(rules: DatabricksRules) -> tuple[Route, ...]:
    """Return the routes that query an endpoint, which the path or, as in OpenAI's API, the body names."""
    read_body = partial(read_databricks_invocation, rules)
    endpoint_path = "/serving-endpoints/{endpoint}"
    paths: dict[str, tuple[RouteKind, Any]] = {
        "/chat/completions": ("generate", partial(chat.read_databricks_chat, rules)),
        "/completions": ("generate", partial(completions.read_databricks_completion, rules)),
        "/embeddings": ("embed", partial(embeddings.read_databricks_embedding, rules)),
        "/responses": ("generate", partial(responses.read_databricks_response, rules)),
    }
    return (
        *(
            Route("POST", base + path, kind, reader=reader, model_reader=_endpoint_in_body, names_endpoint=True)
            for base in QUERY_BASES
            for path, (kind, reader) in paths.items()
        ),
        *(
            Route(
                "POST", endpoint_path + path, "generate", reader=read_body, names_endpoint=True, tasks=ALL_MODEL_TASKS
            )
            for path in ("/invocations", "/served-models/{served}/invocations", "/served-models/{served}")
        ),
    )


def _management_routes() -> tuple[Route, ...]:
    """Return the routes that manage endpoints. MLflow appends a slash to the collection's path."""
    calls: dict[tuple[str, str], Any] = {
        ("GET", ENDPOINTS_PATH): endpoints.list_endpoints,
        ("GET", ENDPOINTS_PATH + "/"): endpoints.list_endpoints,
        ("POST", ENDPOINTS_PATH): endpoints.create_endpoint,
        ("POST", ENDPOINTS_PATH + "/"): endpoints.create_endpoint,
        ("POST", ENDPOINTS_PATH + "/pt"): endpoints.create_endpoint,
        ("PUT", ENDPOINTS_PATH + "/pt/{endpoint}/config"): endpoints.update_provisioned_endpoint,
        ("GET", ENDPOINT_PATH): endpoints.get_endpoint,
        ("PUT", ENDPOINT_PATH + "/config"): endpoints.update_endpoint,
        ("DELETE", ENDPOINT_PATH): endpoints.delete_endpoint,
        ("PATCH", ENDPOINT_PATH + "/tags"): endpoints.change_tags,
        ("PUT", ENDPOINT_PATH + "/rate-limits"): endpoints.change_rate_limits,
        ("PUT", ENDPOINT_PATH + "/ai-gateway"): endpoints.change_gateway,
        ("GET", ENDPOINT_PATH + "/openapi"): endpoints.endpoint_openapi,
        ("GET", ENDPOINT_PATH + "/served-models/{served}/logs"): endpoints.empty_logs,
        ("GET", ENDPOINT_PATH + "/served-models/{served}/build-logs"): endpoints.empty_logs,
        ("GET", PERMISSIONS_PATH): permissions.list_permissions,
        ("PUT", PERMISSIONS_PATH): permissions.set_permissions,
        ("PATCH", PERMISSIONS_PATH): permissions.update_permissions,
        ("GET", PERMISSIONS_PATH + "/permissionLevels"): permissions.list_permission_levels,
    }
    return (
        *(
            Route(
                method,
                path,
                "endpoint",
                reader=handler,
                model_list=ModelListMerge() if handler is endpoints.list_endpoints else None,
            )
            for (method, path), handler in calls.items()
        ),
        Route("GET", ENDPOINT_PATH + "/metrics", "metrics", reader=endpoints.get_endpoint),
        Route("GET", HOST_METADATA_PATH, "probe", reader=endpoints.host_metadata),  # read without an API key
        *(
            Route(method, path, "info", reader=partial(endpoints.refuse_endpoint_call, subject))
            for (method, path), subject in UNAVAILABLE_CALLS.items()
        ),
    )


DIALECT = Dialect(
    name="databricks",
    body_schemas="databricks",
    title="Databricks",
    base_path="/serving-endpoints",
    render_error=databricks_error_answer,
    prompt_members=DATABRICKS_PROMPT_MEMBERS,
    routes=(*_query_routes(LENIENT_DATABRICKS_RULES), *_management_routes()),
    other_bases=OTHER_BASES,
)
STRICT = Dialect(
    name="databricks",
    body_schemas="databricks-strict",
    title="Databricks",
    base_path="/serving-endpoints",
    render_error=databricks_error_answer,
    prompt_members=DATABRICKS_PROMPT_MEMBERS,
    body_limit=MAX_DATABRICKS_BODY,
    routes=(*_query_routes(STRICT_DATABRICKS_RULES), *_management_routes()),
    other_bases=OTHER_BASES,
)
