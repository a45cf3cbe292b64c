"""Authentication of the KV listener: another secret, replayed handshakes, forged offers and garbage."""

import asyncio
import fcntl
import os
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kv_links import connected_peers, open_resources, start_handover
from support.kv_pages import PageMemory

from parley import wire
from parley.disagg.kv import handshake as proof
from parley.disagg.kv import listener
from parley.disagg.kv.arena import BadArena
from parley.disagg.kv.file_passing import FileSender, receive_file
from parley.disagg.kv.frames import (
    AcceptFrame,
    BeginFrame,
    EndFrame,
    GotOutputsFrame,
    HeartbeatFrame,
    HeldFrame,
    HelloFrame,
    OutputsFrame,
    PagesFrame,
    ReadFrame,
    RefuseFrame,
    SettledFrame,
    WelcomeFrame,
)
from parley.disagg.kv.peer import KVPeer
from parley.disagg.kv.receiver import KVReceiver
from parley.disagg.kv.sender import HandoverRefused
from parley.disagg.kv.shared_memory import FINAL_SIZE
from parley.disagg.kv.transport import LinkError, LinkLost, OfferUnusable
from parley.types import Arena, LayerRegion

LAYOUT = "model=demo;dtype=bfloat16"
SECRET = b"secret"


@asynccontextmanager
async def accepting_peer(pages: PageMemory, **options: Any) -> AsyncIterator[tuple[KVPeer, list[KVReceiver]]]:
    """A peer that accepts every handover and asks for 3 pages of each part; checks for leaks at the end."""
    before = open_resources()
    receivers: list[KVReceiver] = []

    async def accept(receiver: KVReceiver) -> None:
        receivers.append(receiver)
        await receiver.accept_handover([(0, [3 * part, 3 * part + 1, 3 * part + 2]) for part in range(receiver.parts)])

    peer = KVPeer(secret=SECRET, **options)
    peer.add_arena("demo", pages.arena)
    await peer.listen("127.0.0.1", 0, accept)
    try:
        yield peer, receivers
    finally:
        await peer.close_peer()
    await asyncio.sleep(0)
    after = open_resources()
    assert after == before


def feed_handshake(generator: proof.HandshakeSteps, received: bytes) -> tuple[list[bytes], int]:
    """Feeds bytes to one side of a handshake; returns the bytes it sends and how many it needs next."""
    sent, step = [], generator.send(received) if received else next(generator)  # type: ignore[arg-type]
    while isinstance(step, bytes):
        sent.append(step)
        step = next(generator)
    return sent, step


def test_handshake_gives_both_sides_the_same_ticket() -> None:
    sender, receiver = proof.sender_handshake(b"one"), proof.receiver_handshake(b"one")
    (nonce,), _ = feed_handshake(sender, b"")
    feed_handshake(receiver, b"")
    (theirs,), _ = feed_handshake(receiver, nonce)
    (ours,), _ = feed_handshake(sender, theirs)
    answer = receiver.send(ours)
    with pytest.raises(StopIteration) as first:
        next(receiver)
    with pytest.raises(StopIteration) as second:
        sender.send(answer)  # type: ignore[arg-type]
    assert first.value.value == second.value.value
    assert len({nonce, theirs, ours, answer, first.value.value}) == 5


def test_handshake_rejects_replayed_and_reflected_proofs() -> None:
    sender, receiver = proof.sender_handshake(b"one"), proof.receiver_handshake(b"one")
    (nonce,), _ = feed_handshake(sender, b"")
    feed_handshake(receiver, b"")
    (theirs,), _ = feed_handshake(receiver, nonce)
    (ours,), _ = feed_handshake(sender, theirs)
    later = proof.receiver_handshake(b"one")
    feed_handshake(later, b"")
    feed_handshake(later, nonce)
    with pytest.raises(proof.HandshakeFailed):  # replayed
        later.send(ours)
    with pytest.raises(proof.HandshakeFailed):  # reflected
        sender.send(ours)
    with pytest.raises(proof.HandshakeFailed):
        receiver.send(bytes(proof.PROOF_BYTES))


@pytest.mark.parametrize("secret", [b"", b"another", SECRET + b"\0"])
async def test_rejects_links_with_another_cluster_secret(secret: bytes) -> None:
    with PageMemory() as source, PageMemory() as target:
        async with accepting_peer(target) as (peer, _):
            other = KVPeer(secret=secret)
            other.add_arena("demo", source.arena)
            with pytest.raises(LinkError, match=r"has another cluster secret .* give both the same --cluster-secret"):
                await other.open_handover(f"127.0.0.1:{peer.port}", "demo")
            await other.close_peer()


async def test_sender_reveals_nothing_to_a_listener_without_the_secret() -> None:
    """The listener may send any bytes; the sender hangs up after sending no more than its nonce and proof."""
    received = asyncio.get_running_loop().create_future()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(listener.LINK_PREAMBLE))
        writer.write(bytes(proof.NONCE_BYTES + proof.PROOF_BYTES))
        received.set_result(await reader.read())
        writer.close()

    with PageMemory() as source:
        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        peer = KVPeer(secret=SECRET)
        peer.add_arena("demo", source.arena)
        with pytest.raises(LinkError, match="secret"):
            await peer.open_handover(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "demo")
        assert len(await received) == proof.NONCE_BYTES + proof.PROOF_BYTES
        server.close()
        await peer.close_peer()


async def test_connect_fails_when_no_kv_listener_answers() -> None:
    with PageMemory() as source:
        peer = KVPeer()
        peer.add_arena("demo", source.arena)
        with pytest.raises(LinkError, match="cannot be reached"):
            await peer.open_handover("127.0.0.1:1", "demo")
        await peer.close_peer()


async def test_says_that_a_port_which_hangs_up_is_no_peer_port() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    with PageMemory() as source:
        peer = KVPeer()
        peer.add_arena("demo", source.arena)
        with pytest.raises(LinkError, match="is not the --peer-port of an instance"):
            await peer.open_handover(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "demo")
        await peer.close_peer()
    server.close()


async def test_says_that_another_kind_of_server_is_no_peer_port() -> None:
    async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\nInvalid HTTP request."
        )
        writer.close()

    server = await asyncio.start_server(answer_http, "127.0.0.1", 0)
    with PageMemory() as source:
        peer = KVPeer(secret=SECRET)
        peer.add_arena("demo", source.arena)
        with pytest.raises(LinkError, match=r"is another kind of server: give the --peer-port of an instance"):
            await peer.open_handover(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "demo")
        await peer.close_peer()
    server.close()


class RawSender:
    """The sender's end of a link, written by hand so that it can misbehave."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.ticket = b""

    @classmethod
    async def connect(cls, port: int, *, authenticated: bool = True, greeted: bool = True, **hello: Any) -> "RawSender":
        self = cls(*await asyncio.open_connection("127.0.0.1", port))
        if authenticated:
            self.writer.write(listener.LINK_PREAMBLE)
            self.ticket = await listener.run_handshake(proof.sender_handshake(SECRET), self.reader, self.writer)
        if authenticated and greeted:
            hello_fields = {"name": "demo", "layout": LAYOUT, "sizes": [64, 32], "offers": {"tcp": b""}, "lease": 30.0}
            self.send(HelloFrame(**hello_fields | hello))
            await wire.read_frame(self.reader, msgspec.msgpack.Decoder(Any))
        return self

    def send(self, *frames: Any) -> None:
        for frame in frames:
            self.writer.write(frame if isinstance(frame, bytes) else wire.encode_frame(frame))

    async def read_until(self, kind: str) -> None:
        """Reads up to a frame of this kind, or to the end."""
        decoder = msgspec.msgpack.Decoder(Any)
        while (frame := await wire.read_frame(self.reader, decoder)) is not None and frame[0] != kind:
            pass

    async def wait_ended(self) -> None:
        """Returns once the other side has hung up."""
        with suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


GARBAGE = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=80).map(lambda data: listener.LINK_PREAMBLE + data),
    st.binary(max_size=80).map(lambda data: listener.PAGES_PREAMBLE + data),
    st.just(listener.LINK_PREAMBLE + bytes(proof.NONCE_BYTES) + bytes(proof.PROOF_BYTES)),
    st.just(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(GARBAGE, min_size=1, max_size=5))
def test_kv_listener_survives_unauthenticated_garbage(payloads: list[bytes]) -> None:
    """Any bytes, cut anywhere, only end their own connection; a sender that knows the secret is still served."""

    async def run(target: PageMemory) -> None:
        async with accepting_peer(target) as (peer, receivers):
            for data in payloads:
                raw = await RawSender.connect(peer.port, authenticated=False)
                raw.send(data)
                raw.writer.write_eof()
                received = b""
                with suppress(ConnectionError):
                    received = await raw.reader.read()
                assert len(received) in (0, proof.NONCE_BYTES)
                raw.writer.close()
            assert not receivers
            raw = await RawSender.connect(peer.port)
            raw.writer.close()

    with PageMemory() as target:
        asyncio.run(run(target))


NUMBERS = st.one_of(st.integers(-2, 20), st.sampled_from((1 << 31, 1 << 47, 1 << 63)))
SENDER_FRAMES = st.one_of(
    st.builds(BeginFrame, st.binary(max_size=10), st.integers(-1, 3)),
    st.builds(PagesFrame, NUMBERS, st.lists(NUMBERS, max_size=5)),
    st.just(HeldFrame()),
    st.builds(OutputsFrame, st.binary(max_size=10)),
    st.just(EndFrame()),
    st.builds(HeartbeatFrame, NUMBERS, NUMBERS),
    st.builds(HelloFrame, st.just("demo"), st.just(LAYOUT), st.just([64, 32]), st.just({"tcp": b""}), st.just(30.0)),
    st.builds(AcceptFrame, st.just([(0, 1)])),
    st.sampled_from((GotOutputsFrame(), SettledFrame(), ReadFrame(3))),
    st.binary(max_size=30),
    st.binary(max_size=30).map(lambda data: struct.pack(">I", len(data)) + data),
    st.sampled_from((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff\x93", b"\0\0\0\0")),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(SENDER_FRAMES, max_size=8), st.booleans())
def test_out_of_order_sender_frames_end_only_their_link(frames: list[Any], greeted: bool) -> None:
    """A sender that knows the secret sends wrong kinds, numbers, lengths or order: its handovers fail, pages stay."""

    async def run(target: PageMemory) -> None:
        async with accepting_peer(target, lease=0.5) as (peer, receivers):
            raw = await RawSender.connect(peer.port, greeted=greeted)
            with suppress(OSError, wire.BrokenFrame):
                for i, frame in enumerate(frames):
                    raw.send(frame)
                    if isinstance(frame, BeginFrame) and not any(isinstance(before, bytes) for before in frames[:i]):
                        await raw.read_until("accept")
                raw.writer.write_eof()
            await raw.wait_ended()
            while peer.links or peer.unauthenticated_count:
                await asyncio.sleep(0)
            for receiver in receivers:
                await receiver.wait_settled()
            assert not any(target.buffer[:])

    with PageMemory() as target:
        asyncio.run(run(target))


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"name": "other"}, "no pages of a model other"),
        ({"layout": "model=else;dtype=bfloat16"}, "model else and demo"),
        ({"sizes": [64]}, "1 and 2 regions"),
        ({"offers": {}}, "cannot use any of the sender's transports"),
        ({"offers": {"rdma": b"", "shared": b"\xc1"}}, "cannot use any of the sender's transports"),
    ],
)
async def test_refuses_links_with_incompatible_hello(hello: dict[str, Any], reason: str) -> None:
    with PageMemory() as target:
        async with accepting_peer(target) as (peer, _):
            raw = await RawSender.connect(peer.port, greeted=False)
            hello_fields = {"name": "demo", "layout": LAYOUT, "sizes": [64, 32], "offers": {"tcp": b""}, "lease": 30.0}
            raw.send(HelloFrame(**hello_fields | hello))
            kind, sentence = await wire.read_frame(raw.reader, msgspec.msgpack.Decoder(Any))
            assert kind == "refuse" and reason in sentence
            await raw.wait_ended()


async def answer_to_offer(peer: KVPeer, offer: Any) -> str:
    """Return the transport that a receiver chooses when a sender offers this and TCP."""
    raw = await RawSender.connect(peer.port, greeted=False)
    offers = {"shared": msgspec.msgpack.encode(offer), "tcp": b""}
    raw.send(HelloFrame("demo", LAYOUT, [64, 32], offers, 30.0))
    kind, transport, *_ = await wire.read_frame(raw.reader, msgspec.msgpack.Decoder(Any))
    assert kind == "welcome"
    raw.writer.close()
    return str(transport)


@pytest.fixture
def files() -> Iterator[FileSender]:
    """The files that a forging sender passes; its thread runs already."""
    sender = FileSender()
    with PageMemory() as memory:
        sender.withdraw_file(sender.offer_file(memory.fd))
    yield sender
    sender.close_sender()


async def answer_to_memory(peer: KVPeer, files: FileSender, memory: PageMemory, file: int, **changes: Any) -> str:
    """Offer a file with the pages of a memory, or with changes to that offer."""
    token = files.offer_file(file)
    fields = {"sender": files.name, "token": token, "pages": memory.page_count, "regions": memory.regions}
    fields |= {"states": memory.state_count, "state_regions": memory.state_regions}
    try:
        return await answer_to_offer(peer, list((fields | changes).values()))
    finally:
        files.withdraw_file(token)


@pytest.mark.parametrize(
    "change",
    [
        {"sender": bytes(16)},  # no such sender
        {"sender": b""},
        {"token": bytes(32)},  # another link's file, or nothing
        {"token": b""},
        {"pages": -1},
        {"pages": 1 << 30},  # beyond the end of the file
        {"regions": [(0, 64, 64), (1 << 40, 32, 32)]},
        {"states": 1, "state_regions": [(0, 64, 64)]},  # states, of which the receiver has none
        {"regions": [(0, 64, 32), (0, 32, 64)]},  # other region sizes
        {"regions": [(0, 0, 64), (0, 0, 32)], "pages": 1 << 47},  # all pages in one place
    ],
)
async def test_receiver_refuses_a_forged_offer_of_memory(files: FileSender, change: dict[str, Any]) -> None:
    """The receiver verifies every part of an offer itself; otherwise pages arrive over TCP."""
    with PageMemory(seed=1) as source, PageMemory() as target:
        async with accepting_peer(target) as (peer, _):
            assert await answer_to_memory(peer, files, source, source.fd) == "shared"
            assert await answer_to_memory(peer, files, source, source.fd, **change) == "tcp"
            assert await answer_to_offer(peer, "no offer at all") == "tcp"


async def test_receiver_opens_no_descriptor_that_an_offer_names(tmp_path: Path) -> None:
    """A sender names a process that holds another client's prompt, and a file there whose bytes are public."""
    public = tmp_path / "model.safetensors"
    public.write_bytes(bytes(range(32)))
    with PageMemory(seed=1) as victim, PageMemory() as target, public.open("rb") as known:
        async with accepting_peer(target) as (peer, _):
            place = os.fstat(victim.fd)
            arena = msgspec.to_builtins(victim.arena)
            offer = [arena, (place.st_dev, place.st_ino), known.fileno(), bytes(range(32))]
            assert await answer_to_offer(peer, offer) == "tcp"


async def test_receiver_maps_neither_its_own_arena_nor_a_file_that_may_shrink(files: FileSender) -> None:
    with PageMemory() as target, PageMemory(sealed=False) as unsealed, tempfile.TemporaryFile() as plain:
        plain.truncate(1 << 20)
        async with accepting_peer(target) as (peer, _):
            for file in (target.fd, unsealed.fd, plain.fileno()):
                assert await answer_to_memory(peer, files, target, file) == "tcp"


def test_a_file_is_passed_once_for_reading_to_the_same_user_only(
    files: FileSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PageMemory(seed=1) as memory:
        token = files.offer_file(memory.fd)
        fd = receive_file(files.name, token)
        assert os.pread(fd, 64, 0) == memory.buffer[:64]
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        os.close(fd)
        with pytest.raises(OfferUnusable):
            receive_file(files.name, token)
        withdrawn = files.offer_file(memory.fd)
        files.withdraw_file(withdrawn)
        with pytest.raises(OfferUnusable):
            receive_file(files.name, withdrawn)
        kept = files.offer_file(memory.fd)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(OfferUnusable, match="another user"):
            receive_file(files.name, kept)


async def test_receiver_rejects_pages_outside_the_senders_arena() -> None:
    with PageMemory(seed=1) as source, PageMemory() as target:
        async with connected_peers("shared", source, target) as (p, d, receivers):
            for wrong in ([16], [1, 1 << 47]):
                sender, receiver, acceptance = await start_handover(p, d, receivers)
                await receiver.accept_handover([(0, [1, 2])])
                await acceptance
                sender.add_computed_pages(0, wrong)
                with pytest.raises(LinkLost):
                    await receiver.wait_outputs()
                await receiver.wait_settled()
                await sender.finish_handover()
            assert not any(target.buffer[:])


async def test_receiver_rejects_a_state_in_place_of_a_page() -> None:
    states = {"state_count": 2, "state_sizes": (40,)}
    with PageMemory(seed=1, **states) as source, PageMemory(**states) as target:
        async with connected_peers("shared", source, target) as (p, d, receivers):
            sender, receiver, acceptance = await start_handover(p, d, receivers)
            await receiver.accept_handover([(0, [1, 2])])
            await acceptance
            sender.add_computed_pages(0, [1, 16])
            with pytest.raises(LinkLost):
                await receiver.wait_outputs()
            await receiver.wait_settled()
            await sender.finish_handover()
        assert not any(target.buffer[:])


async def test_receiver_does_not_map_an_unsealed_memfd() -> None:
    """Reading past the end of a truncated mapping kills the process (SIGBUS), so pages arrive over TCP instead."""
    with PageMemory(seed=1, sealed=False) as source, PageMemory() as target:
        async with accepting_peer(target) as (peer, _):
            other = KVPeer(secret=SECRET)
            other.add_arena("demo", source.arena)
            sender = await other.open_handover(f"127.0.0.1:{peer.port}", "demo")
            await sender.begin_handover(b"", 1)
            sender.add_computed_pages(0, [3, 4, 5])
            await sender.finish_handover()
            assert sender.transport_name == "tcp"
            assert [target.read_page(page) for page in range(3)] == [source.read_page(page) for page in (3, 4, 5)]
            await other.close_peer()


async def test_does_not_map_an_arena_larger_than_the_address_space(files: FileSender) -> None:
    """A sparse file may have any size as long as nothing is written to it."""
    file = os.memfd_create("pages", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 1 << 56)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, FINAL_SIZE)
    arena = Arena(os.getpid(), file, 1 << 16, [LayerRegion(0, 1 << 40, 64), LayerRegion(64, 1 << 40, 32)], LAYOUT)
    with PageMemory() as target:
        async with accepting_peer(target) as (peer, _):
            before = open_resources()
            with pytest.raises(BadArena, match="mapped"):
                peer.add_arena("demo", arena)
            assert open_resources() == before
            fields = {"pages": arena.pages, "regions": arena.regions}
            assert await answer_to_memory(peer, files, target, file, **fields) == "tcp"
    os.close(file)


async def test_page_channel_requires_the_ticket_of_a_link() -> None:
    with PageMemory() as target:
        async with accepting_peer(target) as (peer, receivers):
            link = await RawSender.connect(peer.port)
            link.send(BeginFrame(b"", 1))
            await link.read_until("accept")
            link.send(PagesFrame(0, [1]))
            unknown_ticket = await RawSender.connect(peer.port, authenticated=False)
            unknown_ticket.send(listener.PAGES_PREAMBLE + bytes(proof.PROOF_BYTES))
            await unknown_ticket.wait_ended()
            page_channel = await RawSender.connect(peer.port, authenticated=False)
            page_channel.send(listener.PAGES_PREAMBLE + link.ticket + b"p" * 64 + b"q" * 32)
            while not any(target.buffer[:]):
                await asyncio.sleep(0.01)
            repeated_ticket = await RawSender.connect(peer.port, authenticated=False)
            repeated_ticket.send(listener.PAGES_PREAMBLE + link.ticket)  # its link already has a page channel
            await repeated_ticket.wait_ended()
            link.writer.close()
            await receivers[0].wait_settled()
            await page_channel.wait_ended()
            assert target.read_page(0) == b"p" * 64 + b"q" * 32


async def test_link_ends_when_the_sender_never_reads_or_never_sends() -> None:
    """It sends heartbeats, so its lease holds; but it acknowledges no frames, or sends no pages."""
    with PageMemory() as target:
        async with accepting_peer(target, lease=1.0) as (peer, receivers):
            mute, idle = await RawSender.connect(peer.port, lease=1.0), await RawSender.connect(peer.port, lease=1.0)
            idle.send(BeginFrame(b"", 1))
            await idle.read_until("accept")
            idle.send(PagesFrame(0, [1]))
            for number in range(1, 1000):
                if not peer.links:
                    break
                with suppress(ConnectionError, RuntimeError):  # the latter is uvloop's
                    mute.send(HeartbeatFrame(number, 0))  # acknowledges nothing
                    idle.send(HeartbeatFrame(number, number - 1))
                await asyncio.sleep(0.05)
            assert not peer.links
            await receivers[0].wait_settled()
            await mute.wait_ended()
            await idle.wait_ended()


async def test_limits_unauthenticated_connections_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 1.5)
    monkeypatch.setattr(listener, "MAX_UNAUTHENTICATED", 3)
    with PageMemory() as target:
        async with accepting_peer(target) as (peer, _):
            slow = [await RawSender.connect(peer.port, authenticated=False) for _ in range(3)]
            slow[0].send(listener.LINK_PREAMBLE[:5])
            slow[1].send(listener.LINK_PREAMBLE)
            slow[2].send(listener.PAGES_PREAMBLE + b"x")
            await asyncio.sleep(0.1)
            slow.append(await RawSender.connect(peer.port, authenticated=False))
            await slow.pop(0).wait_ended()  # the last one took its place
            sender = await RawSender.connect(peer.port)  # so does a peer's
            await slow.pop(0).wait_ended()
            sender.writer.close()
            for raw in slow:
                await raw.wait_ended()  # closed after the handshake timeout
            raw = await RawSender.connect(peer.port)
            raw.writer.close()


RECEIVER_FRAMES = st.one_of(
    st.builds(WelcomeFrame, st.sampled_from(("tcp", "shared", "none", "else")), st.just(0.5), st.booleans()),
    st.builds(RefuseFrame, st.text(max_size=5)),
    st.builds(AcceptFrame, st.lists(st.tuples(NUMBERS.filter(lambda n: n >= 0), st.integers(0, 9)), max_size=2)),
    st.builds(ReadFrame, st.one_of(st.none(), st.integers(0, 1 << 32))),
    st.sampled_from((GotOutputsFrame(), SettledFrame(), HeldFrame(), BeginFrame(b"", 1), EndFrame())),
    st.builds(HeartbeatFrame, NUMBERS, NUMBERS),
    st.binary(max_size=30),
)


@settings(max_examples=80, deadline=None)
@given(st.booleans(), st.lists(RECEIVER_FRAMES, max_size=8))
def test_invalid_receiver_frames_end_only_their_link(welcome: bool, answers: list[Any]) -> None:
    """A receiver that knows the secret answers anything, then hangs up; its page channels are closed."""

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, wire.BrokenFrame):
            if await reader.readexactly(len(listener.LINK_PREAMBLE)) == listener.LINK_PREAMBLE:
                await listener.run_handshake(proof.receiver_handshake(SECRET), reader, writer)
                await wire.read_frame(reader, msgspec.msgpack.Decoder(Any))
                for answer in [WelcomeFrame("tcp", 0.5), AcceptFrame([(0, 3)])] * welcome + answers:
                    writer.write(answer if isinstance(answer, bytes) else wire.encode_frame(answer))
                await writer.drain()
        writer.close()

    async def run(source: PageMemory) -> None:
        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        before = open_resources()
        peer = KVPeer(secret=SECRET, lease=0.5)
        peer.add_arena("demo", source.arena)
        with suppress(LinkError, HandoverRefused):
            sender = await peer.open_handover(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "demo")
            sender.add_computed_pages(0, [1, 2, 3])
            try:
                await sender.begin_handover(b"", 1)
                await sender.send_outputs(b"")
            finally:
                await sender.finish_handover()
        await peer.close_peer()
        server.close()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
        assert open_resources()[:2] == before[:2]

    with PageMemory(seed=1) as source:
        asyncio.run(run(source))
