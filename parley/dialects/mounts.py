"""The table that mounts each API at a path, and the lookup of a route by method, path and body members.

Adding an API takes one line in ``API_MOUNTS``. Servers and the coordinator of a cluster read the same table, so this
module knows routes and no handlers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from parley.dialects import anthropic, cohere, databricks, mindie, ollama, openai, tei, tgi, triton, vllm
from parley.dialects.dialect import Dialect
from parley.dialects.json_body import check_json_size
from parley.dialects.openapi_document import OpenApiDocument
from parley.dialects.route import Route, RouteKind
from parley.dialects.triton.calls import GRPC_CALLS

# Routes of the server itself, whichever APIs are mounted.
SERVER_ROUTES = (
    Route("GET", "/health", "health"),
    Route("GET", "/health/live", "live"),
    Route("GET", "/health/ready", "ready"),
    Route("GET", "/metrics", "metrics"),
    Route("GET", "/v1/usage", "usage"),
)
# The web page of a server: where a path belongs to an API as well, for clients that name HTML in their header Accept.
PAGE_ROUTES = (
    Route("GET", "/", "page", claiming_media_type=b"text/html"),
    Route("GET", "/docs", "page", claiming_media_type=b"text/html"),
    Route("GET", "/ui", "page"),
    Route("GET", "/ui/status", "page"),
    Route("GET", "/ui/activity", "activity"),
    Route("GET", "/ui/{file:path}", "page"),
)
# Who may call a route. "open": everyone, if every route of the path is open. "client": every client with an API key.
# "cluster": the same, and the handler checks the cluster secret. "admin": only clients that may change the server or
# its models.
RouteScope = Literal["open", "client", "cluster", "admin"]
ROUTE_SCOPES: dict[RouteKind, RouteScope] = {
    "generate": "client",
    "embed": "client",
    "render": "client",
    "tokenize": "client",
    "detokenize": "client",
    "models": "client",
    "model": "client",
    "tokenizer": "client",
    "version": "client",
    "server_info": "client",
    "abort": "client",  # of the client's own requests
    "abort_list": "client",  # as well
    "adapter": "admin",
    "load": "client",
    "reset": "admin",
    "reset_media": "admin",
    "health": "open",
    "live": "open",
    "ready": "open",
    "socket": "client",
    "stored": "client",  # the client's own records
    "info": "client",
    "summed_info": "client",
    "endpoint": "admin",  # GET: "client"
    "probe": "open",
    "self_test": "client",
    "pause": "admin",
    "pull": "client",
    "stop": "admin",
    "metrics": "client",
    "page": "open",
    "activity": "client",
    "usage": "admin",
    "results": "cluster",
    "results_flow": "cluster",
    "role": "admin",
    "instance_status": "client",
}


def route_scope(route: Route) -> RouteScope:
    """Return who may call a route. Raises KeyError for a kind without a scope."""
    return "client" if route.kind == "endpoint" and route.method == "GET" else ROUTE_SCOPES[route.kind]


@dataclass(frozen=True)
class ApiMount:
    """An API mounted below a path prefix. All APIs with the empty prefix share the root."""

    prefix: str
    dialect: Dialect


API_MOUNTS = (
    ApiMount("", openai.DIALECT),
    ApiMount("", anthropic.DIALECT),  # before vLLM, whose strict form has its routes
    ApiMount("", vllm.DIALECT),
    ApiMount("", tgi.DIALECT),
    ApiMount("/openai", openai.STRICT),
    ApiMount("", triton.DIALECT),
    ApiMount("/tgi", tgi.STRICT),
    ApiMount("/tgi-0.9.4", tgi.OLD),
    ApiMount("/triton", triton.STRICT),
    ApiMount("", databricks.DIALECT),
    ApiMount("/databricks", databricks.STRICT),
    ApiMount("/vllm", vllm.STRICT_DIALECT),
    ApiMount("/vllm-0.6.3", vllm.DEMO_DIALECT),
    ApiMount("", mindie.DIALECT),
    ApiMount("/mindie", mindie.STRICT),
    ApiMount("/mindie-old", mindie.OLD),
    ApiMount("", ollama.DIALECT),
    ApiMount("/ollama", ollama.STRICT),
    ApiMount("/ollama", openai.DIALECT),  # Ollama serves these two at /v1, and clients append that to its address
    ApiMount("/ollama", anthropic.DIALECT),
    ApiMount("", tei.DIALECT),
    ApiMount("/tei", tei.STRICT),
    ApiMount("/anthropic", anthropic.STRICT),
    ApiMount("", cohere.DIALECT),
    ApiMount("/cohere", cohere.STRICT),
)

API_NAMES = tuple(dict.fromkeys(mount.dialect.name for mount in API_MOUNTS))  # as API keys may be limited to them
INSTANCE_PLANE = mindie.INSTANCE_PLANE  # the routes between instances and coordinators
COORDINATOR_TEXTS = mindie.COORDINATOR_TEXTS  # the texts of a coordinator's own errors
BODY_FAULT = mindie.BODY_FAULT  # finds the error in a body that a strict coordinator refuses
# Routes of the server itself and of its instance plane.
SERVER_MOUNT = ApiMount(
    "",
    replace(
        openai.DIALECT,
        name="parley",
        title="parley",
        routes=(*SERVER_ROUTES, *INSTANCE_PLANE.routes),
        body_schemas="",
        no_memory_body=b"",
    ),
)
PAGE_MOUNT = ApiMount("", replace(SERVER_MOUNT.dialect, routes=PAGE_ROUTES))
DOCUMENT_PATH = "/openapi.json"  # below each prefix, the OpenAPI document of the APIs there
INNER_MOUNTS = (SERVER_MOUNT, ApiMount("", GRPC_CALLS))  # in addition to the APIs


def is_api(mount: ApiMount) -> bool:
    """True for the mount of an API, which the server's own routes are not."""
    return mount not in INNER_MOUNTS and mount.dialect.name != SERVER_MOUNT.dialect.name


# APIs that are served only at ports of their own: their clients may stop the server.
ADMIN_PLANES = {dialect.name: dialect for dialect in (mindie.MANAGEMENT, mindie.METRICS)}


def _dialects_by_prefix() -> dict[str, Dialect]:
    """Return the API of each prefix, which is the first one that is mounted there."""
    dialects: dict[str, Dialect] = {}
    for mount in API_MOUNTS:
        if mount.prefix:
            dialects.setdefault(mount.prefix[1:], mount.dialect)
    return dialects


DEDICATED_APIS = _dialects_by_prefix() | ADMIN_PLANES


SLASH_MARK = "\x1f"  # a slash of a model's name while a path is matched
DEFAULT_TAGS = tuple(sorted({mount.dialect.default_tag for mount in API_MOUNTS} - {""}))
NAME_PREFIXES = tuple(sorted({prefix for mount in API_MOUNTS for prefix in mount.dialect.name_prefixes}))


def model_spellings(name: str) -> tuple[str, ...]:
    """Return the names that mean the same model as ``name``, itself first: with and without a default tag, and without
    a prefix that it may have."""
    names = [name, *(name.removeprefix(prefix) for prefix in NAME_PREFIXES if name.startswith(prefix))]
    bare_names = [name.removesuffix(tag) for name in names for tag in DEFAULT_TAGS if name.endswith(tag)]
    return (*names, *bare_names, *(name + tag for name in names for tag in DEFAULT_TAGS))


ANY_MODEL_NAME = re.compile("|".join(filter(None, (mount.dialect.any_model for mount in API_MOUNTS))), re.DOTALL)


def names_any_model(name: str, known_names: Collection[str]) -> bool:
    """Whether a request that names its model so leaves the choice to the server: it names none, or a placeholder, and
    no model has that name."""
    return (not name or bool(ANY_MODEL_NAME.fullmatch(name))) and known_spelling(name, known_names) is None


def known_spelling(name: str, known_names: Collection[str]) -> str | None:
    """Return the spelling of a model's name that is among the known names, None if there is none. Capital letters
    matter only between known names that differ in nothing else."""
    if name in known_names:
        return name
    if not name:
        return None
    spellings = model_spellings(name)
    exact = next((spelling for spelling in spellings if spelling in known_names), None)
    if exact is not None:
        return exact
    folded = {spelling.casefold() for spelling in spellings}
    return next((known_name for known_name in known_names if known_name.casefold() in folded), None)


def join_name_segments(path: str, known_names: Iterable[str]) -> str:
    """Return a path in which the name of a model is one segment: marks take the place of the slashes in a name such as
    ``owner/name``. The path itself if it has no such name."""
    for name in sorted((name for name in known_names if "/" in name), key=len, reverse=True):
        before, slashed_name, after = f"{path}/".partition(f"/{name}/")
        if slashed_name:
            return f"{before}/{name.replace('/', SLASH_MARK)}/{after}"[:-1]
    return path


def split_name_segments(path_params: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a path from ``join_name_segments`` with the names of models as they are."""
    return {name: value.replace(SLASH_MARK, "/") for name, value in path_params.items()}


def universal_mounts(strict: bool = False, tgi_compat: str = "3", pages: bool = False) -> tuple[ApiMount, ...]:
    """Return the mounts of a server's main port: every API.

    ``strict``: the root has the strict form of each API. ``tgi_compat``: the version of TGI at the root. ``pages``: the
    web page as well.
    """
    dialects = dict(DEDICATED_APIS) if strict else {}
    if tgi_compat != "3":
        dialects["tgi"] = DEDICATED_APIS[f"tgi-{tgi_compat}"]
    apis = (
        mount if mount.prefix else ApiMount("", dialects.get(mount.dialect.name, mount.dialect)) for mount in API_MOUNTS
    )
    own, calls = INNER_MOUNTS
    mounts = with_documents((own, *apis, calls))
    return (*mounts, PAGE_MOUNT) if pages else mounts


def dedicated_mounts(*names: str, apis: Mapping[str, Dialect] = DEDICATED_APIS) -> tuple[ApiMount, ...]:
    """Return the mounts of a port for these APIs alone: they are at the root, and the server's own routes follow."""
    return with_documents((*(ApiMount("", apis[name]) for name in names), SERVER_MOUNT))


def with_documents(mounts: Sequence[ApiMount]) -> tuple[ApiMount, ...]:
    """Return the mounts with a route for the OpenAPI document of each prefix."""
    documents = []
    for prefix in dict.fromkeys(mount.prefix for mount in mounts):
        apis = [mount for mount in mounts if mount.prefix == prefix and mount.dialect is not GRPC_CALLS]
        public_routes: dict[tuple[str, str], list[tuple[Route, Dialect]]] = {}
        for (method, path), answering in mount_table([ApiMount("", mount.dialect) for mount in apis]).items():
            public_here = [(route, mount.dialect) for route, mount in answering if route not in INSTANCE_PLANE.routes]
            if public_here:
                public_routes[method, path] = public_here
        titles = dict.fromkeys(mount.dialect.title for mount in apis if mount != SERVER_MOUNT)
        title = next(iter(titles)) if len(titles) == 1 else SERVER_MOUNT.dialect.title
        reader = OpenApiDocument(title, prefix or "/", public_routes)
        documents.append(Route("GET", prefix + DOCUMENT_PATH, "info", reader=reader))
    return (*mounts, ApiMount("", replace(SERVER_MOUNT.dialect, routes=tuple(documents))))


def non_null_members(body: bytes) -> set[str]:
    """Return the names of a body's top-level members that are not null; none if the body is not a JSON object."""
    try:
        check_json_size(body)
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return set()
    return {name for name, value in values.items() if bytes(value) != b"null"}


def mount_table(mounts: Sequence[ApiMount]) -> dict[tuple[str, str], list[tuple[Route, ApiMount]]]:
    """Map each method and path to its routes: the first that is mounted there, then those that claim some bodies or
    are for encoders. One that claims by a header is never before one that claims nothing. A route with errors of its
    own form comes with an API of that form."""
    routes_by_path: dict[tuple[str, str], list[tuple[Route, ApiMount]]] = {}
    for api_mount in mounts:
        for route in api_mount.dialect.routes:
            mount = _with_errors_of(route, api_mount)
            for path in _mounted_paths(mount.prefix, route.path):
                path_routes = routes_by_path.setdefault((route.method, path), [])
                if not path_routes or route.claims or route.for_encoders:
                    path_routes.append((route, mount))
                elif path_routes[0][0].claiming_header:
                    path_routes.insert(0, (route, mount))
    return routes_by_path


def _with_errors_of(route: Route, mount: ApiMount) -> ApiMount:
    """Return the mount of a route, with the form of its errors."""
    if route.render_error is None:
        return mount
    return replace(mount, dialect=replace(mount.dialect, render_error=route.render_error))


def _mounted_paths(prefix: str, path: str) -> tuple[str, ...]:
    """Return the paths of a route below a prefix. The root is mounted with and without its slash, as base URLs vary."""
    return (prefix, prefix + path) if prefix and path == "/" else (prefix + path,)


def error_dialect(mounts: Sequence[ApiMount], path: str) -> Dialect:
    """Return the API whose error format applies to a path without a route."""
    roots = [(mount.prefix, mount.dialect) for mount in mounts]
    roots += [
        (mount.prefix + base, mount.dialect)
        for mount in mounts
        for base in (mount.dialect.base_path, *mount.dialect.other_bases)
    ]
    fitting = [(root, dialect) for root, dialect in roots if path == root or path.startswith(root + "/")]
    return max(fitting, key=lambda pair: len(pair[0]), default=roots[0])[1]
