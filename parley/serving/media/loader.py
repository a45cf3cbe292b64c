"""Loads the media of requests: gets their bytes, has them decoded and processed, and shares the results.

Requests with the same image at the same time, with the same options, share one fetch and one job of a media process.
Results are kept for later requests (``item_cache.py``). A client's name for an item counts within its tenant only.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import ParamSpec, Protocol, TypeVar

import msgspec

from parley.engine.media_messages import (
    DecodingLimits,
    MediaForm,
    MediaJobRequest,
    MediaJobResult,
    MediaRefused,
    encode_options,
)
from parley.errors import BadMedia, MediaFault, Overloaded
from parley.serving.media.fetcher import MediaFetcher, RequestConnections
from parley.serving.media.item_cache import ItemCache, StoredItem
from parley.serving.media.local_files import LocalMediaFolder
from parley.serving.media.memory_files import MemoryBudget, MemoryFile
from parley.serving.media.shared_tasks import SharedTasks
from parley.serving.server_options import MediaOptions
from parley.types import (
    CachedMedia,
    EncodedMedia,
    Media,
    MediaAddress,
    MediaEmbeddings,
    MediaKind,
    MediaPath,
    ProcessedMedia,
    UploadedMedia,
)
from parley.types.media import KIND_NAMES

THREAD_BYTES = 1 << 20  # from this size on, texts are hashed and copied in a thread

P = ParamSpec("P")
T = TypeVar("T")


class JobRunner(Protocol):
    """Has media processes do jobs (``MediaWorkerPool``)."""

    async def process_media(
        self, source: MemoryFile, target: MemoryFile, job: MediaJobRequest, tenant: str
    ) -> MediaJobResult | MediaRefused:
        """Return the result of a job. Raises NotReady, Unsupported."""


class MediaLease:
    """The items of a request, in its order. Their features stay in memory until ``release``."""

    def __init__(self, stored: Iterable[StoredItem]):
        self._stored = list(stored)
        self.items: list[ProcessedMedia] = [
            msgspec.structs.replace(stored.item, features=stored.features.feature_file) for stored in self._stored
        ]

    def release(self) -> None:
        """Release the features. May be called twice."""
        self._stored = []


class _Data(msgspec.Struct, frozen=True):
    """An item's bytes, as the client sent them or as they were fetched, and how they are written."""

    content: str | bytes
    form: MediaForm

    @property
    def encoded_size(self) -> int:
        """Bytes of the file, or about as many if it is in base64."""
        return len(self.content) if self.form == "file" else len(self.content) * 3 // 4

    @property
    def is_large(self) -> bool:
        """Whether copying takes so long that a thread should do it."""
        return len(self.content) >= THREAD_BYTES

    def to_bytes(self) -> bytes:
        """Return the content as bytes. Characters outside ASCII become "?", which is no base64."""
        return self.content if isinstance(self.content, bytes) else self.content.encode("ascii", "replace")

    def write_into(self, file: MemoryFile) -> None:
        """Fill a memory file, which keeps the content from then on."""
        file.write_bytes(self.to_bytes())
        file.seal()


class _RequestShare:
    """Limits that the items of one request share: of their bytes, and of connections."""

    def __init__(self, options: MediaOptions, connections: RequestConnections) -> None:
        self._options = options
        self._size = 0
        self.connections = connections

    def add_bytes(self, media: Media, size: int) -> None:
        """Count an item. Raises BadMedia if it, or the request with it, is too large."""
        if size > (limit := self._options.sizes[media.kind]):
            predicate = f"has {size} bytes, and at most {limit} are allowed"
            raise bad_media(media, predicate, "too_large", {"limit": limit, "size": size})
        self._size += size
        if self._size > (limit := self._options.request_size):
            predicate = f"exceeds the {limit} bytes that all media of a request may have"
            detail = {"limit": limit, "size": self._size, "total": self._size}
            raise bad_media(media, predicate, "too_large", detail)


class MediaLoader:
    """Loads media for one model."""

    def __init__(self, workers: JobRunner, fetcher: MediaFetcher, folder: LocalMediaFolder, options: MediaOptions):
        self._workers, self._fetcher, self._folder, self._options = workers, fetcher, folder, options
        self._limits = DecodingLimits(options.pixels)
        self._budget = MemoryBudget(options.memory + options.cache)
        self._cache = ItemCache(options.cache, self._budget.file_limit // 2)
        self._fetches: SharedTasks[bytes] = SharedTasks()
        self._jobs: SharedTasks[StoredItem | MediaRefused] = SharedTasks()

    @property
    def memory_used(self) -> int:
        """Bytes of media in this process's memory files."""
        return self._budget.used

    async def load_items(self, items: Sequence[Media], owner: str) -> MediaLease:
        """Return all items of a request, processed. ``owner``: the tenant that its names and turns count for.

        Raises BadMedia, naming the field of the item; Overloaded, NotReady, Unsupported.
        """
        request = _RequestShare(self._options, self._fetcher.request_connections(owner))
        tasks = [asyncio.ensure_future(self._load_item(media, owner, request)) for media in items]
        try:
            return MediaLease(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _load_item(self, media: Media, owner: str, request: _RequestShare) -> StoredItem:
        options = f"{is_small(media)} {encode_options(media.loading_options, media.processor_options)}"
        name = (owner, media.kind, media.uuid, options)
        if isinstance(media.source, CachedMedia):
            return self._find_named(media, name)
        data = await self._get_data(media, request)
        key = await _run_in_thread_if(data.is_large, _content_key, media.kind, data, options)
        stored = self._cache.find_item(key)
        if stored is None:
            result = await self._jobs.join_task(key, lambda: self._process_data(key, media, data, owner))
            if isinstance(result, MediaRefused):
                raise bad_media(media, result.predicate, result.reason, result.detail)
            stored = result
        if media.uuid is not None:
            self._cache.add_name(name, key)
        return stored

    def _find_named(self, media: Media, name: Hashable) -> StoredItem:
        if (stored := self._cache.find_name(name)) is None:
            raise bad_media(media, "is not kept under this uuid, and its data was not sent", "unknown_uuid")
        return stored

    async def _get_data(self, media: Media, request: _RequestShare) -> _Data:
        """Return an item's bytes, within the limits of its kind and of its request. Raises BadMedia."""
        source = media.source
        if isinstance(source, MediaAddress):
            data = _Data(await self._fetch_url(media, source.url, request), "file")
        elif isinstance(source, MediaPath):
            read_file = self._folder.read_file
            data = _Data(await asyncio.to_thread(read_file, source.path, media.kind, media.field), "file")
        elif isinstance(source, UploadedMedia):
            data = _Data(source.content, "file")
        elif isinstance(source, MediaEmbeddings):
            if not self._options.accepts_embeddings:
                raise bad_media(media, "cannot be given as embeddings: this server does not allow it", "bad_embeddings")
            data = _Data(source.base64, "base64_embeddings")
        else:
            assert isinstance(source, EncodedMedia)
            is_frames = media.kind == "video" and source.media_type.lower() == "video/jpeg"
            data = _Data(source.base64, "base64_frames" if is_frames else "base64")
        request.add_bytes(media, data.encoded_size)
        return data

    async def _fetch_url(self, media: Media, url: str, request: _RequestShare) -> bytes:
        def start() -> Coroutine[None, None, bytes]:
            return self._fetcher.fetch(url, media.kind, media.field, request.connections)

        try:
            return await self._fetches.join_task((media.kind, url), start)
        except BadMedia as error:  # of a request that wanted the same file, perhaps
            raise BadMedia(
                error.message, reason=error.reason, kind=error.kind, field=media.field, **error.detail
            ) from None

    async def _process_data(self, key: bytes, media: Media, data: _Data, owner: str) -> StoredItem | MediaRefused:
        """Run the job in a media process, and keep its result."""
        self._make_room(data.encoded_size)
        source, target = MemoryFile(self._budget), MemoryFile(self._budget)
        await _run_in_thread_if(data.is_large, data.write_into, source)
        job = MediaJobRequest(
            kind=media.kind,
            form=data.form,
            source=source.feature_file,
            target=target.feature_file,
            is_small=is_small(media),
            options=encode_options(media.loading_options, media.processor_options),
            limits=self._limits,
        )
        result = await self._workers.process_media(source, target, job, owner)
        if isinstance(result, MediaRefused):
            return result
        target.seal()
        stored = StoredItem(result.item, target)
        self._cache.add_item(key, stored)
        return stored

    def drop_kept_items(self) -> None:
        """Drop the items that are kept for later requests; those in use last until their requests end."""
        self._cache.clear()

    def _make_room(self, size: int) -> None:
        """Drop unused items if there is no room for ``size`` bytes. Raises Overloaded."""
        try:
            self._budget.check_room(size)
        except Overloaded:
            self._cache.clear()
            self._budget.check_room(size)


def is_small(media: Media) -> bool:
    """Whether the client wants an image shrunk. The other values of ``detail`` leave it to the model's processor."""
    return media.kind == "image" and media.detail == "low"


def bad_media(
    media: Media, predicate: str, reason: MediaFault, detail: Mapping[str, int | float | str] | None = None
) -> BadMedia:
    """Return the error of an item. ``predicate``: the rest of the sentence."""
    message = f"The {KIND_NAMES[media.kind]} at {media.field} {predicate}."
    return BadMedia(message, reason=reason, kind=media.kind, field=media.field, **(detail or {}))


def _content_key(kind: MediaKind, data: _Data, options: str) -> bytes:
    """Return a hash of an item as it was sent, and of its options."""
    state = hashlib.sha256(f"{kind} {data.form} {len(options)} {options}".encode("utf-8", "surrogatepass"))
    state.update(data.to_bytes())
    return state.digest()


async def _run_in_thread_if(is_large: bool, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a function, in a thread if it would keep other requests waiting."""
    return await asyncio.to_thread(function, *arguments, **named) if is_large else function(*arguments, **named)
