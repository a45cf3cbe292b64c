"""Authentication of the KV listener: another secret, replayed handshakes, forged offers and garbage."""

import asyncio
import fcntl
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kv_links import begun, left, pair
from support.kv_pages import Pages

from parley import wire
from parley.disagg.kv import handshake as proof
from parley.disagg.kv import listener
from parley.disagg.kv.arena import BadArena
from parley.disagg.kv.frames import Accept, Beat, Begin, End, Give, Got, Held, Hello, Read, Refuse, Settled, Welcome
from parley.disagg.kv.frames import Pages as Named
from parley.disagg.kv.peer import Peer
from parley.disagg.kv.receiver import Taker
from parley.disagg.kv.sender import Refused
from parley.disagg.kv.shared_memory import Offer, Shared
from parley.disagg.kv.transport import LinkError, Lost
from parley.types import Arena, Region

LAYOUT = "model=demo;dtype=bfloat16"
SECRET = b"secret"


@asynccontextmanager
async def taking(pages: Pages, **options: Any) -> AsyncIterator[tuple[Peer, list[Taker]]]:
    """A peer that accepts every handover and asks for 3 pages of each part; checks for leaks at the end."""
    before = left()
    takers: list[Taker] = []

    async def accept(taker: Taker) -> None:
        takers.append(taker)
        await taker.accept([(0, [3 * part, 3 * part + 1, 3 * part + 2]) for part in range(taker.parts)])

    peer = Peer(secret=SECRET, **options)
    peer.add("demo", pages.arena)
    await peer.listen("127.0.0.1", 0, accept)
    try:
        yield peer, takers
    finally:
        await peer.close()
    await asyncio.sleep(0)
    after = left()
    assert after == before


def steps(generator: proof.Steps, given: bytes) -> tuple[list[bytes], int]:
    """Feeds bytes to one side of a handshake; returns the bytes it sends and how many it needs next."""
    sent, step = [], generator.send(given) if given else next(generator)  # type: ignore[arg-type]
    while isinstance(step, bytes):
        sent.append(step)
        step = next(generator)
    return sent, step


def test_handshake_gives_both_sides_the_same_ticket() -> None:
    giver, taker = proof.giver(b"one"), proof.taker(b"one")
    (nonce,), _ = steps(giver, b"")
    steps(taker, b"")
    (theirs,), _ = steps(taker, nonce)
    (ours,), _ = steps(giver, theirs)
    answer = taker.send(ours)
    with pytest.raises(StopIteration) as first:
        next(taker)
    with pytest.raises(StopIteration) as second:
        giver.send(answer)  # type: ignore[arg-type]
    assert first.value.value == second.value.value
    assert len({nonce, theirs, ours, answer, first.value.value}) == 5


def test_handshake_rejects_replayed_and_reflected_proofs() -> None:
    giver, taker = proof.giver(b"one"), proof.taker(b"one")
    (nonce,), _ = steps(giver, b"")
    steps(taker, b"")
    (theirs,), _ = steps(taker, nonce)
    (ours,), _ = steps(giver, theirs)
    later = proof.taker(b"one")
    steps(later, b"")
    steps(later, nonce)
    with pytest.raises(proof.Unproved):  # replayed
        later.send(ours)
    with pytest.raises(proof.Unproved):  # reflected
        giver.send(ours)
    with pytest.raises(proof.Unproved):
        taker.send(bytes(proof.PROOF))


@pytest.mark.parametrize("secret", (b"", b"another", SECRET + b"\0"))
async def test_rejects_links_with_another_cluster_secret(secret: bytes) -> None:
    with Pages() as source, Pages() as target:
        async with taking(target) as (peer, _):
            other = Peer(secret=secret)
            other.add("demo", source.arena)
            with pytest.raises(LinkError, match="does not have the same cluster secret"):
                await other.connect(f"127.0.0.1:{peer.port}", "demo")
            await other.close()


async def test_sender_reveals_nothing_to_a_listener_without_the_secret() -> None:
    """The listener may send any bytes; the sender hangs up after sending no more than its nonce and proof."""
    heard = asyncio.get_running_loop().create_future()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(listener.LINK))
        writer.write(bytes(proof.NONCE + proof.PROOF))
        heard.set_result(await reader.read())
        writer.close()

    with Pages() as source:
        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        peer = Peer(secret=SECRET)
        peer.add("demo", source.arena)
        with pytest.raises(LinkError, match="secret"):
            await peer.connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "demo")
        assert len(await heard) == proof.NONCE + proof.PROOF
        server.close()
        await peer.close()


async def test_connect_fails_when_no_kv_listener_answers() -> None:
    with Pages() as source:
        peer = Peer()
        peer.add("demo", source.arena)
        with pytest.raises(LinkError, match="cannot be reached"):
            await peer.connect("127.0.0.1:1", "demo")
        await peer.close()


class Raw:
    """The sender's end of a link, written by hand so that it can misbehave."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.ticket = b""

    @classmethod
    async def open(cls, port: int, *, proved: bool = True, said: bool = True, **hello: Any) -> "Raw":
        self = cls(*await asyncio.open_connection("127.0.0.1", port))
        if proved:
            self.writer.write(listener.LINK)
            self.ticket = await listener._prove(proof.giver(SECRET), self.reader, self.writer)
        if proved and said:
            known = {"name": "demo", "layout": LAYOUT, "sizes": [64, 32], "offers": {"tcp": b""}, "lease": 30.0}
            self.send(Hello(**known | hello))
            await wire.read(self.reader, msgspec.msgpack.Decoder(Any))
        return self

    def send(self, *frames: Any) -> None:
        for frame in frames:
            self.writer.write(frame if isinstance(frame, bytes) else wire.frame(frame))

    async def until(self, kind: str) -> None:
        """Reads up to a frame of this kind, or to the end."""
        decoder = msgspec.msgpack.Decoder(Any)
        while (frame := await wire.read(self.reader, decoder)) is not None and frame[0] != kind:
            pass

    async def ended(self) -> None:
        """Returns once the other side has hung up."""
        with suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


GARBAGE = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=80).map(lambda data: listener.LINK + data),
    st.binary(max_size=80).map(lambda data: listener.DATA + data),
    st.just(listener.LINK + bytes(proof.NONCE) + bytes(proof.PROOF)),
    st.just(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(GARBAGE, min_size=1, max_size=5))
def test_kv_listener_survives_unauthenticated_garbage(what: list[bytes]) -> None:
    """Any bytes, cut anywhere, only end their own connection; a sender that knows the secret is still served."""

    async def run(target: Pages) -> None:
        async with taking(target) as (peer, takers):
            for data in what:
                raw = await Raw.open(peer.port, proved=False)
                raw.send(data)
                raw.writer.write_eof()
                heard = b""
                with suppress(ConnectionError):
                    heard = await raw.reader.read()
                assert len(heard) in (0, proof.NONCE)
                raw.writer.close()
            assert not takers
            raw = await Raw.open(peer.port)
            raw.writer.close()

    with Pages() as target:
        asyncio.run(run(target))


NUMBERS = st.one_of(st.integers(-2, 20), st.sampled_from((1 << 31, 1 << 47, 1 << 63)))
FRAMES = st.one_of(
    st.builds(Begin, st.binary(max_size=10), st.integers(-1, 3)),
    st.builds(Named, NUMBERS, st.lists(NUMBERS, max_size=5)),
    st.just(Held()),
    st.builds(Give, st.binary(max_size=10)),
    st.just(End()),
    st.builds(Beat, NUMBERS, NUMBERS),
    st.builds(Hello, st.just("demo"), st.just(LAYOUT), st.just([64, 32]), st.just({"tcp": b""}), st.just(30.0)),
    st.builds(Accept, st.just([(0, 1)])),
    st.sampled_from((Got(), Settled(), Read(3))),
    st.binary(max_size=30),
    st.binary(max_size=30).map(lambda data: struct.pack(">I", len(data)) + data),
    st.sampled_from((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff\x93", b"\0\0\0\0")),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(FRAMES, max_size=8), st.booleans())
def test_out_of_order_sender_frames_end_only_their_link(frames: list[Any], said: bool) -> None:
    """A sender that knows the secret sends wrong kinds, numbers, lengths or order: its handovers fail, pages stay."""

    async def run(target: Pages) -> None:
        async with taking(target, lease=0.5) as (peer, takers):
            raw = await Raw.open(peer.port, said=said)
            with suppress(OSError, wire.BrokenFrame):
                for i, frame in enumerate(frames):
                    raw.send(frame)
                    if isinstance(frame, Begin) and not any(isinstance(before, bytes) for before in frames[:i]):
                        await raw.until("accept")
                raw.writer.write_eof()
            await raw.ended()
            while peer._links or peer._gate._strangers:
                await asyncio.sleep(0)
            for taker in takers:
                await taker.settled()
            assert not any(target.bytes[:])

    with Pages() as target:
        asyncio.run(run(target))


@pytest.mark.parametrize(
    "hello, reason",
    [
        ({"name": "other"}, "no pages of a model other"),
        ({"layout": "model=else;dtype=bfloat16"}, "model else and demo"),
        ({"sizes": [64]}, "1 and 2 regions"),
        ({"offers": {}}, "no way"),
        ({"offers": {"rdma": b"", "shared": b"\xc1"}}, "no way"),
    ],
)
async def test_refuses_links_with_incompatible_hello(hello: dict[str, Any], reason: str) -> None:
    with Pages() as target:
        async with taking(target) as (peer, _):
            raw = await Raw.open(peer.port, said=False)
            known = {"name": "demo", "layout": LAYOUT, "sizes": [64, 32], "offers": {"tcp": b""}, "lease": 30.0}
            raw.send(Hello(**known | hello))
            kind, sentence = await wire.read(raw.reader, msgspec.msgpack.Decoder(Any))
            assert kind == "refuse" and reason in sentence
            await raw.ended()


@pytest.mark.parametrize(
    "offer",
    [
        lambda a, p, n, i: (a(pid=1 << 40), i, p, n),  # no such process
        lambda a, p, n, i: (a(pid=-1), i, p, n),
        lambda a, p, n, i: (a(pid=1), i, p, n),  # another process
        lambda a, p, n, i: (a(), i, p, bytes(32)),  # not the nonce in the file
        lambda a, p, n, i: (a(), i, p, b""),
        lambda a, p, n, i: (a(), (i[0], i[1] + 1), p, n),  # another file
        lambda a, p, n, i: (a(fd=1 << 20), i, p, n),  # no such descriptor
        lambda a, p, n, i: (a(fd=0), i, p, n),  # not a file of pages
        lambda a, p, n, i: (a(pages=1 << 30), i, p, n),  # beyond the end of the file
        lambda a, p, n, i: (a(regions=[(0, 64, 64), (1 << 40, 32, 32)]), i, p, n),
        lambda a, p, n, i: (a(regions=[(0, 64, 32), (0, 32, 64)]), i, p, n),  # other region sizes
        lambda a, p, n, i: (a(regions=[(0, 0, 64), (0, 0, 32)], pages=1 << 47), i, p, n),  # all pages in one place
        lambda a, p, n, i: "no offer at all",
    ],
)
async def test_receiver_does_not_map_memory_the_sender_does_not_own(offer: Callable[..., Any]) -> None:
    """The receiver verifies every part of an offer itself; otherwise pages arrive over TCP."""
    with Pages(seed=1) as source, Pages() as target:
        async with taking(target) as (peer, _):
            other = Peer(secret=SECRET)
            other.add("demo", source.arena)
            ours = msgspec.msgpack.decode(
                Shared(other._memories["demo"], other._proof, other._maps).offer(), type=Offer
            )

            def arena(**changes: Any) -> Any:
                return {**msgspec.to_builtins(ours.arena), **changes}

            made = offer(arena, ours.proof, ours.nonce, ours.place)
            raw = await Raw.open(peer.port, said=False)
            offers = {"shared": msgspec.msgpack.encode(made), "tcp": b""}
            raw.send(Hello("demo", LAYOUT, [64, 32], offers, 30.0))
            answer = await wire.read(raw.reader, msgspec.msgpack.Decoder(Any))
            assert answer[:2] == ["welcome", "tcp"]
            raw.writer.close()
            await other.close()


async def test_receiver_rejects_pages_outside_the_senders_arena() -> None:
    with Pages(seed=1) as source, Pages() as target:
        async with pair("shared", source, target) as (p, d, takers):
            for wrong in ([16], [1, 1 << 47]):
                giver, taker, question = await begun(p, d, takers)
                await taker.accept([(0, [1, 2])])
                await question
                giver.filled(0, wrong)
                with pytest.raises(Lost):
                    await taker.given()
                await taker.settled()
                await giver.done()
            assert not any(target.bytes[:])


async def test_receiver_does_not_map_an_unsealed_memfd() -> None:
    """Reading past the end of a truncated mapping kills the process (SIGBUS), so pages arrive over TCP instead."""
    with Pages(seed=1, sealed=False) as source, Pages() as target:
        async with taking(target) as (peer, _):
            other = Peer(secret=SECRET)
            other.add("demo", source.arena)
            giver = await other.connect(f"127.0.0.1:{peer.port}", "demo")
            await giver.begin(b"", 1)
            giver.filled(0, [3, 4, 5])
            await giver.done()
            assert giver.transport == "tcp"
            assert [target.page(page) for page in range(3)] == [source.page(page) for page in (3, 4, 5)]
            await other.close()


async def test_does_not_map_an_arena_larger_than_the_address_space() -> None:
    """A sparse file may have any size as long as nothing is written to it."""
    file = os.memfd_create("pages", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 1 << 56)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    arena = Arena(os.getpid(), file, 1 << 16, [Region(0, 1 << 40, 64), Region(64, 1 << 40, 32)], LAYOUT)
    with Pages() as target:
        async with taking(target) as (peer, _):
            before = left()
            with pytest.raises(BadArena, match="mapped"):
                peer.add("demo", arena)
            assert left() == before
            found, proof = os.fstat(file), peer._proof
            offer = Offer(arena, (found.st_dev, found.st_ino), proof.fd, proof.nonce)
            raw = await Raw.open(peer.port, said=False)
            raw.send(Hello("demo", LAYOUT, [64, 32], {"shared": msgspec.msgpack.encode(offer), "tcp": b""}, 30.0))
            answer = await wire.read(raw.reader, msgspec.msgpack.Decoder(Any))
            assert answer[:2] == ["welcome", "tcp"]
            raw.writer.close()
    os.close(file)


async def test_page_channel_requires_the_ticket_of_a_link() -> None:
    with Pages() as target:
        async with taking(target) as (peer, takers):
            link = await Raw.open(peer.port)
            link.send(Begin(b"", 1))
            await link.until("accept")
            link.send(Named(0, [1]))
            wrong = await Raw.open(peer.port, proved=False)
            wrong.send(listener.DATA + bytes(proof.PROOF))
            await wrong.ended()
            right = await Raw.open(peer.port, proved=False)
            right.send(listener.DATA + link.ticket + b"p" * 64 + b"q" * 32)
            while not any(target.bytes[:]):
                await asyncio.sleep(0.01)
            again = await Raw.open(peer.port, proved=False)
            again.send(listener.DATA + link.ticket)  # its link already has a page channel
            await again.ended()
            link.writer.close()
            await takers[0].settled()
            await right.ended()
            assert target.page(0) == b"p" * 64 + b"q" * 32


async def test_link_ends_when_the_sender_never_reads_or_never_sends() -> None:
    """It sends heartbeats, so its lease holds; but it acknowledges no frames, or sends no pages."""
    with Pages() as target:
        async with taking(target, lease=0.3) as (peer, takers):
            mute, idle = await Raw.open(peer.port, lease=0.3), await Raw.open(peer.port, lease=0.3)
            idle.send(Begin(b"", 1))
            await idle.until("accept")
            idle.send(Named(0, [1]))
            for number in range(1, 1000):
                if not peer._links:
                    break
                with suppress(ConnectionError, RuntimeError):  # the latter is uvloop's
                    mute.send(Beat(number, 0))  # acknowledges nothing
                    idle.send(Beat(number, number - 1))
                await asyncio.sleep(0.05)
            assert not peer._links
            await takers[0].settled()
            await mute.ended()
            await idle.ended()


async def test_limits_unauthenticated_connections_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "GREET_S", 0.5)
    monkeypatch.setattr(listener, "STRANGERS", 3)
    with Pages() as target:
        async with taking(target) as (peer, _):
            slow = [await Raw.open(peer.port, proved=False) for _ in range(3)]
            slow[0].send(listener.LINK[:5])
            slow[1].send(listener.LINK)
            slow[2].send(listener.DATA + b"x")
            await asyncio.sleep(0.1)
            more = await Raw.open(peer.port, proved=False)
            await more.ended()  # closed at once
            for raw in slow:
                await raw.ended()  # closed after the handshake timeout
            raw = await Raw.open(peer.port)
            raw.writer.close()


ANSWERS = st.one_of(
    st.builds(Welcome, st.sampled_from(("tcp", "shared", "none", "else")), st.just(0.5), st.booleans()),
    st.builds(Refuse, st.text(max_size=5)),
    st.builds(Accept, st.lists(st.tuples(NUMBERS.filter(lambda n: n >= 0), st.integers(0, 9)), max_size=2)),
    st.builds(Read, st.one_of(st.none(), st.integers(0, 1 << 32))),
    st.sampled_from((Got(), Settled(), Held(), Begin(b"", 1), End())),
    st.builds(Beat, NUMBERS, NUMBERS),
    st.binary(max_size=30),
)


@settings(max_examples=80, deadline=None)
@given(st.booleans(), st.lists(ANSWERS, max_size=8))
def test_invalid_receiver_frames_end_only_their_link(welcome: bool, answers: list[Any]) -> None:
    """A receiver that knows the secret answers anything, then hangs up; its page channels are closed."""

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, wire.BrokenFrame):
            if await reader.readexactly(len(listener.LINK)) == listener.LINK:
                await listener._prove(proof.taker(SECRET), reader, writer)
                await wire.read(reader, msgspec.msgpack.Decoder(Any))
                for answer in [Welcome("tcp", 0.5), Accept([(0, 3)])] * welcome + answers:
                    writer.write(answer if isinstance(answer, bytes) else wire.frame(answer))
                await writer.drain()
        writer.close()

    async def run(source: Pages) -> None:
        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        before = left()
        peer = Peer(secret=SECRET, lease=0.5)
        peer.add("demo", source.arena)
        with suppress(LinkError, Refused):
            giver = await peer.connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "demo")
            giver.filled(0, [1, 2, 3])
            try:
                await giver.begin(b"", 1)
                await giver.give(b"")
            finally:
                await giver.done()
        await peer.close()
        server.close()
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
        assert left()[:2] == before[:2]

    with Pages(seed=1) as source:
        asyncio.run(run(source))
