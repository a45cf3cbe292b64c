"""Result streams of an instance: no result is lost or sent twice, and absent coordinators do not block requests."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from parley.disagg.wire import replay_buffer
from parley.disagg.wire import result_frames as frames
from parley.disagg.wire.result_frames import Frame, Reader
from parley.errors import InUse
from parley.instance import results
from parley.instance.result_channel import Gone
from parley.instance.results import Results


class Wire:
    """A connection that may stop reading, or break and lose its undelivered bytes."""

    def __init__(self, results: Results, client: str = ""):
        self.hub, self.name = results, client
        self.data = bytearray()
        self.open = True
        self.reads = asyncio.Event()
        self.reads.set()

    def part(self, data: bytes) -> bool:
        self.data += data
        return self.reads.is_set()

    async def write(self, data: bytes) -> None:
        self.data += data
        await self.reads.wait()

    def abort(self) -> None:
        self.open = False
        self.task.cancel()

    def begin(self, epoch: str = "", number: int | None = None) -> Wire:
        line, first = self.hub.client(self.name).attach(self, epoch, number)
        self.task = asyncio.create_task(line.run(first))
        return self

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def frames(self, reader: Reader | None = None) -> list[Frame]:
        reader = reader or Reader()
        data, self.data = bytes(self.data), bytearray()
        return reader.feed(data) + reader.flush()


@asynccontextmanager
async def hub() -> AsyncIterator[Results]:
    made = Results()
    try:
        yield made
    finally:
        made.close()


async def rest() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_simultaneous_results_are_sent_together_in_order() -> None:
    async with hub() as made:
        wire = Wire(made).begin()
        await rest()
        one, two = made.channel("", "1"), made.channel("", "2")
        assert one.write(b"a\n") and two.write(b"b\n") and one.write(b"") and one.write(b"c\n", last=True)
        two.fail("no")
        await rest()
        assert [(f.id, f.kind, f.payload) for f in wire.frames()] == [
            (b"1", "data", b"a\n"), (b"2", "data", b"b\n"), (b"1", "lastData", b"c\n"), (b"2", "error", b"no"),
        ]  # fmt: skip
        assert not made.client().channels
        await wire.end()


async def test_second_result_connection_closes_the_first() -> None:
    async with hub() as made:
        first = Wire(made).begin()
        await rest()
        second = Wire(made).begin()
        await rest()
        assert first.task.done() and bytes(first.data) == frames.CLOSE
        made.channel("", "1").write(b"x\n")
        await rest()
        assert bytes(second.data) == b"reqId:1\0data:x\n\0" and bytes(first.data) == frames.CLOSE
        other = Wire(made, "named").begin()  # another coordinator
        await rest()
        assert not second.task.done()
        for wire in (second, other):
            await wire.end()


async def test_result_channel_ids_are_unique_per_client() -> None:
    async with hub() as made:
        channel = made.channel("a", "1")
        with pytest.raises(InUse):
            made.channel("a", "1")
        made.channel("b", "1")
        channel.close()
        made.channel("a", "1")


async def test_result_heartbeats_are_sent_only_during_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parley.instance.result_connection.CHECK", 0.01)
    monkeypatch.setattr(
        "parley.instance.result_connection.SILENCE", 0.3
    )  # longer than a busy machine delays the event loop
    async with hub() as made:
        wire = Wire(made).begin()
        channel = made.channel("", "1")
        for _ in range(80):
            channel.write(b"x\n")
            await asyncio.sleep(0.005)
        assert b"ka:" not in wire.data
        monkeypatch.setattr("parley.instance.result_connection.SILENCE", 0.05)
        while bytes(wire.data).count(frames.HEARTBEAT) < 2:
            await asyncio.sleep(0.01)
        assert {frame.kind for frame in wire.frames()} == {"data", "ka"}
        await wire.end()


async def test_coordinator_that_stays_away_loses_its_result_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "KEEP", 0.05)
    async with hub() as made:
        wire = Wire(made, "a").begin()
        await rest()
        channel, gone = made.channel("a", "1"), asyncio.Event()
        assert channel.watch(gone.set)
        await asyncio.sleep(0.1)
        assert not gone.is_set()
        await wire.end()
        await gone.wait()
        assert not made.clients and not channel.watch(gone.set) and channel.write(b"x\n")
        with pytest.raises(Gone):
            await channel.drain()


async def test_coordinator_that_reconnects_in_time_keeps_its_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "KEEP", 0.5)
    async with hub() as made:
        channel, gone = made.channel("", "1"), asyncio.Event()
        channel.watch(gone.set)
        for _ in range(4):
            wire = Wire(made).begin()
            await asyncio.sleep(0.15)
            await wire.end()
            await rest()
        assert not gone.is_set()
        channel.write(b"while nobody listens\n")
        wire = Wire(made).begin()
        await rest()
        assert [frame.payload for frame in wire.frames()] == [b"while nobody listens\n"]
        await wire.end()


async def test_coordinator_that_does_not_read_blocks_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "WAITING", 1000)
    async with hub() as made:
        wire = Wire(made, "a").begin()
        other = Wire(made, "b").begin()
        await rest()
        wire.reads.clear()
        channel, beside = made.channel("a", "1"), made.channel("b", "1")
        written = 0
        while channel.write(b"x" * 99 + b"\n"):
            written += 1
            await asyncio.sleep(0)
        assert written < 30 and channel.blocked and made.channel("a", "2").blocked
        assert beside.write(b"y\n")
        drained = asyncio.create_task(channel.drain())
        await rest()
        assert not drained.done()
        wire.reads.set()
        await drained
        await rest()
        _, *found = wire.frames()
        assert b"".join(frame.payload for frame in found) == (b"x" * 99 + b"\n") * (written + 1)
        for each in (wire, other):
            await each.end()


async def test_pausing_one_result_channel_does_not_hold_back_others() -> None:
    async with hub() as made:
        wire = Wire(made, "a").begin()
        await rest()
        slow, fast = made.channel("a", "slow"), made.channel("a", "fast")
        assert not made.pause("a", "unknown", True) and not made.pause("b", "slow", True)
        assert made.pause("a", "slow", True)
        assert not slow.write(b"1\n") and fast.write(b"2\n")
        await rest()
        assert [frame.id for frame in wire.frames()] == [b"", b"fast"]
        slow.write(b"3\n", last=True)
        slow.close()
        await rest()
        assert not wire.data
        assert made.pause("a", "slow", False)
        await rest()
        assert [frame.payload for frame in wire.frames()] == [b"1\n", b"3\n"]
        assert not made.pause("a", "slow", True) and not slow.blocked
        left = made.channel("a", "left")
        left.pause(True)
        assert not made.drop("left")  # it has not ended yet
        left.write(b"5\n", last=True)
        assert made.drop("left") and not made.drop("left") and "left" not in made.client("a").channels
        await wire.end()


async def test_broken_result_connections_lose_and_repeat_nothing() -> None:
    """Breaks the connection hundreds of times at random bytes: text and records of every request must be complete."""
    random_ = random.Random(7)
    async with hub() as made:
        reader, seen, epoch = Reader(), {}, ""
        wanted: dict[str, bytes] = {}
        channels = {}
        wire = Wire(made, "a").begin()
        await rest()
        for step in range(600):
            for name in ("a", "b", "c"):
                if name not in channels:
                    channels[name] = made.channel("a", name)
                payload = random_.randbytes(random_.randrange(30))
                record = random_.randbytes(3) if random_.random() < 0.3 else b""
                channels[name].write(payload, record=record)
                wanted[name] = wanted.get(name, b"") + payload + record
            if random_.random() < 0.7:
                await rest()
            if random_.random() < 0.5:
                # Bytes in transit are lost from a random position on, possibly inside a frame.
                arrived = bytes(wire.data)[: random_.randrange(len(wire.data) + 1)]
                await take(reader, arrived, seen)
                epoch = reader_epoch(arrived) or epoch
                if random_.random() < 0.5:
                    await wire.end()
                fresh = Reader()
                fresh.number = reader.number
                reader = fresh
                before = wire
                wire = Wire(made, "a").begin(epoch, reader.number if epoch else None)
                await rest()
                await before.end()
            if step % 50 == 49:
                assert epoch == made.client("a").epoch
        await rest()
        await take(reader, bytes(wire.data), seen)
        assert seen == wanted
        await wire.end()


def reader_epoch(data: bytes) -> str:
    frames_ = Reader().feed(data) if data.count(b"\0") else []
    return next((frame.payload.decode() for frame in frames_ if frame.kind == "epoch"), "")


async def take(reader: Reader, data: bytes, seen: dict[str, bytes]) -> None:
    for frame in reader.feed(data):
        if frame.kind in ("data", "lastData"):
            id = frame.id.decode()
            seen[id] = seen.get(id, b"") + frame.payload + base64.b64decode(frame.record or b"")


@pytest.mark.parametrize("which", ["too old", "too new", "of another epoch"])
async def test_unreplayable_reconnect_starts_a_new_epoch(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    monkeypatch.setattr(replay_buffer, "KEPT", 100)  # bytes: room for two frames
    async with hub() as made:
        wire = Wire(made, "a").begin()
        await rest()
        epoch = wire.frames()[0].payload.decode()
        channel, gone = made.channel("a", "1"), asyncio.Event()
        channel.watch(gone.set)
        for _ in range(10):
            channel.write(b"x" * 30 + b"\n")
            await rest()
        await wire.end()
        wire = Wire(made, "a").begin(epoch, 8)  # the last two frames are still kept
        await rest()
        assert [frame.kind for frame in wire.frames()] == ["epoch", "data", "data"] and not gone.is_set()
        await wire.end()
        wrong = {"too old": (epoch, 7), "too new": (epoch, 11), "of another epoch": ("0" * 16, 9)}[which]
        wire = Wire(made, "a").begin(*wrong)
        await rest()
        (frame,) = wire.frames()
        assert frame.kind == "epoch" and frame.payload.decode() not in (epoch, wrong[0])
        assert gone.is_set() and not made.client("a").channels
        made.channel("a", "1").write(b"new\n")
        await rest()
        assert [frame.payload for frame in wire.frames()] == [b"new\n"]
        await wire.end()
