"""Requests share fetches, jobs and results; names stay within their tenant; nothing is left when clients leave."""

from __future__ import annotations

import asyncio
import base64
import gc
import os
from pathlib import Path
from typing import Any

import pytest
from support.media_files import image_array, image_file
from support.multimodal_models import multimodal_folder

from parley.engine.media_messages import MediaJobRequest, MediaJobResult, MediaRefused
from parley.errors import BadMedia, NotReady, Overloaded
from parley.serving.media.fetcher import MediaFetcher
from parley.serving.media.loader import MediaLoader
from parley.serving.media.local_files import LocalMediaFolder
from parley.serving.media.memory_files import MemoryFile
from parley.serving.media.workers import MediaWorkerPool
from parley.serving.server_options import MediaOptions
from parley.types import (
    CachedMedia,
    EncodedMedia,
    Media,
    MediaAddress,
    MediaEmbeddings,
    MediaPath,
    MediaSource,
    ProcessedMedia,
    UploadedMedia,
)

FIELD = "messages[0].content[1].image_url"


def encoded(data: bytes, **fields: Any) -> Media:
    return media(EncodedMedia(base64.b64encode(data).decode()), **fields)


def media(source: MediaSource, **fields: Any) -> Media:
    return Media(**({"kind": "image", "source": source, "field": FIELD} | fields))


class Runner:
    """Stands in for media processes: its results hold the source's bytes. ``gate``: jobs wait for it."""

    def __init__(self) -> None:
        self.jobs: list[MediaJobRequest] = []
        self.tenants: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.cancelled = 0

    async def process_media(
        self, source: MemoryFile, target: MemoryFile, job: MediaJobRequest, tenant: str
    ) -> MediaJobResult | MediaRefused:
        self.jobs.append(job)
        self.tenants.append(tenant)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        data = Path(f"/proc/self/fd/{source.feature_file.fd}").read_bytes()
        if data == base64.b64encode(b"bad"):
            return MediaRefused("is bad", "undecodable", {"size": 3})
        if data == base64.b64encode(b"late"):
            raise NotReady("later", retry_after=5)
        Path(f"/proc/self/fd/{target.feature_file.fd}").write_bytes(data)
        return MediaJobResult(ProcessedMedia(job.kind, data[:32], "<x>", "<x>", 1), len(data))


class Fetcher(MediaFetcher):
    def __init__(self) -> None:
        super().__init__(MediaOptions())
        self.calls: list[tuple[str, str, str]] = []
        self.cancelled = 0

    async def fetch(self, url: str, kind: Any, field: str, request_connections: Any = None) -> bytes:
        self.calls.append((url, kind, field))
        try:
            await asyncio.sleep(3600 if "slow" in url else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if "missing" in url:
            raise BadMedia("The image could not be fetched.", reason="unreachable", kind=kind, field=field, status=404)
        return url.encode()


class Folder(LocalMediaFolder):
    def __init__(self) -> None:
        super().__init__(MediaOptions())

    def read_file(self, path: str, kind: Any, field: str) -> bytes:
        return path.encode()


def read_features(item: ProcessedMedia) -> bytes:
    assert item.features is not None
    assert item.features.pid == os.getpid()
    data = Path(f"/proc/{item.features.pid}/fd/{item.features.fd}").read_bytes()
    assert len(data) == item.features.size
    return data


def make_loader(runner: Any, **options: Any) -> MediaLoader:
    return MediaLoader(runner, Fetcher(), Folder(), MediaOptions(**options))


def fetcher_of(loader: MediaLoader) -> Fetcher:
    assert isinstance(loader._fetcher, Fetcher)
    return loader._fetcher


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
    gc.collect()


async def test_returns_the_items_in_their_order():
    runner = Runner()
    loader = make_loader(runner, accepts_embeddings=True)
    sources = [encoded(b"one"), media(MediaAddress("http://h/two")), media(MediaPath("/three")), encoded(b"one")]
    sources += [media(UploadedMedia(b"five")), media(MediaEmbeddings("c2l4"))]
    lease = await loader.load_items(sources, "tenant")
    texts = [base64.b64encode(b"one"), b"http://h/two", b"/three", base64.b64encode(b"one"), b"five", b"c2l4"]
    assert [read_features(item) for item in lease.items] == texts
    assert sorted(job.form for job in runner.jobs) == ["base64", "base64_embeddings", "file", "file", "file"]
    assert runner.tenants == ["tenant"] * 5
    assert (await loader.load_items([], "")).items == []


async def test_does_one_job_for_the_same_image_in_many_requests():
    runner = Runner()
    loader = make_loader(runner)
    fetcher = fetcher_of(loader)
    runner.gate.clear()
    same = [loader.load_items([encoded(b"x"), media(MediaAddress("http://h/y"))], str(owner)) for owner in range(100)]
    tasks = [asyncio.ensure_future(loading) for loading in same]
    await settle()
    runner.gate.set()
    leases = await asyncio.gather(*tasks)
    assert len(runner.jobs) == 2
    assert len(fetcher.calls) == 1
    assert {lease.items[0].features.fd for lease in leases} == {leases[0].items[0].features.fd}
    await loader.load_items([encoded(b"x")], "")
    assert len(runner.jobs) == 2


async def test_does_a_job_for_each_set_of_options():
    runner = Runner()
    loader = make_loader(runner)
    items = [
        encoded(b"x"),
        encoded(b"x", detail="high"),  # as without
        encoded(b"x", detail="low"),
        encoded(b"x", processor_options={"max_pixels": 1}),
        encoded(b"x", kind="video"),
        encoded(b"x", kind="video", loading_options={"fps": 1}),
        media(EncodedMedia(base64.b64encode(b"x").decode(), "video/jpeg"), kind="video"),
    ]
    await loader.load_items(items, "")
    assert len(runner.jobs) == 6
    assert [job.is_small for job in runner.jobs].count(True) == 1
    assert runner.jobs[-1].form == "base64_frames"


async def test_names_the_field_of_the_item_that_is_refused():
    loader = make_loader(Runner())
    requests = [
        loader.load_items([encoded(b"ok"), media(source, field=f"field{number}")], "")
        for number in range(3)
        for source in (encoded(b"bad").source, MediaAddress("http://h/missing"))
    ]
    errors = await asyncio.gather(*requests, return_exceptions=True)
    assert [error.field for error in errors] == ["field0", "field0", "field1", "field1", "field2", "field2"]
    bad, missing = errors[4:]
    assert isinstance(bad, BadMedia)
    assert (bad.message, bad.reason, bad.kind) == ("The image at field2 is bad.", "undecodable", "image")
    assert bad.detail == {"size": 3}
    assert isinstance(missing, BadMedia)
    assert missing.message == "The image could not be fetched."
    assert missing.detail == {"status": 404}


async def test_passes_errors_of_the_server_on():
    with pytest.raises(NotReady):
        await make_loader(Runner()).load_items([encoded(b"late")], "")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (MediaEmbeddings("aaaa"), "bad_embeddings"),
        (CachedMedia(), "unknown_uuid"),
        (EncodedMedia("a" * (28 << 20)), "too_large"),
    ],
)
async def test_refuses_what_is_not_allowed(source: MediaSource, reason: str):
    runner = Runner()
    with pytest.raises(BadMedia) as caught:
        await make_loader(runner).load_items([media(source)], "")
    assert (caught.value.reason, caught.value.field) == (reason, FIELD)
    assert runner.jobs == []


async def test_limits_the_bytes_of_a_request():
    loader = make_loader(Runner(), request_size=5000)
    await loader.load_items([encoded(bytes(2000)), encoded(bytes(2001))], "")
    with pytest.raises(BadMedia) as caught:
        await loader.load_items([encoded(bytes(2000)), encoded(bytes(2001)), encoded(bytes(2002))], "")
    assert caught.value.reason == "too_large" and caught.value.detail["total"] > 5000


async def test_refuses_requests_while_the_media_of_others_take_all_memory():
    loader = make_loader(Runner(), memory=10_000, cache=10_000)
    lease = await loader.load_items([encoded(bytes(10_000))], "")
    with pytest.raises(Overloaded):
        await loader.load_items([encoded(bytes(10_001))], "")
    lease.release()
    assert len((await loader.load_items([encoded(bytes(10_001))], "")).items) == 1  # the first was kept, but not needed


async def test_many_small_images_do_not_take_all_descriptors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("parley.serving.media.memory_files.find_file_limit", lambda: 40)
    loader = make_loader(Runner())
    before = len(os.listdir("/proc/self/fd"))
    for number in range(100):
        await loader.load_items([encoded(b"%d" % number)], "")
    assert len(os.listdir("/proc/self/fd")) <= before + 20
    leases = [await loader.load_items([encoded(b"used %d" % number)], "") for number in range(39)]
    with pytest.raises(Overloaded):
        await loader.load_items([encoded(b"one more")], "")
    leases.clear()
    assert len((await loader.load_items([encoded(b"one more")], "")).items) == 1


async def test_names_stand_for_items_of_their_tenant_only():
    loader = make_loader(Runner())
    await loader.load_items([encoded(b"mine", uuid="a")], "me")
    await loader.load_items([encoded(b"yours", uuid="a")], "you")
    mine = await loader.load_items([media(CachedMedia(), uuid="a")], "me")
    yours = await loader.load_items([media(CachedMedia(), uuid="a")], "you")
    assert base64.b64decode(read_features(mine.items[0])) == b"mine"
    assert base64.b64decode(read_features(yours.items[0])) == b"yours"
    for owner, fields in (("other", {}), ("me", {"kind": "video"}), ("me", {"detail": "low"}), ("me", {"uuid": "b"})):
        with pytest.raises(BadMedia) as caught:
            await loader.load_items([media(CachedMedia(), **({"uuid": "a"} | fields))], owner)
        assert caught.value.reason == "unknown_uuid"
    await loader.load_items([encoded(b"newer", uuid="a")], "me")
    newer = await loader.load_items([media(CachedMedia(), uuid="a")], "me")
    assert base64.b64decode(read_features(newer.items[0])) == b"newer"


async def test_media_cache_evicts_least_recent_unused_items():
    runner = Runner()
    loader = make_loader(runner, cache=3 * len(base64.b64encode(bytes(1000))))
    used = await loader.load_items([encoded(bytes(1000))], "")
    for number in (1, 2, 1, 3):
        await loader.load_items([encoded(bytes([number]) * 1000)], "")
    assert len(runner.jobs) == 4
    await loader.load_items([encoded(bytes([1]) * 1000)], "")
    assert len(runner.jobs) == 4
    await loader.load_items([encoded(bytes(1000))], "")
    assert len(runner.jobs) == 5
    assert base64.b64decode(read_features(used.items[0])) == bytes(1000)


async def test_dropped_items_are_processed_again_and_those_in_use_last():
    runner = Runner()
    loader = make_loader(runner)
    used = await loader.load_items([encoded(b"x")], "")
    loader.drop_kept_items()
    await loader.load_items([encoded(b"x")], "")
    assert len(runner.jobs) == 2 and base64.b64decode(read_features(used.items[0])) == b"x"


async def test_cancels_what_nobody_waits_for():
    runner = Runner()
    loader = make_loader(runner)
    fetcher = fetcher_of(loader)
    runner.gate.clear()
    items = [encoded(b"x"), media(MediaAddress("http://h/slow"))]
    first, second = (asyncio.ensure_future(loader.load_items(items, owner)) for owner in "ab")
    await settle()
    first.cancel()
    await settle()
    assert (runner.cancelled, fetcher.cancelled) == (0, 0)
    second.cancel()
    await settle()
    assert (runner.cancelled, fetcher.cancelled) == (1, 1)
    del first, second  # their errors refer to the files
    await settle()
    assert loader.memory_used == 0


async def test_cancels_the_other_items_of_a_request_that_is_refused():
    runner = Runner()
    loader = make_loader(runner)
    with pytest.raises(BadMedia):
        await loader.load_items([media(MediaAddress("http://h/missing")), media(MediaAddress("http://h/slow"))], "")
    runner.gate.clear()
    with pytest.raises(BadMedia):
        await loader.load_items([encoded(b"x"), media(CachedMedia(), uuid="u")], "")
    await settle()
    assert runner.cancelled == len(runner.jobs)


async def test_leaves_no_memory_files(monkeypatch: pytest.MonkeyPatch):
    before = len(os.listdir("/proc/self/fd"))
    loader = make_loader(Runner(), cache=0)
    leases = [await loader.load_items([encoded(bytes([number]) * 100)], "") for number in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before + 50
    for lease in leases:
        lease.release()
        lease.release()
    await settle()
    assert len(os.listdir("/proc/self/fd")) == before
    assert loader.memory_used == 0


async def test_nobody_can_change_the_features():
    lease = await make_loader(Runner()).load_items([encoded(b"x")], "")
    features = lease.items[0].features
    assert features is not None
    path = f"/proc/self/fd/{features.fd}"
    with pytest.raises(PermissionError), open(path, "r+b") as file:
        file.write(b"y")
    with pytest.raises(PermissionError):
        os.truncate(path, 0)


async def test_loads_images_with_the_processor_of_a_model():
    workers = MediaWorkerPool(str(multimodal_folder("qwen2_vl")))
    loader = make_loader(workers)
    image = encoded(image_file(image_array(90, 60)))
    leases = await asyncio.gather(*(loader.load_items([image], str(owner)) for owner in range(100)))
    assert len({lease.items[0].features for lease in leases}) == 1
    item = leases[0].items[0]
    assert (item.embedding_count, item.grids, item.replacement) == (6, [(1, 2, 3)], "<|image_pad|>" * 6)
    with pytest.raises(BadMedia) as caught:
        await loader.load_items([encoded(b"\x89PNG\r\n\x1a\n")], "")
    assert caught.value.message == f"The image at {FIELD} is damaged and cannot be decoded."
    workers.close()
