"""The paths of all APIs, from the same tables as a single server's. Reads a body only to distinguish APIs that share a
path, and only when the answer depends on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.routing import compile_path

from parley.dialects.dialect import Dialect, Kind, Route
from parley.dialects.mounts import Surface, members, table, wording
from parley.errors import NotAllowed, NotFound, excerpt

# Paths of an instance that only coordinators may call.
WITHIN: frozenset[Kind] = frozenset({"results", "results_flow", "role", "instance_status"})


class Path:
    """A method and path with the routes of all its APIs; the first route answers unless another claims the body."""

    def __init__(self, answering: Sequence[tuple[Route, Surface]]):
        self._answering = answering
        self._default = next((each for each in answering if not each[0].yields), answering[0])
        self.route, self.dialect = self._default[0], self._default[1].dialect
        kinds = {route.kind for route, _ in answering}
        self.kind: Kind | None = self.route.kind if len(kinds) == 1 else None  # None: depends on the body
        self.shares = any(route.shares for route, _ in answering)

    def pick(self, body: bytes) -> tuple[Route, Dialect]:
        """Return the route and API that a body belongs to."""
        if len(self._answering) == 1:
            return self.route, self.dialect
        names = members(body)
        claiming = (each for each in self._answering if not names.isdisjoint(each[0].claims))
        route, surface = next(claiming, self._default)
        return route, surface.dialect


class Paths:
    """All paths of some surfaces, except those between a coordinator and its instances."""

    def __init__(self, surfaces: Sequence[Surface]):
        self._surfaces = surfaces
        self._plain: dict[tuple[str, str], Path] = {}
        self._patterns: list[tuple[Any, str, Path]] = []
        for (method, path), answering in table(surfaces).items():
            found = Path(answering)
            if found.kind in WITHIN:
                continue
            for each in (method, "HEAD") if method == "GET" else (method,):
                if "{" in path:
                    self._patterns.append((compile_path(path)[0], each, found))
                else:
                    self._plain.setdefault((each, path), found)

    def find(self, method: str, path: str) -> tuple[Path, Mapping[str, str]]:
        """Match a path; also return its named segments. Raises NotFound, NotAllowed."""
        found = self._plain.get((method, path))
        if found is not None:
            return found, {}
        others = {known for known, where in self._plain if where == path}
        for pattern, known, found in self._patterns:
            match = pattern.match(path)
            if match is None:
                continue
            if known == method:
                return found, match.groupdict()
            others.add(known)
        if not others:
            raise NotFound(f"Unknown request URL: {method} {excerpt(path)}. Please check it for typos.")
        raise NotAllowed(f"{method} is not allowed on {excerpt(path)}.", allowed=", ".join(sorted(others)))

    def wording(self, path: str) -> Dialect:
        """Return the API whose error format applies to an unknown path."""
        for (_, known), found in self._plain.items():
            if known == path:
                return found.dialect
        return wording([each for each in self._surfaces if each.dialect.name != "parley"], path)
