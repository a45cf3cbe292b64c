"""The paths of all APIs, from the same tables as a single server's. Reads a body only to distinguish APIs that share a
path, and only when the answer depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from starlette.routing import compile_path

from parley.dialects.dialect import Dialect
from parley.dialects.mounts import (
    ApiMount,
    error_dialect,
    join_name_segments,
    mount_table,
    non_null_members,
    route_scope,
    split_name_segments,
)
from parley.dialects.route import Route, RouteKind
from parley.errors import NotAllowed, NotFound, excerpt

# Paths of an instance that only coordinators may call.
INTERNAL_KINDS: frozenset[RouteKind] = frozenset({"results", "results_flow", "role", "instance_status"})


class ApiPath:
    """A method and path with the routes of all its APIs; the first route answers unless another claims the body.

    ``is_open``: every client may call all of them. ``depends_on_main_model``: an instance's main model decides which of
    them answers.
    """

    def __init__(self, routes: Sequence[tuple[Route, ApiMount]]):
        self._page = next((route for route, _ in routes if route.kind == "page"), None)
        routes = [mounted for mounted in routes if mounted[0].kind != "page"] or routes
        others = [mounted for mounted in routes if not mounted[0].for_encoders]  # an instance knows its main model
        self.depends_on_main_model = 0 < len(others) < len(routes)
        routes = others or routes
        self._routes = routes
        self._default_route = next((mounted for mounted in routes if not mounted[0].yields_unclaimed), routes[0])
        self.route, self.dialect = self._default_route[0], self._default_route[1].dialect
        kinds = {route.kind for route, _ in routes}
        self.kind: RouteKind | None = self.route.kind if len(kinds) == 1 else None  # None: depends on the body
        self.is_open = all(route_scope(route) == "open" for route, _ in routes)
        self.names_endpoint = any(route.names_endpoint for route, _ in routes)
        self._needs_one_task = len({route.suitable_tasks for route, _ in routes}) == 1

    def find_page(self, headers: Mapping[bytes, bytes]) -> Route | None:
        """Return the page that a request is for, None if it is for an API."""
        page = self._page
        return page if page is not None and (not page.claims or page.claims_accept(headers)) else None

    @property
    def has_one_route(self) -> bool:
        """Whether the path belongs to one API only."""
        return len(self._routes) == 1

    def route_for_model(self, body: bytes, headers: Mapping[bytes, bytes]) -> Route:
        """Return a route that needs the same model as the one that a request belongs to."""
        return self.route if self._needs_one_task else self.pick_route(body, headers)[0]

    def named_model(self, route: Route, body: bytes, path_params: Mapping[str, str]) -> str | None:
        """Return the model or endpoint that a request names in its path, or in its body where only the route knows;
        None if its body has to be searched."""
        if self.names_endpoint:
            endpoint = path_params.get("endpoint")
            return endpoint or (route.model_reader(body) if route.model_reader is not None else "")
        return (
            path_params.get("model")
            or path_params.get("endpoint")
            or (route.model_reader(body) if route.kind == "info" and route.model_reader is not None else None)
        )

    def pick_route(self, body: bytes, headers: Mapping[bytes, bytes]) -> tuple[Route, Dialect]:
        """Return the route and API that a request belongs to."""
        if self.has_one_route:
            return self.route, self.dialect
        names = non_null_members(body)
        claiming = (mounted for mounted in self._routes if mounted[0].claims_request(names, headers))
        route, mount = next(claiming, self._default_route)
        return route, mount.dialect


class PathTable:
    """All paths of some mounts, except those between a coordinator and its instances."""

    def __init__(self, mounts: Sequence[ApiMount]):
        self._mounts = mounts
        self._plain: dict[tuple[str, str], ApiPath] = {}
        self._patterns: list[tuple[Any, str, ApiPath]] = []
        for (method, path), routes in mount_table(mounts).items():
            api_path = ApiPath(routes)
            if api_path.kind in INTERNAL_KINDS:
                continue
            for verb in (method, "HEAD") if method == "GET" else (method,):
                if "{" in path:
                    self._patterns.append((compile_path(path)[0], verb, api_path))
                else:
                    self._plain.setdefault((verb, path), api_path)

    @property
    def fixed_paths(self) -> Mapping[tuple[str, str], ApiPath]:
        """The paths without parameters, by method and path."""
        return self._plain

    def match_path(
        self, method: str, path: str, model_names: Callable[[], Iterable[str]] = tuple
    ) -> tuple[ApiPath, Mapping[str, str]]:
        """Match a path; also return its named segments. Raises NotFound, NotAllowed.

        ``model_names``: the names of models, which may have slashes.
        """
        api_path = self._plain.get((method, path))
        if api_path is not None:
            return api_path, {}
        other_methods = {known_method for known_method, known_path in self._plain if known_path == path}
        match = self._match_patterns(method, path, other_methods)
        if match is None and not other_methods:
            match = self._match_patterns(method, join_name_segments(path, model_names()), other_methods)
        if match is not None:
            return match
        if not other_methods:
            raise NotFound(f"Unknown request URL: {method} {excerpt(path)}. Please check it for typos.")
        raise NotAllowed(f"{method} is not allowed on {excerpt(path)}.", allowed=", ".join(sorted(other_methods)))

    def _match_patterns(
        self, method: str, path: str, other_methods: set[str]
    ) -> tuple[ApiPath, Mapping[str, str]] | None:
        """Match a path with parameters; also return these. Adds the methods of other matches to ``other_methods``."""
        for pattern, known_method, api_path in self._patterns:
            match = pattern.match(path)
            if match is None:
                continue
            if known_method == method:
                return api_path, split_name_segments(match.groupdict())
            other_methods.add(known_method)
        return None

    def error_dialect(self, path: str) -> Dialect:
        """Return the API whose error format applies to an unknown path."""
        for (_, known_path), api_path in self._plain.items():
            if known_path == path:
                return api_path.dialect
        return error_dialect([mount for mount in self._mounts if mount.dialect.name != "parley"], path)
