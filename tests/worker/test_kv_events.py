"""KV events over ZeroMQ: frames, numbers and replay, read by structs that are written after vLLM's own definitions.

Random schedules compare the events with the cache in ``tests/core`` (``CacheIndex`` in ``support/invariant_ledger``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.invariant_ledger import LoopHarness

from parley.core.pages.cache_events import CacheCleared, CacheEvent, PageRemoved, PagesStored
from parley.types import CacheEventSettings, EmbeddingRun, EngineRequest, MediaItem
from parley.worker.kv_events import EventsError, KVEventPublisher

HASH = bytes(range(16))
SHORT = int.from_bytes(HASH[8:], "big")


# vllm/distributed/kv_events.py of 0.33.0
class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Subscriber:
    """A router: reads batches, checks their numbers, and keeps the tokens of each cached page by hash."""

    def __init__(self, context: zmq.Context[Any], folder: Path, topic: str = ""):
        self.folder, self.topic, self.next_number = folder, topic.encode(), 0
        self.pages: dict[bytes | int, tuple[bytes | int | None, list[int]]] = {}
        self.batches: list[KVEventBatch] = []
        self._context = context
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(self.topic)
        self._socket.connect(f"ipc://{folder}/events")

    def read_batch(self, publisher: KVEventPublisher) -> KVEventBatch:
        """Read a live batch. Those before the subscription has arrived are lost, so others are published."""
        while not self._socket.poll(50):
            publisher.publish([])
        return self._apply(*self._socket.recv_multipart())

    def replay(self, first: int, least: int = 0) -> list[KVEventBatch]:
        """Ask for the batches from a number on, again while there are fewer than ``least``."""
        batches = self._ask_for_replay(first)
        while len(batches) < least:
            batches = self._ask_for_replay(first)
        return [self._apply(*batch) for batch in batches]

    def _ask_for_replay(self, first: int) -> list[tuple[bytes, bytes, bytes]]:
        batches = []
        with self._context.socket(zmq.DEALER) as requests:
            requests.connect(f"ipc://{self.folder}/replay")
            requests.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                assert requests.poll(20_000), "no replay has arrived"
                empty, topic, number, payload = requests.recv_multipart()
                assert empty == b""
                if number == (-1).to_bytes(8, "big", signed=True):
                    assert (topic, payload) == (b"", b"")
                    return batches
                batches.append((topic, number, payload))

    def _apply(self, topic: bytes, number: bytes, payload: bytes) -> KVEventBatch:
        assert topic == self.topic
        assert int.from_bytes(number, "big") >= self.next_number
        self.next_number = int.from_bytes(number, "big") + 1
        batch = DECODER.decode(payload)
        assert batch.data_parallel_rank == 0 and batch.ts > 1e9
        for event in batch.events:
            match event:
                case BlockStored():
                    parent = event.parent_block_hash
                    for place, page in enumerate(event.block_hashes):
                        span = slice(place * event.block_size, (place + 1) * event.block_size)
                        self.pages[page] = parent, event.token_ids[span]
                        parent = page
                case BlockRemoved():
                    for page in event.block_hashes:
                        del self.pages[page]
                case AllBlocksCleared():
                    self.pages.clear()
        self.batches.append(batch)
        return batch

    def cached_prefixes(self) -> set[tuple[int, ...]]:
        """The prefixes whose pages are cached from their first token on."""
        prefixes: dict[bytes | int, tuple[int, ...]] = {}
        for page, (parent, tokens) in self.pages.items():  # a parent is stored before its children
            if parent is None or parent in prefixes:
                prefixes[page] = (*(prefixes[parent] if parent is not None else ()), *tokens)
        return set(prefixes.values())


@pytest.fixture
def subscribe(tmp_path: Path) -> Iterator[Callable[..., Subscriber]]:
    """Make subscribers to the events in a folder."""
    context, subscribers = zmq.Context(), list[Subscriber]()

    def start(topic: str = "") -> Subscriber:
        subscribers.append(Subscriber(context, tmp_path, topic))
        return subscribers[-1]

    yield start
    context.destroy(linger=0)


def event_settings(folder: Path, **options: Any) -> CacheEventSettings:
    return CacheEventSettings(f"ipc://{folder}/events", f"ipc://{folder}/replay", **options)


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Any]:
    """Start publishers in a folder."""
    publishers: list[KVEventPublisher] = []

    def start(**options: Any) -> KVEventPublisher:
        publishers.append(KVEventPublisher(event_settings(tmp_path, **options)))
        return publishers[-1]

    yield start
    for publisher in publishers:
        publisher.close()


def test_events_have_the_form_of_vllms_structs(publish, subscribe):
    publisher = publish(topic="kv@pod@tiny")
    cat = MediaItem("image", b"cat", 20, 4, [EmbeddingRun(0, 4)])
    events: list[CacheEvent] = [
        PagesStored([HASH, b"b" * 16], None, list(range(32)), 0, "french", "salt", [cat]),
        PagesStored([b"c" * 16], HASH, list(range(16)), 16, "", "salt", []),
        PageRemoved(HASH),
        CacheCleared(),
    ]
    publisher.publish(events)
    subscriber = subscribe("kv@pod@tiny")
    first, second = subscriber.replay(0, 2)
    assert first.events == [AllBlocksCleared()]
    letters = [int.from_bytes(letter * 8, "big") for letter in (b"b", b"c")]
    keys = [("french", "salt"), ("french", (b"cat".hex(), 4))]
    assert second.events == [
        BlockStored(
            [SHORT, letters[0]],
            None,
            list(range(32)),
            16,
            1,
            "GPU",
            "french",
            [keys[0], (keys[1][0], [b"cat".hex(), 4])],
            0,
        ),
        BlockStored([letters[1]], SHORT, list(range(16)), 16, None, "GPU", None, None, 0),
        BlockRemoved([SHORT], "GPU", 0),
        AllBlocksCleared(),
    ]


def test_events_can_have_the_form_of_older_versions(publish, subscribe):
    publisher = publish(form="array")
    publisher.publish([PagesStored([HASH], None, list(range(16)), 0, "", "", []), PageRemoved(HASH), CacheCleared()])
    payloads = []
    while len(payloads) < 2:
        payloads = [payload for _, _, payload in subscribe()._ask_for_replay(0)]
    assert msgspec.msgpack.decode(payloads[1])[1] == [
        ["BlockStored", [SHORT], None, list(range(16)), 16, None, "GPU", None, None, 0],
        ["BlockRemoved", [SHORT], "GPU", 0],
        ["AllBlocksCleared"],
    ]


def test_replay_begins_at_the_number_and_keeps_the_last_batches(publish, subscribe):
    publisher = publish(buffer_steps=3)
    for number in range(5):
        publisher.publish([CacheCleared()] * number)
    subscriber = subscribe()
    assert len(subscriber.replay(5, 1)) == 1  # all are out
    for first, count in ((0, 3), (4, 2), (6, 0)):
        subscriber.next_number = 0
        assert len(subscriber.replay(first)) == count
    while subscriber.read_batch(publisher).events:
        pass  # a batch that was sent while it subscribed


def test_subscriber_rebuilds_the_index_of_cached_prefixes(publish, subscribe):
    """It reads the events of a loop whose small pool evicts pages, and asks for those that it missed at the start."""
    publisher = publish()
    harness = LoopHarness(blocks=6)
    harness.loop._publish_events = publisher.publish
    subscriber = subscribe()
    for number, length in enumerate((40, 80, 33, 64, 40)):
        request = EngineRequest(id=str(number), token_ids=[number % 3] * length, max_tokens=20)
        harness.loop.add_request(request)
        while harness.loop.step():
            pass
    publisher.publish([])  # the mark of the end
    while not subscriber.batches or subscriber.batches[-1].events:
        subscriber.replay(subscriber.next_number)
    removed = [event for batch in subscriber.batches for event in batch.events if isinstance(event, BlockRemoved)]
    assert removed, "the pool was large enough"
    cached = {int.from_bytes(digest[8:], "big") for digest in harness.loop.pool._cache}
    assert subscriber.pages.keys() == cached and cached
    assert (1,) * 64 in subscriber.cached_prefixes() or (0,) * 32 in subscriber.cached_prefixes()


def test_address_that_cannot_be_used_is_one_sentence(tmp_path):
    settings = CacheEventSettings(f"ipc://{tmp_path}/no/folder/*")
    with pytest.raises(EventsError, match=r"^kv-events: the address ipc://.* cannot be used: .+\.$"):
        KVEventPublisher(settings)
