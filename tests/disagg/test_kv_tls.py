"""KV links with mutual TLS: pages arrive, and peers without a trusted certificate are refused."""

import ssl
from pathlib import Path

import pytest
from support.certificates import authority, certificate
from support.kv_links import WAYS, begun, pair
from support.kv_pages import Pages

from parley.disagg.kv.peer import Peer
from parley.disagg.kv.transport import LinkError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ca", "others"):
        authority(folder, name)
    certificate(folder, "one", "ca")
    certificate(folder, "stranger", "others")
    return folder


def contexts(files: Path, name: str, known: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the TLS contexts of the listening side and of the connecting side."""
    lets, shows = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    lets.verify_mode = ssl.CERT_REQUIRED
    for context in (lets, shows):
        context.load_verify_locations(files / f"{known}.pem")
        if name:
            context.load_cert_chain(files / f"{name}.pem", files / f"{name}.key")
    return lets, shows


@pytest.mark.parametrize("way", WAYS)
async def test_hands_over_pages_through_mutual_tls(files: Path, way: str) -> None:
    lets, shows = contexts(files, "one", "ca")
    with Pages(300, (20_000, 12_000), seed=5) as source, Pages(300, (20_000, 12_000)) as target:
        async with pair(way, source, target, lets=lets, shows=shows) as (p, d, takers):
            for _ in range(2):
                giver, taker, question = await begun(p, d, takers)
                await taker.accept([(0, list(range(300)))])
                await question
                giver.filled(0, list(range(299, -1, -1)))
                await giver.give(b"given")
                await giver.done()
                assert taker.transport == way
                assert all(target.page(page) == source.page(299 - page) for page in range(300))
            giver, taker, question = await begun(p, d, takers)
            await taker.accept([(0, list(range(300)))])
            await question
            giver.filled(0, list(range(200)))
            giver.close()  # in the middle of a transfer
            await taker.settled()


@pytest.mark.parametrize("name, known", [("", "ca"), ("stranger", "ca"), ("one", "others"), (None, "")])
async def test_refuses_peers_without_a_trusted_certificate(files: Path, name: str | None, known: str) -> None:
    """No certificate, one of another authority, a client that does not trust ours, and a client without TLS."""
    lets, _ = contexts(files, "one", "ca")
    with Pages() as source, Pages() as target:
        async with pair("tcp", source, target, lets=lets) as (_, d, takers):
            other = Peer(secret=b"secret", shows=None if name is None else contexts(files, name, known)[1])
            other.add("demo", source.arena)
            with pytest.raises(LinkError):
                await other.connect(f"127.0.0.1:{d.port}", "demo")
            await other.close()
            assert takers.empty() and not d._links
