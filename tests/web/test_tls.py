"""Encrypted ports: client certificates, errors for unusable files, and TLS between instances."""

import asyncio
import contextlib
import json
import os
import shutil
import ssl
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from support.certificates import make_authority, make_certificate, revoke_certificate
from support.http_client import MODEL_INFO, Answer, Connection, build_request

from parley.boot import engine_factories, server
from parley.boot.listening_places import listening_places
from parley.coordinator import config as cluster
from parley.coordinator.tls_contexts import instance_tls_context
from parley.disagg.kv.peer import KVPeer
from parley.disagg.kv.receiver import KVReceiver
from parley.disagg.kv.transport import LinkError
from parley.engine.scripted_engine import ScriptedEngine
from parley.serving.server_options import ListenAddress, OfferedModel, ServerOptions
from parley.types import Arena, ParleySettings
from parley.web import port as port_module
from parley.web.connection_limit import OPENING_SECONDS, ConnectionLimit
from parley.web.http_options import HttpOptions
from parley.web.tls.contexts import LoadedTls, client_tls_context, reload_certificates, server_tls_context
from parley.web.tls.files import TlsFileError, TlsFiles

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="the openssl command makes the certificates")


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ours", "theirs"):
        make_authority(folder, name)
    make_certificate(folder, "server", "ours", password="secret")
    for name, by in (("friend", "ours"), ("fallen", "ours"), ("stranger", "theirs")):
        make_certificate(folder, name, by)
    revoke_certificate(folder, "fallen", "ours")
    (folder / "password").write_text("secret\n")
    (folder / "wrong").write_text("something else")
    (folder / "garbage").write_text("no certificate")
    return folder


def tls_options(folder: Path, **other: object) -> TlsFiles:
    return TlsFiles(folder / "server.pem", folder / "server.key", folder / "password")._replace(**other)


def client_context(folder: Path, name: str = "") -> ssl.SSLContext:
    ssl_context = ssl.create_default_context(cafile=folder / "ours.pem")
    if name:
        ssl_context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return ssl_context


async def get(port: int, secure: ssl.SSLContext | None, path: str = "/health/live") -> Answer:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port, ssl=secure))
    try:
        await connection.send(build_request("GET", path))
        return await connection.answer()
    finally:
        connection.close()


async def test_mutual_tls_admits_only_clients_with_a_valid_certificate(tls_files, folder, monkeypatch, capsys):
    monkeypatch.setitem(
        engine_factories.ENGINE_FACTORIES, "scripted", lambda settings, name: ScriptedEngine(info=MODEL_INFO)
    )
    mutual_options = tls_options(
        tls_files, client_authorities=(tls_files / "ours.pem",), revocation_lists=(tls_files / "crl.pem",)
    )
    listen = (
        ListenAddress("tgi", "127.0.0.1", 0, mutual_options),
        ListenAddress("vllm", "127.0.0.1", 0, tls_options(tls_files)),
    )
    options = ServerOptions(port=None, listen=listen)
    places = listening_places(options)
    sockets = [port_module.open_listener(place.host, place.port) for place in places]
    contexts = [server_tls_context(place.tls) if place.tls else None for place in places]
    mutual, server_only = (sock.getsockname()[1] for sock in sockets)
    instance = server.ServerProcess(
        [OfferedModel(("tiny",), ParleySettings(model=str(folder)), "scripted")], options, sockets, contexts
    )
    running = asyncio.create_task(instance.serve_until_exit())
    while instance.registry.unready_error():
        await asyncio.sleep(0.01)
    assert (await get(mutual, client_context(tls_files, "friend"), "/info")).json["model_id"] == folder.name
    assert (await get(server_only, client_context(tls_files))).status == 200
    for name in ("", "fallen", "stranger"):
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await get(mutual, client_context(tls_files, name))
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await get(server_only, None)
    assert (await get(mutual, client_context(tls_files, "friend"))).status == 200  # the rejected clients did no harm
    instance.request_stop()
    assert await running == 0
    text = capsys.readouterr().out
    assert f"https://127.0.0.1:{mutual}" in text and "http://" not in text


async def test_websockets_are_encrypted_like_requests(tls_files, serve):
    websockets = pytest.importorskip("websockets")
    pytest.importorskip("wsproto")
    app = (await serve()).parts.build_app(())
    sock = port_module.open_listener("127.0.0.1", 0)
    context = server_tls_context(tls_options(tls_files))
    http_server = port_module.HttpServer(port_module.uvicorn_config(HttpOptions(), app, context))
    serving = asyncio.create_task(http_server.serve(sockets=[sock]))
    uri = f"wss://127.0.0.1:{sock.getsockname()[1]}/v1/responses"
    async with websockets.connect(uri, ssl=client_context(tls_files), proxy=None) as websocket:
        await websocket.send('{"type": "response.create", "model": "tiny", "input": "Hello"}')
        while '"response.completed"' not in (message := await websocket.recv()):
            assert json.loads(message)["type"].startswith("response.")
        http_server.should_exit = True
        with pytest.raises(websockets.ConnectionClosedOK, match="1001"):
            await websocket.recv()
    await serving


@contextlib.asynccontextmanager
async def encrypted_port(folder: Path, tls: ssl.SSLContext | None = None, **limits: Any) -> AsyncIterator[int]:
    """Run an encrypted port whose one answer is 204, with these limits; yield its number."""

    async def answer_204(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    sock = port_module.open_listener("127.0.0.1", 0)
    config = port_module.uvicorn_config(
        HttpOptions(**limits), answer_204, tls or server_tls_context(tls_options(folder))
    )
    http_server = port_module.HttpServer(config)
    serving = asyncio.create_task(http_server.serve(sockets=[sock]))
    async with asyncio.timeout(20):
        yield sock.getsockname()[1]
        http_server.should_exit = True
        await serving


def run_on_uvloop(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run on the event loop that servers use; its transports differ from asyncio's."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(coroutine)


async def count_http2_connections(port: int, context: ssl.SSLContext) -> str:
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(http2=True, verify=context, limits=limits, trust_env=False) as client:
        url = f"https://127.0.0.1:{port}/"
        answers = await asyncio.gather(*(client.post(url, content=bytes(100_000)) for _ in range(10)))
        assert {answer.status_code for answer in answers} == {204}
        (version,) = {answer.http_version for answer in answers}
        return version


def test_clients_choose_http2_by_alpn_with_their_certificates(tls_files):
    async def ask_ports() -> None:
        mutual = tls_options(tls_files, client_authorities=(tls_files / "ours.pem",))
        async with encrypted_port(tls_files, tls=server_tls_context(mutual, http2=True)) as port:
            assert await count_http2_connections(port, client_context(tls_files, "friend")) == "HTTP/2"
            with pytest.raises(httpx.TransportError):
                await count_http2_connections(port, client_context(tls_files, "stranger"))
            assert (await get(port, client_context(tls_files, "friend"))).status == 204
        async with encrypted_port(tls_files) as port:  # one without HTTP/2
            assert await count_http2_connections(port, client_context(tls_files)) == "HTTP/1.1"

    run_on_uvloop(ask_ports())


def test_silent_tls_handshake_ends_after_the_header_timeout(tls_files):
    async def wait_for_end() -> None:
        async with encrypted_port(tls_files, header_timeout=1.0) as port:  # the last handshake has to fit in it
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            assert (await get(port, client_context(tls_files))).status == 204

    run_on_uvloop(wait_for_end())


def test_silent_tls_handshakes_make_room_for_others(tls_files):
    async def crowd_port() -> None:
        async with encrypted_port(tls_files, header_timeout=3600.0, connection_limit=ConnectionLimit(2, 4)) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            await asyncio.sleep(OPENING_SECONDS)
            assert (await get(port, client_context(tls_files))).status == 204
            with contextlib.suppress(ConnectionError):
                assert await silent[0][0].read() == b""
            for _, writer in silent:
                writer.close()

    run_on_uvloop(crowd_port())


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"certificate": "missing"}, r"missing cannot be read: No such file"),
        ({"certificate": "garbage"}, r"server\.key cannot be used"),
        ({"key": "friend.key"}, r"friend\.key cannot be used: KEY_VALUES_MISMATCH"),
        ({"password_file": "wrong"}, r"server\.key cannot be used"),
        ({"password_file": "missing"}, r"missing cannot be read"),
        ({"client_authorities": ("garbage",)}, r"garbage cannot be used"),
        ({"revocation_lists": ("missing",)}, r"missing cannot be read"),
    ],
)
def test_tls_errors_name_the_unusable_file(tls_files, changed, text):
    def in_folder(value: object) -> object:
        return tuple(tls_files / name for name in value) if isinstance(value, tuple) else tls_files / str(value)

    with pytest.raises(TlsFileError, match=text):
        server_tls_context(tls_options(tls_files, **{name: in_folder(value) for name, value in changed.items()}))


def test_certificates_are_loaded_from_the_bytes_that_were_checked_even_if_a_file_is_replaced(tls_files, tmp_path):
    key = tmp_path / "server.key"
    key.write_bytes((tls_files / "server.key").read_bytes())

    class ReplacedKey(ssl.SSLContext):
        """A context in use, before whose key is loaded somebody replaces the file by another key."""

        def load_cert_chain(self, *arguments) -> None:
            key.write_bytes((tls_files / "friend.key").read_bytes())
            super().load_cert_chain(*arguments)

    contexts = [ReplacedKey(ssl.PROTOCOL_TLS_SERVER) for _ in range(2)]
    reload_certificates([LoadedTls(context, tls_options(tls_files, key=key)) for context in contexts])
    assert key.read_bytes() == (tls_files / "friend.key").read_bytes()
    with pytest.raises(TlsFileError):
        reload_certificates([LoadedTls(contexts[0], tls_options(tls_files, key=key))])


@pytest.mark.parametrize("member", ["certificate", "key", "password_file", "client_authorities", "revocation_lists"])
def test_tls_files_whose_reading_does_not_end_are_refused(tls_files, tmp_path, member):
    pipe, huge = tmp_path / "pipe", tmp_path / "huge"
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # it takes no room
    in_use = server_tls_context(tls_options(tls_files))
    for path, text in (
        (pipe, "pipe cannot be used: it is no regular file"),
        (huge, "huge cannot be used: it has more"),
    ):
        value = (path,) if member in ("client_authorities", "revocation_lists") else path
        files = tls_options(tls_files, **{member: value})
        with pytest.raises(TlsFileError, match=text):
            server_tls_context(files)
        with pytest.raises(TlsFileError, match=text):
            reload_certificates([LoadedTls(in_use, files)])


def test_apis_with_the_same_port_share_its_socket():
    options = ServerOptions(
        listen=(ListenAddress("tgi", "h", 1), ListenAddress("vllm", "h", 1), ListenAddress("tgi", "h", 0))
    )
    shared = listening_places(options)[1:]
    names = [(place.port, list(dict.fromkeys(mount.dialect.name for mount in place.mounts))) for place in shared]
    assert names == [
        (1, ["tgi", "vllm", "parley"]),
        (0, ["tgi", "parley"]),
    ]


async def test_instances_authenticate_each_other_by_certificate(tls_files):
    def make_peer(certificate: str, authority: str) -> KVPeer:
        options = TlsFiles(
            tls_files / f"{certificate}.pem",
            tls_files / f"{certificate}.key",
            client_authorities=(tls_files / f"{authority}.pem",),
        )
        new_peer = KVPeer(server_tls=server_tls_context(options), client_tls=client_tls_context(options))
        new_peer.add_arena("tiny", Arena(0, -1, 4, [], "none"))
        return new_peer

    async def accept(receiver: KVReceiver) -> None:
        await receiver.refuse_handover("enough")

    one, other, stranger = make_peer("friend", "ours"), make_peer("friend", "ours"), make_peer("stranger", "theirs")
    try:
        await one.listen("127.0.0.1", 0, accept)
        (await other.open_handover(f"127.0.0.1;{one.port}", "tiny")).close_handover()
        with pytest.raises(LinkError):
            await stranger.open_handover(f"127.0.0.1;{one.port}", "tiny")
    finally:
        for peer in (one, other, stranger):
            await peer.close_peer()


def test_coordinator_client_certificate_key_may_have_a_password(tls_files):
    options = cluster.CoordinatorTls(
        certificate=str(tls_files / "server.pem"), key=str(tls_files / "server.key"), ca=str(tls_files / "ours.pem")
    )
    assert instance_tls_context(replace(options, password=str(tls_files / "password"))) is not None
    with pytest.raises(TlsFileError, match="cannot be used"):
        instance_tls_context(replace(options, password=str(tls_files / "wrong")))


async def test_link_uses_the_shorter_lease_and_either_sides_checksums():
    async def accept(receiver: KVReceiver) -> None:
        await receiver.refuse_handover("enough")

    one, other = server.make_peer(ServerOptions(peer_lease=7.0)), server.make_peer(ServerOptions(peer_checksum=True))
    try:
        for peer_link in (one, other):
            peer_link.add_arena("tiny", Arena(0, -1, 4, [], "none"))
            await peer_link.listen("127.0.0.1", 0, accept)
        for sending, receiving in ((one, other), (other, one)):
            sender = await sending.open_handover(f"127.0.0.1;{receiving.port}", "tiny")
            assert {(link.lease, link.checksum) for link in sending.links} == {(7.0, True)}
            sender.close_handover()
    finally:
        await one.close_peer()
        await other.close_peer()
