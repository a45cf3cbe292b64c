"""Which API is mounted where: one table of surfaces, and what it makes of a method, a path and a body's members.

An API is added by a line in ``SURFACES``. Knows the APIs' tables and nothing of what answers: the coordinator of a
cluster reads the same table as a server does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from parley.dialects import databricks, mindie, openai, tgi, triton, vllm
from parley.dialects.dialect import Dialect, Route, RouteKind
from parley.dialects.triton.calls import GRPC_CALLS

# Paths of the server itself, the same whatever APIs it speaks.
OPERATIONS = (
    Route("GET", "/health", "health"),
    Route("GET", "/health/live", "live"),
    Route("GET", "/health/ready", "ready"),
    Route("GET", "/metrics", "metrics"),
)
OPEN: frozenset[RouteKind] = frozenset(
    {"live", "ready", "probe", "health"}
)  # to clients without a key, if all of a path is
CHANGES: frozenset[RouteKind] = frozenset(
    {"adapter", "reset", "pause", "stop", "endpoint", "role"}
)  # the server, or who is served


def changes(route: Route) -> bool:
    """Whether it takes an admin key, where there are any."""
    return route.kind in CHANGES and not (route.kind == "endpoint" and route.method == "GET")


@dataclass(frozen=True)
class Surface:
    """An API below a path. All that have the empty prefix share the root, which speaks every API."""

    prefix: str
    dialect: Dialect


SURFACES = (
    Surface("", openai.DIALECT),
    Surface("", vllm.DIALECT),
    Surface("", tgi.DIALECT),
    Surface("/openai", openai.DIALECT),
    Surface("", triton.DIALECT),
    Surface("/tgi", tgi.STRICT),
    Surface("/tgi-0.9.4", tgi.OLD),
    Surface("/triton", triton.STRICT),
    Surface("", databricks.DIALECT),
    Surface("/databricks", databricks.STRICT),
    Surface("/vllm", vllm.STRICT_DIALECT),
    Surface("/vllm-0.6.3", vllm.DEMO_DIALECT),
    Surface("", mindie.DIALECT),
    Surface("/mindie", mindie.STRICT),
    Surface("/mindie-old", mindie.OLD),
)

INSTANCE_PLANE = mindie.INSTANCE_PLANE  # how instances of a cluster speak to coordinators
BODY_FAULT = mindie.BODY_FAULT  # what a strict coordinator refuses of a body before an instance sees it
# Paths of the server itself.
OWN = Surface(
    "", replace(openai.DIALECT, name="parley", routes=(*OPERATIONS, *INSTANCE_PLANE.routes), no_memory_body=b"")
)
INNER = (OWN, Surface("", GRPC_CALLS))  # beside the APIs
# APIs that may have a port; some are only ever there, for who reaches them may end the server.
PLANES = {dialect.name: dialect for dialect in (mindie.MANAGEMENT, mindie.METRICS)}
ALONE = {surface.prefix[1:]: surface.dialect for surface in SURFACES if surface.prefix} | PLANES


def universal(strict: bool = False, tgi_compat: str = "3") -> tuple[Surface, ...]:
    """What a server's own port answers: every surface.

    ``strict``: those at the root in the manner of their prefix. ``tgi_compat``: TGI at the root in that version.
    """
    manner = dict(ALONE) if strict else {}
    if tgi_compat != "3":
        manner["tgi"] = ALONE[f"tgi-{tgi_compat}"]
    surfaces = (
        surface if surface.prefix else Surface("", manner.get(surface.dialect.name, surface.dialect))
        for surface in SURFACES
    )
    own, calls = INNER
    return (own, *surfaces, calls)


def alone(*names: str, apis: Mapping[str, Dialect] = ALONE) -> tuple[Surface, ...]:
    """What a port answers that APIs have for themselves: they at the root, and behind them the server's own paths."""
    return (*(Surface("", apis[name]) for name in names), OWN)


def members(body: bytes) -> set[str]:
    """The names of a body's members that are not null, looked at no deeper; none if it is no JSON object."""
    try:
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return set()
    return {name for name, value in values.items() if bytes(value) != b"null"}


def table(surfaces: Sequence[Surface]) -> dict[tuple[str, str], list[tuple[Route, Surface]]]:
    """Every method and path with what answers there: the first that is listed, and others that claim bodies."""
    places: dict[tuple[str, str], list[tuple[Route, Surface]]] = {}
    for surface in surfaces:
        for route in surface.dialect.routes:
            for path in _paths(surface.prefix, route.path):
                place = places.setdefault((route.method, path), [])
                if not place or route.claiming_members:
                    place.append((route, surface))
    return places


def _paths(prefix: str, path: str) -> tuple[str, ...]:
    """Below a prefix the root has no slash of its own: a base URL is written with and without one."""
    return (prefix, prefix + path) if prefix and path == "/" else (prefix + path,)


def wording(surfaces: Sequence[Surface], path: str) -> Dialect:
    """The API that words what is wrong with a request for a path that has no route."""
    roots = [(surface.prefix, surface.dialect) for surface in surfaces]
    roots += [
        (surface.prefix + base, surface.dialect)
        for surface in surfaces
        for base in (surface.dialect.base_path, *surface.dialect.other_bases)
    ]
    fitting = [(root, dialect) for root, dialect in roots if path == root or path.startswith(root + "/")]
    return max(fitting, key=lambda pair: len(pair[0]), default=roots[0])[1]
