"""Result streams of an instance: no result is lost or sent twice, and absent coordinators do not block requests."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from support.loop_clock import pass_time

from parley.disagg.wire import replay_buffer
from parley.disagg.wire import result_frames as frames
from parley.disagg.wire.result_frames import FrameReader, ResultFrame
from parley.errors import InUse
from parley.instance import result_connection, result_streams
from parley.instance.result_channel import CoordinatorGone
from parley.instance.result_streams import ResultStreams


class FakeConnection:
    """A connection that may stop reading, or break and lose its undelivered bytes."""

    def __init__(self, result_streams: ResultStreams, client: str = ""):
        self.result_streams, self.client = result_streams, client
        self.data = bytearray()
        self.is_open = True
        self.reading = asyncio.Event()
        self.reading.set()

    def write_part(self, data: bytes) -> bool:
        self.data += data
        return self.reading.is_set()

    async def write_stream(self, data: bytes) -> None:
        self.data += data
        await self.reading.wait()

    def abort_connection(self) -> None:
        self.is_open = False
        self.task.cancel()

    def attach(self, epoch: str = "", number: int | None = None) -> FakeConnection:
        result_connection, first = self.result_streams.get_client(self.client).attach_connection(self, epoch, number)
        self.task = asyncio.create_task(result_connection.serve_connection(first))
        return self

    async def detach(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def take_frames(self, reader: FrameReader | None = None) -> list[ResultFrame]:
        reader = reader or FrameReader()
        data, self.data = bytes(self.data), bytearray()
        return reader.feed_bytes(data) + reader.flush_held()


@asynccontextmanager
async def open_results() -> AsyncIterator[ResultStreams]:
    result_hub = ResultStreams()
    try:
        yield result_hub
    finally:
        result_hub.close_clients()


async def settle_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_simultaneous_results_are_sent_together_in_order() -> None:
    async with open_results() as result_hub:
        connection = FakeConnection(result_hub).attach()
        await settle_tasks()
        one, two = result_hub.open_request_channel("", "1"), result_hub.open_request_channel("", "2")
        assert (
            one.write_result(b"a\n")
            and two.write_result(b"b\n")
            and one.write_result(b"")
            and one.write_result(b"c\n", last=True)
        )
        two.write_error("no")
        await settle_tasks()
        assert [(f.request_id, f.kind, f.payload) for f in connection.take_frames()] == [
            (b"1", "data", b"a\n"), (b"2", "data", b"b\n"), (b"1", "lastData", b"c\n"), (b"2", "error", b"no"),
        ]  # fmt: skip
        assert not result_hub.get_client().channels
        await connection.detach()


async def test_second_result_connection_closes_the_first() -> None:
    async with open_results() as result_hub:
        first = FakeConnection(result_hub).attach()
        await settle_tasks()
        second = FakeConnection(result_hub).attach()
        await settle_tasks()
        assert first.task.done() and bytes(first.data) == frames.CLOSE_FRAME
        result_hub.open_request_channel("", "1").write_result(b"x\n")
        await settle_tasks()
        assert bytes(second.data) == b"reqId:1\0data:x\n\0" and bytes(first.data) == frames.CLOSE_FRAME
        other = FakeConnection(result_hub, "named").attach()  # another coordinator
        await settle_tasks()
        assert not second.task.done()
        for connection in (second, other):
            await connection.detach()


async def test_result_channel_ids_are_unique_per_client() -> None:
    async with open_results() as result_hub:
        channel = result_hub.open_request_channel("a", "1")
        with pytest.raises(InUse):
            result_hub.open_request_channel("a", "1")
        result_hub.open_request_channel("b", "1")
        channel.close_channel()
        result_hub.open_request_channel("a", "1")


async def test_result_heartbeats_are_sent_only_during_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(result_connection, "SILENCE_CHECK_PERIOD", 0.001)
    monkeypatch.setattr(result_connection, "time", SimpleNamespace(monotonic=lambda: now))
    async with open_results() as result_hub:
        connection = FakeConnection(result_hub).attach()
        channel = result_hub.open_request_channel("", "1")
        for _ in range(40):
            channel.write_result(b"x\n")
            await asyncio.sleep(0.005)
            now += result_connection.HEARTBEAT_SILENCE / 2
            await asyncio.sleep(0.005)
        assert b"ka:" not in connection.data
        for count in (1, 2):
            now += result_connection.HEARTBEAT_SILENCE * 1.5
            while bytes(connection.data).count(frames.HEARTBEAT_FRAME) < count:
                await asyncio.sleep(0.01)
        assert {frame.kind for frame in connection.take_frames()} == {"data", "ka"}
        await connection.detach()


async def test_coordinator_that_stays_away_loses_its_result_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_streams, "REPLAY_SECONDS", 0.05)
    async with open_results() as result_hub:
        connection = FakeConnection(result_hub, "a").attach()
        await settle_tasks()
        channel, gone = result_hub.open_request_channel("a", "1"), asyncio.Event()
        assert channel.watch_coordinator(gone.set)
        await asyncio.sleep(0.1)
        assert not gone.is_set()
        await connection.detach()
        await gone.wait()
        assert not result_hub.clients and not channel.watch_coordinator(gone.set) and channel.write_result(b"x\n")
        with pytest.raises(CoordinatorGone):
            await channel.wait_until_writable()


async def test_coordinator_that_reconnects_in_time_keeps_its_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_streams, "REPLAY_SECONDS", 60)
    async with open_results() as result_hub:
        channel, gone = result_hub.open_request_channel("", "1"), asyncio.Event()
        channel.watch_coordinator(gone.set)
        for _ in range(4):
            connection = FakeConnection(result_hub).attach()
            await pass_time(90)
            await connection.detach()
            await pass_time(40)
        assert not gone.is_set()
        channel.write_result(b"while nobody listens\n")
        connection = FakeConnection(result_hub).attach()
        await settle_tasks()
        assert [frame.payload for frame in connection.take_frames()] == [b"while nobody listens\n"]
        await connection.detach()


async def test_coordinator_that_does_not_read_blocks_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_streams, "MAX_QUEUED_BYTES", 1000)
    async with open_results() as result_hub:
        connection = FakeConnection(result_hub, "a").attach()
        other = FakeConnection(result_hub, "b").attach()
        await settle_tasks()
        connection.reading.clear()
        channel, other_channel = result_hub.open_request_channel("a", "1"), result_hub.open_request_channel("b", "1")
        written_count = 0
        while channel.write_result(b"x" * 99 + b"\n"):
            written_count += 1
            await asyncio.sleep(0)
        assert written_count < 30 and channel.must_wait and result_hub.open_request_channel("a", "2").must_wait
        assert other_channel.write_result(b"y\n")
        drained = asyncio.create_task(channel.wait_until_writable())
        await settle_tasks()
        assert not drained.done()
        connection.reading.set()
        await drained
        await settle_tasks()
        _, *data_frames = connection.take_frames()
        assert b"".join(frame.payload for frame in data_frames) == (b"x" * 99 + b"\n") * (written_count + 1)
        for open_connection in (connection, other):
            await open_connection.detach()


async def test_pausing_one_result_channel_does_not_hold_back_others() -> None:
    async with open_results() as result_hub:
        connection = FakeConnection(result_hub, "a").attach()
        await settle_tasks()
        slow, fast = result_hub.open_request_channel("a", "slow"), result_hub.open_request_channel("a", "fast")
        assert not result_hub.set_results_paused("a", "unknown", True) and not result_hub.set_results_paused(
            "b", "slow", True
        )
        assert result_hub.set_results_paused("a", "slow", True)
        assert not slow.write_result(b"1\n") and fast.write_result(b"2\n")
        await settle_tasks()
        assert [frame.request_id for frame in connection.take_frames()] == [b"", b"fast"]
        slow.write_result(b"3\n", last=True)
        slow.close_channel()
        await settle_tasks()
        assert not connection.data
        assert result_hub.set_results_paused("a", "slow", False)
        await settle_tasks()
        assert [frame.payload for frame in connection.take_frames()] == [b"1\n", b"3\n"]
        assert not result_hub.set_results_paused("a", "slow", True) and not slow.must_wait
        left = result_hub.open_request_channel("a", "left")
        left.set_paused(True)
        assert not result_hub.drop_held_results("left")  # it has not ended yet
        left.write_result(b"5\n", last=True)
        assert (
            result_hub.drop_held_results("left")
            and not result_hub.drop_held_results("left")
            and "left" not in result_hub.get_client("a").channels
        )
        await connection.detach()


async def test_broken_result_connections_lose_and_repeat_nothing() -> None:
    """Breaks the connection hundreds of times at random bytes: text and records of every request must be complete."""
    rng = random.Random(7)
    async with open_results() as result_hub:
        reader, received, epoch = FrameReader(), {}, ""
        expected: dict[str, bytes] = {}
        channels = {}
        connection = FakeConnection(result_hub, "a").attach()
        await settle_tasks()
        for step in range(600):
            for name in ("a", "b", "c"):
                if name not in channels:
                    channels[name] = result_hub.open_request_channel("a", name)
                payload = rng.randbytes(rng.randrange(30))
                record = rng.randbytes(3) if rng.random() < 0.3 else b""
                channels[name].write_result(payload, record=record)
                expected[name] = expected.get(name, b"") + payload + record
            if rng.random() < 0.7:
                await settle_tasks()
            if rng.random() < 0.5:
                # Bytes in transit are lost from a random position on, possibly inside a frame.
                arrived = bytes(connection.data)[: rng.randrange(len(connection.data) + 1)]
                await collect_text(reader, arrived, received)
                epoch = reader_epoch(arrived) or epoch
                if rng.random() < 0.5:
                    await connection.detach()
                fresh = FrameReader()
                fresh.frame_number = reader.frame_number
                reader = fresh
                before = connection
                connection = FakeConnection(result_hub, "a").attach(epoch, reader.frame_number if epoch else None)
                await settle_tasks()
                await before.detach()
            if step % 50 == 49:
                assert epoch == result_hub.get_client("a").epoch
        await settle_tasks()
        await collect_text(reader, bytes(connection.data), received)
        assert received == expected
        await connection.detach()


def reader_epoch(data: bytes) -> str:
    frames_ = FrameReader().feed_bytes(data) if data.count(b"\0") else []
    return next((frame.payload.decode() for frame in frames_ if frame.kind == "epoch"), "")


async def collect_text(reader: FrameReader, data: bytes, texts: dict[str, bytes]) -> None:
    for frame in reader.feed_bytes(data):
        if frame.kind in ("data", "lastData"):
            request_id = frame.request_id.decode()
            texts[request_id] = texts.get(request_id, b"") + frame.payload + base64.b64decode(frame.record or b"")


@pytest.mark.parametrize("case", ["too old", "too new", "of another epoch"])
async def test_unreplayable_reconnect_starts_a_new_epoch(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(replay_buffer, "REPLAY_BYTES", 100)  # bytes: room for two frames
    async with open_results() as result_hub:
        connection = FakeConnection(result_hub, "a").attach()
        await settle_tasks()
        epoch = connection.take_frames()[0].payload.decode()
        channel, gone = result_hub.open_request_channel("a", "1"), asyncio.Event()
        channel.watch_coordinator(gone.set)
        for _ in range(10):
            channel.write_result(b"x" * 30 + b"\n")
            await settle_tasks()
        await connection.detach()
        connection = FakeConnection(result_hub, "a").attach(epoch, 8)  # the last two frames are still kept
        await settle_tasks()
        assert [frame.kind for frame in connection.take_frames()] == ["epoch", "data", "data"] and not gone.is_set()
        await connection.detach()
        wrong = {"too old": (epoch, 7), "too new": (epoch, 11), "of another epoch": ("0" * 16, 9)}[case]
        connection = FakeConnection(result_hub, "a").attach(*wrong)
        await settle_tasks()
        (frame,) = connection.take_frames()
        assert frame.kind == "epoch" and frame.payload.decode() not in (epoch, wrong[0])
        assert gone.is_set() and not result_hub.get_client("a").channels
        result_hub.open_request_channel("a", "1").write_result(b"new\n")
        await settle_tasks()
        assert [frame.payload for frame in connection.take_frames()] == [b"new\n"]
        await connection.detach()
