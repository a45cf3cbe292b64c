"""The paths of Azure OpenAI's SDKs: a deployment in the path, whose name is a model's, in place of the body's model.

The query's ``api-version`` chooses nothing: bodies and answers are those of OpenAI's own paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route

DEPLOYED_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
UNDEPLOYED_PATHS = ("/v1/models", "/v1/responses")  # and those below them


def azure_routes(routes: Iterable[Route]) -> tuple[Route, ...]:
    """Return the routes of Azure's paths for these routes of OpenAI's."""
    return tuple(azure for route in routes if (azure := _azure_route(route)) is not None)


def _azure_route(route: Route) -> Route | None:
    tail = route.path.removeprefix("/v1")
    if route.path in DEPLOYED_PATHS and route.method == "POST" and route.reader is not None:
        path, reader = "/deployments/{model}" + tail, _with_deployment(route.reader)
        return replace(route, path=path, reader=reader, model_reader=None, body_paths=(route.path,))
    if any(route.path == path or route.path.startswith(path + "/") for path in UNDEPLOYED_PATHS):
        return replace(route, path=tail, body_paths=(route.path,) if route.reader is not None else ())
    return None


def _with_deployment(
    read_body: Callable[[bytes, RequestContext], Reply],
) -> Callable[[bytes, RequestContext], Reply]:
    """Return a reader of requests for the model in the path."""

    def read_for_deployment(body: bytes, context: RequestContext) -> Reply:
        reply = read_body(body, context)
        reply.request.model = context.path_parts["model"]
        return reply

    return read_for_deployment
