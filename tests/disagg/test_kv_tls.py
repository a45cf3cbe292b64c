"""KV links with mutual TLS: pages arrive, and peers without a trusted certificate are refused."""

import asyncio
import ssl
from pathlib import Path

import pytest
from support.certificates import make_authority, make_certificate
from support.kv_links import TRANSPORTS, connected_peers, start_handover
from support.kv_pages import PageMemory

from parley.disagg.kv import handshake, listener
from parley.disagg.kv.peer import KVPeer
from parley.disagg.kv.transport import LinkError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ca", "others"):
        make_authority(folder, name)
    make_certificate(folder, "one", "ca")
    make_certificate(folder, "stranger", "others")
    return folder


def tls_contexts(files: Path, name: str, known: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the TLS contexts of the listening side and of the connecting side."""
    server_context, client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server_context.verify_mode = ssl.CERT_REQUIRED
    for context in (server_context, client_context):
        context.load_verify_locations(files / f"{known}.pem")
        if name:
            context.load_cert_chain(files / f"{name}.pem", files / f"{name}.key")
    return server_context, client_context


@pytest.mark.parametrize("way", TRANSPORTS)
async def test_hands_over_pages_through_mutual_tls(files: Path, way: str) -> None:
    server_context, client_context = tls_contexts(files, "one", "ca")
    with PageMemory(300, (20_000, 12_000), seed=5) as source, PageMemory(300, (20_000, 12_000)) as target:
        async with connected_peers(way, source, target, server_tls=server_context, client_tls=client_context) as (
            p,
            d,
            receivers,
        ):
            for _ in range(2):
                sender, receiver, acceptance = await start_handover(p, d, receivers)
                await receiver.accept_handover([(0, list(range(300)))])
                await acceptance
                sender.add_computed_pages(0, list(range(299, -1, -1)))
                await sender.send_outputs(b"given")
                await sender.finish_handover()
                assert receiver.transport_name == way
                assert all(target.read_page(page) == source.read_page(299 - page) for page in range(300))
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            await receiver.accept_handover([(0, list(range(300)))])
            await acceptance
            sender.add_computed_pages(0, list(range(200)))
            sender.close_handover()  # in the middle of a transfer
            await receiver.wait_settled()


@pytest.mark.parametrize(("name", "known"), [("", "ca"), ("stranger", "ca"), ("one", "others"), (None, "")])
async def test_refuses_peers_without_a_trusted_certificate(files: Path, name: str | None, known: str) -> None:
    """No certificate, one of another authority, a client that does not trust ours, and a client without TLS."""
    server_context, _ = tls_contexts(files, "one", "ca")
    with PageMemory() as source, PageMemory() as target:
        async with connected_peers("tcp", source, target, server_tls=server_context) as (_, d, receivers):
            untrusted_peer = KVPeer(
                secret=b"secret", client_tls=None if name is None else tls_contexts(files, name, known)[1]
            )
            untrusted_peer.add_arena("demo", source.arena)
            with pytest.raises(LinkError):
                await untrusted_peer.open_handover(f"127.0.0.1:{d.port}", "demo")
            await untrusted_peer.close_peer()
            assert receivers.empty() and not d.links


async def test_a_slow_ticket_keeps_no_thread(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole ticket has to arrive in the time of a handshake, although each of its bytes arrives soon."""
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 0.3)
    server_context, client_context = tls_contexts(files, "one", "ca")
    peer = KVPeer(secret=b"secret", server_tls=server_context)
    await peer.listen("127.0.0.1", 0, lambda receiver: asyncio.sleep(0))
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
    writer.write(listener.PAGES_PREAMBLE)
    await writer.drain()
    await writer.start_tls(client_context, server_hostname="127.0.0.1")
    hung_up, sent = asyncio.ensure_future(reader.read()), 0
    while sent < handshake.PROOF_BYTES - 1 and not hung_up.done():
        writer.write(b"x")
        sent += 1
        await asyncio.wait((hung_up,), timeout=0.1)
    assert hung_up.done()
    writer.transport.abort()
    await asyncio.gather(hung_up, return_exceptions=True)
    await peer.close_peer()
