"""Publishes the events of the prefix cache over ZeroMQ, in the format of vLLM's ``vllm/distributed/kv_events.py``.

Routers subscribe to it to find the instance that has cached the longest prefix of a prompt. A message has three frames:
topic, sequence number (8 bytes, big-endian), and a batch in MessagePack: an array of the time in seconds, the events,
and the rank, always 0. An event is a map with its name as ``type``; older versions of vLLM used arrays
(``CacheEventSettings.form``). Like vLLM's, hashes are integers: the last 64 bits of the digest.

A subscriber that has missed messages sends the first number that it needs to the replay address (frames: empty, 8
bytes). It gets the batches from there on that are still kept, and then number -1 with an empty batch. Numbers begin at
0 when the engine starts, with a batch that says that the cache is empty.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from parley.core.pages.cache_events import CacheCleared, CacheEvent, PageRemoved, PagesStored
from parley.core.sequence import PAGE_SIZE
from parley.types import CacheEventSettings, MediaItem

if TYPE_CHECKING:
    import zmq

log = logging.getLogger("parley.engine")

MEDIUM = "GPU"  # vLLM's name for the memory that the engine computes in, also on a CPU
CACHE_GROUP = 0  # all layers have the same pages
HASH_MASK = (1 << 64) - 1
END_NUMBER = (-1).to_bytes(8, "big", signed=True)
CLOSING_SECONDS = 1.0


class EventsError(Exception):
    """An address cannot be used, or the package for ZeroMQ is missing."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """vLLM's event for stored pages."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """vLLM's event for removed pages."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """vLLM's event for a cache that was cleared."""


class ArrayStored(BlockStored, array_like=True, tag="BlockStored"):
    """``BlockStored`` in the form of older versions of vLLM: an array of the event's name and its members in order."""


class ArrayRemoved(BlockRemoved, array_like=True, tag="BlockRemoved"):
    """``BlockRemoved`` as such an array."""


class ArrayCleared(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    """``AllBlocksCleared`` as such an array."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEventPublisher:
    """Publishes batches of events from a thread of its own, and answers requests to replay them from another one.

    Raises EventsError if an address cannot be used.
    """

    def __init__(self, settings: CacheEventSettings):
        self._settings = settings
        self._batches: queue.SimpleQueue[tuple[float, list[CacheEvent]] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._kept_lock = threading.Lock()
        self._adapter_numbers: dict[str, int] = {}
        is_array = settings.form == "array"
        self._stored, self._removed = (ArrayStored, ArrayRemoved) if is_array else (BlockStored, BlockRemoved)
        self._cleared = ArrayCleared if is_array else AllBlocksCleared
        self._open_sockets()
        self._thread = threading.Thread(target=self._publish_batches, name="kv-events", daemon=True)
        self._thread.start()
        threading.Thread(target=self._answer_replays, name="kv-events-replay", daemon=True).start()
        self.publish([CacheCleared()])

    def publish(self, events: list[CacheEvent]) -> None:
        """Publish events as one batch. Returns at once."""
        self._batches.put((time.time(), events))

    def close(self) -> None:
        """Publish the remaining events, and close the sockets."""
        self._batches.put(None)
        self._thread.join(CLOSING_SECONDS)
        self._context.term()  # the thread of replays gets an error, and closes its socket

    def _open_sockets(self) -> None:
        try:
            import zmq
        except ImportError:
            message = "The package for KV events is missing; install it with: pip install 'parley-llm[kv-events]'."
            raise EventsError(message) from None
        self._context = zmq.Context()
        self._publisher: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(self._settings.high_water_mark)
        self._replays: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._publisher.linger = self._replays.linger = 0
        try:
            endpoint = self._settings.endpoint
            _open_socket(self._publisher, "kv-events", endpoint, binds=_is_own_address(endpoint))
            if self._settings.replay_endpoint:
                _open_socket(self._replays, "kv-events-replay", self._settings.replay_endpoint, binds=True)
        except EventsError:
            self._context.destroy()
            raise

    def _publish_batches(self) -> None:
        encoder, topic = msgspec.msgpack.Encoder(), self._settings.topic.encode()
        for number in count():
            batch = self._batches.get()
            if batch is None:
                self._publisher.close()
                return
            seconds, events = batch
            payload = encoder.encode(EventBatch(seconds, list(map(self._describe_event, events)), 0))
            number_bytes = number.to_bytes(8, "big")
            with self._kept_lock:
                self._kept.append((number_bytes, payload))
            self._publisher.send_multipart((topic, number_bytes, payload))

    def _answer_replays(self) -> None:
        import zmq

        topic = self._settings.topic.encode()
        while True:
            try:
                frames = self._replays.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    log.warning("a request to replay KV events is malformed")
                    continue
                with self._kept_lock:
                    batches = list(self._kept)
                for number_bytes, payload in batches:
                    if number_bytes >= frames[2]:
                        self._replays.send_multipart((frames[0], b"", topic, number_bytes, payload))
                self._replays.send_multipart((frames[0], b"", b"", END_NUMBER, b""))
            except zmq.ContextTerminated:
                self._replays.close()
                return

    def _describe_event(self, event: CacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
        match event:
            case PagesStored():
                adapter = event.adapter or None
                return self._stored(
                    list(map(_short_hash, event.hashes)),
                    None if event.parent_hash is None else _short_hash(event.parent_hash),
                    event.token_ids,
                    PAGE_SIZE,
                    None
                    if adapter is None
                    else self._adapter_numbers.setdefault(adapter, 1 + len(self._adapter_numbers)),
                    MEDIUM,
                    adapter,
                    _extra_keys(event),
                    CACHE_GROUP,
                )
            case PageRemoved():
                return self._removed([_short_hash(event.digest)], MEDIUM, CACHE_GROUP)
            case CacheCleared():
                return self._cleared()


def _short_hash(digest: bytes) -> int:
    return int.from_bytes(digest, "big") & HASH_MASK


def _extra_keys(event: PagesStored) -> list[list[Any] | None] | None:
    """Return the inputs of each page's hash besides tokens: the adapter, media, and a prompt's salt at its start."""
    keys = [
        _page_keys(event, event.start + page_number * PAGE_SIZE) or None for page_number in range(len(event.hashes))
    ]
    return keys if any(keys) else None


def _page_keys(event: PagesStored, page_start: int) -> list[Any]:
    items = [(item.digest.hex(), item.start - page_start) for item in _items_in_page(event.media, page_start)]
    salt = [event.cache_salt] if page_start == 0 and event.cache_salt else []
    return [*([event.adapter] if event.adapter else []), *items, *salt]


def _items_in_page(media: Sequence[MediaItem], page_start: int) -> list[MediaItem]:
    return [item for item in media if item.start < page_start + PAGE_SIZE and item.end > page_start]


def _is_own_address(endpoint: str) -> bool:
    """Whether to bind this address and wait for subscribers, rather than connect to one."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _open_socket(socket: zmq.Socket[bytes], option: str, endpoint: str, *, binds: bool) -> None:
    import zmq

    try:
        if binds:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise EventsError(f"{option}: the address {endpoint} cannot be used: {error}.") from None
