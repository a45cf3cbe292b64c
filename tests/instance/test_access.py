"""Strangers at the planes of an instance: they neither command it, nor change it, nor learn its state."""

from __future__ import annotations

import asyncio
from ipaddress import ip_network
from typing import Any

import pytest
from support.http_client import HELLO_CHAT, RunningServer

from parley.boot.listening_places import find_unprotected_port, listening_places
from parley.dialects.mounts import ADMIN_PLANES, DEDICATED_APIS, dedicated_mounts
from parley.disagg.wire.role import InstanceAddress
from parley.instance.prefill_stage import SEND_FAILED, UNKNOWN_TARGET
from parley.serving.server_options import ListenAddress, ServerOptions
from parley.web.tls.files import TlsFiles

SECRET = {"parley-secret": "s"}
COMMAND = {"req-id": "1a", "req-type": "prefill"}
CERTIFIED = TlsFiles("cert", "key", client_authorities=("ca",))  # type: ignore[arg-type]
HERE, NOT_HERE = (ip_network("127.0.0.0/8"),), (ip_network("10.0.0.0/8"),)


class Sink:
    """A listener that counts connections."""

    def __init__(self) -> None:
        self.connections = 0

    async def __aenter__(self) -> Sink:
        self._server = await asyncio.start_server(self._count, "0.0.0.0", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _count(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.close()


async def command(server: RunningServer, target: str, **headers: str) -> Any:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 8}
    return await server.post("/v1/completions", body, **COMMAND, **{"d-target": target}, **headers)


@pytest.mark.parametrize(
    ("options", "names_the_port"),
    [
        ({"host": "10.0.0.1"}, "commands at 10.0.0.1 port 8000, which anyone can reach"),
        ({"host": "0.0.0.0", "api_keys": ("k",)}, "commands at 0.0.0.0 port 8000, which anyone can reach"),
        ({"host": "127.0.0.1", "api_keys": ("k",)}, "8000, which anyone on this machine can reach without an API key"),
        ({"listen": (ListenAddress("mindie-management", "::", 1026),)}, "commands at :: port 1026"),
        (
            {"port": None, "listen": (ListenAddress("mindie", "10.0.0.1", 1, CERTIFIED),)},
            "handovers at 10.0.0.1 port 1121",
        ),
        ({"host": "10.0.0.1", "peer_tls": CERTIFIED}, "commands at 10.0.0.1 port 8000"),
        ({"host": "127.0.0.1"}, ""),
        ({"host": "0.0.0.0", "cluster_secret": "s"}, ""),
        ({"host": "0.0.0.0", "cluster_networks": NOT_HERE}, ""),
        ({"port": None, "peer_tls": CERTIFIED, "listen": (ListenAddress("mindie", "10.0.0.1", 1, CERTIFIED),)}, ""),
        ({"host": "0.0.0.0", "role": "mixed", "peer_port": None}, ""),
    ],
)
def test_refuses_to_start_an_instance_that_is_open_to_strangers(options: dict[str, Any], names_the_port: str) -> None:
    server_options = ServerOptions(**({"role": "prefill", "peer_port": 1121} | options))
    text = find_unprotected_port(server_options, listening_places(server_options))
    assert names_the_port in text and ("--cluster-network" in text) == bool(names_the_port)


async def test_prefill_connects_only_to_known_instances(serve) -> None:
    """A d-target is an order to connect: a stranger could search a network with it."""
    async with Sink() as sink:
        here = f"127.0.0.1;{sink.port}"
        for options in ({"cluster_networks": HERE, "host": "0.0.0.0"}, {}):
            server = await serve(role="prefill", **options)
            answer = await command(server, f"10.255.255.1;{sink.port}")
            assert (answer.status, answer.error["message"]) == (
                500,
                SEND_FAILED + UNKNOWN_TARGET.format(f"10.255.255.1;{sink.port}"),
            )
        server = await serve(role="prefill", host="0.0.0.0", cluster_networks=NOT_HERE)
        assert (await command(server, here)).status == 401  # it does not come from the network
        server = await serve(role="prefill", cluster_secret="s")
        assert (await command(server, here)).status == 401
        server = await serve(role="prefill", cluster_secret="s", cluster_networks=(ip_network("127.0.0.1/32"),))
        assert "not a known instance" in (await command(server, f"127.0.0.2;{sink.port}")).error["message"]
        assert sink.connections == 0
        await command(server, here)
        assert sink.connections == 1


async def test_peers_of_the_role_are_known_instances(serve) -> None:
    async with Sink() as sink:
        server = await serve(role="prefill", cluster_secret="s", cluster_networks=(ip_network("127.0.0.1/32"),))
        target = InstanceAddress("127.0.0.3", sink.port)
        assert "not a known instance" in (await command(server, str(target))).error["message"]
        server.instance_state.role.link_states[target] = "ok"
        await command(server, str(target))
        assert sink.connections == 1


async def test_strangers_neither_compute_nor_read_at_an_instance_of_a_cluster(serve) -> None:
    """Clients without keys call the coordinator, whose own port decides which there are."""
    for guard in ({"cluster_secret": "s"}, {"cluster_networks": NOT_HERE}):
        server = await serve(host="0.0.0.0", **guard)
        for path in ("/v1/models", "/metrics", "/v1/status"):
            assert (await server.get(path)).status == 401, path
        assert (await server.post("/v1/chat/completions", HELLO_CHAT)).status == 401
        for probe in ("/health", "/health/live", "/health/ready", "/ping"):
            assert (await server.get(probe)).status == 200
    server = await serve(host="0.0.0.0", cluster_secret="s")
    assert (await server.post("/v1/chat/completions", HELLO_CHAT, **SECRET)).status == 200
    keyed = await serve(host="0.0.0.0", cluster_secret="s", api_keys=("k",))
    assert (await keyed.get("/v1/models", authorization="Bearer k")).status == 200
    assert (await keyed.get("/v1/status", authorization="Bearer k")).status == 401  # a client is no member
    assert (await keyed.get("/v1/status", **SECRET)).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
async def test_only_the_cluster_changes_an_instance_without_admin_keys(serve, host: str) -> None:
    server = await serve(host=host, cluster_secret="s")
    assert (await server.post("/reset_prefix_cache", {})).status in (401, 403)
    assert (await server.post("/reset_prefix_cache", {}, **SECRET)).status == 200
    forwarded = SECRET | {"parley-forwarded": "public"}
    assert (await server.post("/reset_prefix_cache", {}, **forwarded)).status == 403
    assert (await server.post("/reset_prefix_cache", {}, **forwarded | {"parley-forwarded": "private"})).status == 200


async def test_strangers_do_not_change_a_server_without_keys(serve) -> None:
    server = await serve(host="0.0.0.0")
    assert (await server.post("/v1/chat/completions", HELLO_CHAT)).status == 200
    answer = await server.post("/reset_prefix_cache", {})
    assert answer.status == 403 and "--admin-key-file" in answer.body.decode()
    management = dedicated_mounts("mindie-management", apis={**DEDICATED_APIS, **ADMIN_PLANES})
    server = await serve(host="0.0.0.0", surfaces=management)
    assert (await server.get("/stopService")).status == 403
    here = await serve()
    assert (await here.post("/reset_prefix_cache", {})).status == 200


async def test_hosts_outside_the_cluster_network_open_no_link(serve) -> None:
    from parley.boot.server import make_peer

    peer = make_peer(ServerOptions(cluster_networks=NOT_HERE))
    try:
        await peer.listen("127.0.0.1", 0, lambda receiver: asyncio.sleep(0))
        reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
        writer.write(b"parley-kv 1 link" + bytes(32))
        assert await reader.read() == b""
        writer.close()
    finally:
        await peer.close_peer()
