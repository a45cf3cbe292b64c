"""Encrypted ports: client certificates, errors for unusable files, and TLS between instances."""

import asyncio
import shutil
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from support.certificates import authority, certificate, revoke
from support.http_client import INFO, Answer, Connection, request

from parley.boot import engines, server
from parley.coordinator import config as cluster
from parley.coordinator.coordinator import towards
from parley.disagg.kv.peer import Peer
from parley.disagg.kv.receiver import Taker
from parley.disagg.kv.transport import LinkError
from parley.engine.fake import FakeEngine
from parley.serving.options import Listen, Offer, ServerOptions
from parley.types import Arena, Settings
from parley.web.options import Tls
from parley.web.tls import BadTls, calling, context

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="the openssl command makes the certificates")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ours", "theirs"):
        authority(folder, name)
    certificate(folder, "server", "ours", password="secret")
    for name, by in (("friend", "ours"), ("fallen", "ours"), ("stranger", "theirs")):
        certificate(folder, name, by)
    revoke(folder, "fallen", "ours")
    (folder / "password").write_text("secret\n")
    (folder / "wrong").write_text("something else")
    (folder / "garbage").write_text("no certificate")
    return folder


def tls(folder: Path, **other: object) -> Tls:
    return Tls(folder / "server.pem", folder / "server.key", folder / "password")._replace(**other)


def client(folder: Path, name: str = "") -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=folder / "ours.pem")
    if name:
        made.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return made


async def ask(port: int, secure: ssl.SSLContext | None, path: str = "/health/live") -> Answer:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port, ssl=secure))
    try:
        await connection.send(request("GET", path))
        return await connection.answer()
    finally:
        connection.close()


async def test_mutual_tls_admits_only_clients_with_a_valid_certificate(files, folder, monkeypatch, capsys):
    monkeypatch.setitem(engines.ENGINES, "scripted", lambda settings, name: FakeEngine(info=INFO))
    both = tls(files, clients=(files / "ours.pem",), revoked=(files / "crl.pem",))
    listen = (Listen("tgi", "127.0.0.1", 0, both), Listen("vllm", "127.0.0.1", 0, tls(files)))
    options = ServerOptions(port=None, listen=listen)
    places = server.places(options)
    sockets = [server.listen(place.host, place.port) for place in places]
    contexts = [context(place.tls) if place.tls else None for place in places]
    mutual, open_ = (sock.getsockname()[1] for sock in sockets)
    instance = server.Instance([Offer(("tiny",), Settings(model=str(folder)), "scripted")], options, sockets, contexts)
    running = asyncio.create_task(instance.live())
    while instance.service.refusal():
        await asyncio.sleep(0.01)
    assert (await ask(mutual, client(files, "friend"), "/info")).json["model_id"] == folder.name
    assert (await ask(open_, client(files))).status == 200
    for name in ("", "fallen", "stranger"):
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await ask(mutual, client(files, name))
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await ask(open_, None)
    assert (await ask(mutual, client(files, "friend"))).status == 200  # the rejected clients did no harm
    instance._stop.set()
    assert await running == 0
    text = capsys.readouterr().out
    assert f"https://127.0.0.1:{mutual}" in text and "http://" not in text


@pytest.mark.parametrize(
    "changed,text",
    [
        ({"certificate": "missing"}, r"missing cannot be read: No such file"),
        ({"certificate": "garbage"}, r"server\.key cannot be used"),
        ({"key": "friend.key"}, r"friend\.key cannot be used: KEY_VALUES_MISMATCH"),
        ({"password": "wrong"}, r"server\.key cannot be used"),
        ({"password": "missing"}, r"missing cannot be read"),
        ({"clients": ("garbage",)}, r"garbage cannot be used"),
        ({"revoked": ("missing",)}, r"missing cannot be read"),
    ],
)
def test_tls_errors_name_the_unusable_file(files, changed, text):
    def there(value: object) -> object:
        return tuple(files / each for each in value) if isinstance(value, tuple) else files / str(value)

    with pytest.raises(BadTls, match=text):
        context(tls(files, **{name: there(value) for name, value in changed.items()}))


def test_apis_with_the_same_port_share_its_socket():
    options = ServerOptions(listen=(Listen("tgi", "h", 1), Listen("vllm", "h", 1), Listen("tgi", "h", 0)))
    shared = server.places(options)[1:]
    assert [(place.port, [surface.dialect.name for surface in place.surfaces]) for place in shared] == [
        (1, ["tgi", "vllm", "parley"]),
        (0, ["tgi", "parley"]),
    ]


async def test_instances_authenticate_each_other_by_certificate(files):
    def peer(certificate: str, authority: str) -> Peer:
        given = Tls(files / f"{certificate}.pem", files / f"{certificate}.key", clients=(files / f"{authority}.pem",))
        made = Peer(lets=context(given), shows=calling(given))
        made.add("tiny", Arena(0, -1, 4, [], "none"))
        return made

    async def accept(taker: Taker) -> None:
        await taker.refuse("enough")

    one, other, stranger = peer("friend", "ours"), peer("friend", "ours"), peer("stranger", "theirs")
    try:
        await one.listen("127.0.0.1", 0, accept)
        (await other.connect(f"127.0.0.1;{one.port}", "tiny")).close()
        with pytest.raises(LinkError):
            await stranger.connect(f"127.0.0.1;{one.port}", "tiny")
    finally:
        for each in (one, other, stranger):
            await each.close()


def test_coordinator_client_certificate_key_may_have_a_password(files):
    shown = cluster.Tls(
        certificate=str(files / "server.pem"), key=str(files / "server.key"), ca=str(files / "ours.pem")
    )
    assert towards(replace(shown, password=str(files / "password"))) is not None
    with pytest.raises(BadTls, match="cannot be used"):
        towards(replace(shown, password=str(files / "wrong")))


async def test_link_uses_the_shorter_lease_and_either_sides_checksums():
    async def accept(taker: Taker) -> None:
        await taker.refuse("enough")

    one, other = server.peer(ServerOptions(peer_lease=7.0)), server.peer(ServerOptions(peer_checksum=True))
    try:
        for each in (one, other):
            each.add("tiny", Arena(0, -1, 4, [], "none"))
            await each.listen("127.0.0.1", 0, accept)
        for giving, taking in ((one, other), (other, one)):
            giver = await giving.connect(f"127.0.0.1;{taking.port}", "tiny")
            assert (giver._link.lease, giver._link.checksum) == (7.0, True)
            giver.close()
    finally:
        await one.close()
        await other.close()
