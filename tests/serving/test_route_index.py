"""The index of routes finds what trying one route after the other finds."""

from __future__ import annotations

import asyncio

from hypothesis import example, given
from hypothesis import strategies as st
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute

from parley.serving.route_index import RouteIndex

PATHS = (
    "/",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/models/{model}/ready",
    "/v1/{kind}/all",
    "/v2/models/{model}/generate",
    "/{model}/info",
    "/{any:path}",
)
SEGMENT = st.sampled_from(
    ["", "v1", "v2", "models", "model", "ready", "all", "info", "generate", "a b", "{model}", "v1.0"]
)
PATH = st.lists(SEGMENT, max_size=5).map(lambda segments: "/" + "/".join(segments))


class Endpoint:
    """Notes that it was called."""

    def __init__(self, name: str, calls: list[tuple[str, dict[str, str]]]):
        self.name, self.calls = name, calls

    async def __call__(self, scope, receive, send):
        self.calls.append((self.name, scope.get("path_params")))


@given(
    routes=st.lists(
        st.tuples(st.sampled_from(["GET", "POST"]), st.sampled_from(PATHS)), min_size=1, max_size=10, unique=True
    ),
    method=st.sampled_from(["GET", "POST"]),
    path=PATH | st.sampled_from(["*", "v1/models"]),
)
@example([("POST", "/v1/models"), ("GET", "/v1/models/{model}"), ("GET", "/{any:path}")], "GET", "/v1/models")
def test_index_finds_the_route_that_trying_all_finds(routes, method, path):
    calls = []
    index = RouteIndex(
        [(key, Endpoint(" ".join(key), calls)) for key in routes], unmatched=Endpoint("unmatched", calls)
    )
    scope = {"type": "http", "method": method, "path": path, "headers": []}
    fixed_first = sorted(routes, key=lambda route: "{" in route[1])
    tried = [(key, StarletteRoute(key[1], Endpoint("", []), methods=[key[0]]).matches(scope)) for key in fixed_first]
    matching = [(key, match, child) for key, (match, child) in tried if match is not Match.NONE]
    assert [match for _, match, _ in index.match_routes(scope)] == [match for _, match, _ in matching]
    full = [(" ".join(key), child["path_params"]) for key, match, child in matching if match is Match.FULL]
    if full or not matching:
        asyncio.run(index(scope, None, None))
        assert calls == (full[:1] or [("unmatched", None)])
