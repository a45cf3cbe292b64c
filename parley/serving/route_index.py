"""Finds the route of a request's path. Knows nothing about what routes do."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send


class FixedPath(BaseRoute):
    """The route of a path without parameters, which is compared. Starlette's would compile a pattern of each path."""

    def __init__(self, path: str, endpoint: ASGIApp, method: str):
        self.path, self.app = path, endpoint
        self.methods = {"GET", "HEAD"} if method == "GET" else {method}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether it has the path of a request, and its method as well."""
        if scope["path"] != self.path:
            return Match.NONE, {}
        return Match.FULL if scope["method"] in self.methods else Match.PARTIAL, {"path_params": {}}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises HTTPException if the method is another one."""
        if scope["method"] not in self.methods:
            raise HTTPException(405)
        await self.app(scope, receive, send)


class RouteIndex:
    """An ASGI application that passes a request to the first of its routes that matches.

    A path without parameters is looked up, and of those with parameters only the ones are tried that begin with the
    same segment. Trying hundreds of routes would take a quarter as long as a short request.

    ``endpoints``: by method and path, as in ``Dialect.routes``. ``unmatched``: answers all other requests.
    """

    def __init__(self, endpoints: Iterable[tuple[tuple[str, str], ASGIApp]], unmatched: ASGIApp):
        self._unmatched = unmatched
        self._fixed: dict[str, list[BaseRoute]] = {}
        patterns: list[tuple[str, BaseRoute]] = []
        for (method, path), endpoint in endpoints:
            if "{" in path:
                patterns.append((_first_segment(path), StarletteRoute(path, endpoint, methods=[method])))
            else:
                self._fixed.setdefault(path, []).append(FixedPath(path, endpoint, method))
        self._patterns = {
            segment: [route for first, route in patterns if first == segment or "{" in first]
            for segment in {first for first, _ in patterns}
        }
        self._other_patterns = [route for first, route in patterns if "{" in first]

    def match_routes(self, scope: Scope) -> list[tuple[BaseRoute, Match, Scope]]:
        """Return the routes of a request's path, maybe with other methods, and what they add to its scope."""
        path: str = scope["path"]
        patterns = self._patterns.get(_first_segment(path), self._other_patterns)
        tried = ((route, *route.matches(scope)) for route in (*self._fixed.get(path, ()), *patterns))
        return [tried_route for tried_route in tried if tried_route[1] is not Match.NONE]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises HTTPException if the path has only routes of other methods."""
        matching = self.match_routes(scope)
        if not matching:
            await self._unmatched(scope, receive, send)
            return
        route, _, child_scope = next((found for found in matching if found[1] is Match.FULL), matching[0])
        scope.update(child_scope)
        await route.handle(scope, receive, send)


def _first_segment(path: str) -> str:
    return path.removeprefix("/").partition("/")[0]
