"""Who may call each route: every kind of route has a scope, and routes that change the server need an admin key."""

from __future__ import annotations

from typing import get_args

import pytest
from support.http_client import RunningServer, fill_path

from parley.dialects.mounts import (
    DEDICATED_APIS,
    ROUTE_SCOPES,
    ApiMount,
    dedicated_mounts,
    mount_table,
    route_scope,
    universal_mounts,
)
from parley.dialects.route import RouteKind
from parley.errors import Forbidden
from parley.web.auth import NO_ADMIN_KEYS

KEY = "sk-right-key-0123456789"
PORTS: dict[str, tuple[ApiMount, ...]] = {
    "all": universal_mounts(),
    "strict": universal_mounts(strict=True, tgi_compat="0.9.4"),
    **{name: dedicated_mounts(name) for name in DEDICATED_APIS},
}
# Every route that changes the server or its models, below any prefix. A new route of such a kind belongs here.
ADMIN_PATHS = {
    "POST /reset_prefix_cache",
    "POST /reset_mm_cache",
    "GET /v1/usage",
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
    "POST /v1/role/prefill",
    "POST /v1/role/decode",
    "POST /v1/role/flex",
    "POST /v2/role/prefill",
    "POST /v2/role/decode",
    "GET /stopService",
    "POST /v1/engine-server/fault-handling-command",
    "POST /api/2.0/serving-endpoints",
    "POST /api/2.0/serving-endpoints/",
    "POST /api/2.0/serving-endpoints/pt",
    "PUT /api/2.0/serving-endpoints/pt/{endpoint}/config",
    "PUT /api/2.0/serving-endpoints/{endpoint}/ai-gateway",
    "PUT /api/2.0/serving-endpoints/{endpoint}/config",
    "PUT /api/2.0/serving-endpoints/{endpoint}/rate-limits",
    "DELETE /api/2.0/serving-endpoints/{endpoint}",
    "PATCH /api/2.0/serving-endpoints/{endpoint}/tags",
    "PUT /api/2.0/permissions/serving-endpoints/{id}",
    "PATCH /api/2.0/permissions/serving-endpoints/{id}",
}


def admin_routes(port: str) -> list[tuple[str, str, ApiMount]]:
    """List method, path and mount of the routes of a port that need an admin key."""
    return [
        (method, path, surface)
        for (method, path), answering in mount_table(PORTS[port]).items()
        for route, surface in answering
        if route_scope(route) == "admin"
    ]


def test_every_kind_of_route_has_a_scope():
    assert ROUTE_SCOPES.keys() == set(get_args(RouteKind))


def test_lists_every_route_that_changes_the_server():
    listed = {
        f"{method} {path.removeprefix(surface.prefix)}"
        for port in PORTS
        for method, path, surface in admin_routes(port)
    }
    assert listed == ADMIN_PATHS


def test_all_routes_of_a_shared_path_have_the_same_scope():
    for mounts in PORTS.values():
        for place, answering in mount_table(mounts).items():
            assert len({route_scope(route) for route, _ in answering}) == 1, place


async def refused_in_the_apis_form(server: RunningServer, port: str, key: str, sentence: str) -> None:
    for method, path, surface in admin_routes(port):
        answer = await server.call(method, fill_path(path), {}, {"authorization": f"Bearer {key}"})
        expected = surface.dialect.render_error(Forbidden(sentence))
        assert (answer.status, answer.body) == (expected.status, expected.body), (method, path)
        assert expected.status == 403 and b"--admin-key-file" in answer.body, (method, path)


@pytest.mark.parametrize("port", ["all", "strict", "mindie-management"])
async def test_api_keys_cannot_change_a_server_without_admin_keys(serve, port):
    server = await serve(api_keys=(KEY,), surfaces=PORTS[port], lora_root="/")
    await refused_in_the_apis_form(server, port, KEY, NO_ADMIN_KEYS)
    assert not server.service.shutting_down and not server.service.first_unready_model()
    assert (await server.get("/health", authorization=f"Bearer {KEY}")).status == 200


async def test_admin_routes_without_admin_keys_accept_the_cluster_secret(serve):
    server = await serve(api_keys=(KEY,), cluster_secret="s")
    assert (await server.post("/reset_prefix_cache", **{"parley-secret": "t"})).status == 401
    assert (await server.post("/reset_prefix_cache", **{"parley-secret": "s"})).status == 200


@pytest.mark.parametrize("port", ["all", "mindie-management"])
async def test_a_server_without_keys_lets_everyone_change_it(serve, port):
    server = await serve(surfaces=PORTS[port], lora_root="/")
    for method, path, _ in admin_routes(port):
        if path != "/stopService":
            answer = await server.call(method, fill_path(path), {})
            assert answer.status != 401 and b"--admin-key-file" not in answer.body, (method, path)
