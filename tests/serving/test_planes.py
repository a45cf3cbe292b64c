"""Proxies in front of a server, Unix sockets, and ports for metrics and administrators."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from support.http_client import HELLO_CHAT, Connection, build_request

from parley.boot.listening_places import listening_places
from parley.disagg.wire.networks import Network
from parley.serving.app import App
from parley.serving.server_options import ListenAddress, ServerOptions
from parley.serving.trusted_proxies import TrustedProxies, strip_root_path
from parley.settings.option_kinds import endpoint_kind, network_kind, proxy_kind, root_path_kind
from parley.web.port import HttpServer, open_listener, remove_unix_socket, uvicorn_config

PROXIES: tuple[Network, ...] = tuple(map(network_kind().parse_raw, ("10.0.0.0/8", "::1")))


def seen_client(client: Any, **headers: str) -> tuple[str, str]:
    scope: dict[str, Any] = {"type": "http", "client": client, "scheme": "http"}
    names = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    TrustedProxies(PROXIES, trusts_sockets=True).apply_headers(scope, names)
    return (scope["client"] or ("",))[0], scope["scheme"]


@pytest.mark.parametrize(
    ("sender", "headers", "client"),
    [
        ("192.0.2.1", {"x_forwarded_for": "203.0.113.9", "x_forwarded_proto": "https"}, ("192.0.2.1", "http")),
        ("10.0.0.1", {"x_forwarded_for": "203.0.113.9", "x_forwarded_proto": "https"}, ("203.0.113.9", "https")),
        ("10.0.0.1", {"x_forwarded_for": "127.0.0.1, 203.0.113.9, 10.2.3.4"}, ("203.0.113.9", "http")),
        ("10.0.0.1", {"x_forwarded_for": "203.0.113.9, unknown, 10.2.3.4"}, ("10.2.3.4", "http")),
        ("10.0.0.1", {"x_forwarded_for": "10.0.0.7"}, ("10.0.0.7", "http")),
        ("10.0.0.1", {"x_forwarded_for": "", "x_forwarded_proto": "gopher"}, ("10.0.0.1", "http")),
        ("::1", {"forwarded": 'for="[2001:db8::9]:1234";proto=https;by=x'}, ("2001:db8::9", "https")),
        ("::1", {"forwarded": "for=1.2.3.4, for=10.0.0.2;proto=https"}, ("1.2.3.4", "https")),
        ("::1", {"forwarded": "for=1.2.3.4", "x_forwarded_for": "6.6.6.6"}, ("1.2.3.4", "http")),
        ("::1", {"forwarded": 'for="a\\", for=1.1.1.1'}, ("1.1.1.1", "http")),
        ("::1", {"forwarded": 'for="a, for=1.1.1.1;by="x"'}, ("1.1.1.1", "http")),  # a client has opened the quotation
        ("::1", {"forwarded": 'for=6.6.6.6;a=", for="[2001:db8::1]"'}, ("2001:db8::1", "http")),
        ("::ffff:10.0.0.1", {"x_forwarded_for": "203.0.113.9:55"}, ("203.0.113.9", "http")),
        (None, {"x_forwarded_for": "203.0.113.9"}, ("203.0.113.9", "http")),
    ],
)
def test_only_trusted_proxies_say_who_the_client_is(sender, headers, client):
    assert seen_client(None if sender is None else (sender, 1), **headers) == client


@pytest.mark.parametrize(
    ("path", "stripped"),
    [("/llm/v1/models", "/v1/models"), ("/llm", "/"), ("/v1/models", "/v1/models"), ("/llmx", "/llmx")],
)
def test_a_root_path_is_removed_where_the_proxy_has_left_it(path: str, stripped: str):
    scope = {"type": "http", "path": path, "raw_path": path.encode()}
    strip_root_path(scope, "/llm")
    assert (scope["path"], scope["raw_path"]) == (stripped, stripped.encode())


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (root_path_kind(), "/a/b/", "/a/b"),
        (root_path_kind(), "a", None),
        (root_path_kind(), "/", None),
        (root_path_kind(), "/a//b", None),
        (proxy_kind(), "unix", "unix"),
        (proxy_kind(), "nobody", None),
        (endpoint_kind(), "tgi=unix:/run/tgi.sock", ("tgi", "unix:/run/tgi.sock", 0)),
        (endpoint_kind(), "tgi=unix:", None),
        (endpoint_kind(), "tgi=unix:/" + "x" * 120, None),
    ],
)
def test_values_of_these_options(kind, raw, value):
    if value is None:
        with pytest.raises(ValueError, match=r"of the form|path|network"):
            kind.parse_raw(raw)
    else:
        assert kind.parse_raw(raw) == value


async def test_a_server_behind_a_proxy_answers_below_its_root_path(serve):
    server = await serve(root_path="/llm")
    for prefix in ("/llm", ""):
        assert (await server.post(f"{prefix}/v1/chat/completions", HELLO_CHAT)).status == 200
    assert (await server.get("/llm/openapi.json")).json["servers"] == [{"url": "/llm"}]
    assert (await server.get("/tgi/openapi.json")).json["servers"] == [{"url": "/llm/tgi"}]


def test_planes_have_their_routes_and_other_ports_have_the_others():
    options = ServerOptions(
        metrics_port=1,
        admin_port=2,
        listen=(ListenAddress("tgi", "127.0.0.1", 3), ListenAddress("mindie-metrics", "h", 4)),
    )
    main, tgi, mindie, metrics, admin = listening_places(options)
    assert [place.port for place in (main, tgi, mindie, metrics, admin)] == [8000, 3, 4, 1, 2]

    def routes(place: Any) -> set[tuple[str, str]]:
        return {
            (route.method, route.path)
            for mount in place.mounts
            for route in mount.dialect.routes
            if place.serves_route(route)
        }

    open_routes = {("GET", "/health"), ("GET", "/health/live"), ("GET", "/health/ready")}
    assert routes(metrics) == {("GET", "/metrics")} | open_routes
    assert open_routes | {("POST", "/reset_prefix_cache"), ("GET", "/v1/usage")} <= routes(admin)
    for place in (main, tgi):
        assert not {("GET", "/metrics"), ("POST", "/reset_prefix_cache"), ("GET", "/v1/usage")} & routes(place)
    assert ("POST", "/v1/chat/completions") in routes(main) - routes(admin)
    assert ("GET", "/metrics") in routes(mindie)


async def test_a_unix_socket_takes_requests_and_a_stale_one_is_replaced(serve, tmp_path: Path):
    server = await serve()
    host = f"unix:{tmp_path / 'parley.sock'}"
    open_listener(host, 0).close()  # as if the process had been killed
    listener = open_listener(host, 0)
    with pytest.raises(OSError, match="in use"):
        open_listener(host, 0)
    assert stat.S_IMODE((tmp_path / "parley.sock").stat().st_mode) == 0o660
    (place,) = listening_places(ServerOptions(host=host, port=0))
    app: App = server.parts.make_port_app(place.mounts, place.host)
    http_server = HttpServer(uvicorn_config(server.service.options, app))
    task = asyncio.create_task(http_server.serve(sockets=[listener]))
    connection = Connection(*await asyncio.open_unix_connection(host.removeprefix("unix:")))
    await connection.send(build_request("POST", "/v1/chat/completions", HELLO_CHAT))
    answer = await connection.answer()
    assert answer.status == 200 and json.loads(answer.body)["choices"]
    connection.close()
    http_server.should_exit = True
    await task
    remove_unix_socket(listener)
    assert not (tmp_path / "parley.sock").exists()


def test_a_file_at_the_path_of_a_unix_socket_is_left_alone(tmp_path: Path):
    path = tmp_path / "parley.sock"
    path.write_text("of somebody else")
    with pytest.raises(OSError, match="in use"):
        open_listener(f"unix:{path}", 0)
    assert path.read_text() == "of somebody else"
    path.unlink()
    first = open_listener(f"unix:{path}", 0)
    path.unlink()  # so that another server can listen there, while the first one drains
    with first, open_listener(f"unix:{path}", 0) as second:
        remove_unix_socket(first)
        assert path.is_socket()
        remove_unix_socket(second)
    assert not path.exists()
