"""Media processes end with jobs that are too slow or kill them, are started again, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.media_files import image_array, image_file, png_header
from support.multimodal_models import multimodal_folder

from parley.child_process import python_command
from parley.engine.media_messages import DecodingLimits, MediaJobRequest, MediaJobResult, MediaRefused
from parley.errors import NotReady, Unsupported
from parley.serving.media import workers as workers_module
from parley.serving.media.memory_files import MemoryBudget, MemoryFile
from parley.serving.media.workers import MediaWorkerPool

IMAGE = image_file(image_array())
# A process that obeys certain words in the data; the others have a model's processor.
OBEDIENT_PROCESS = """
import os, sys, time
from parley.engine.media_messages import MediaJobResult, MediaRefused
from parley.types import ProcessedMedia
from parley.worker import media_process

class Jobs:
    def __init__(self, folder):
        if folder.name == "broken":
            raise ValueError("/secret/path")
    def process_media(self, job):
        from pathlib import Path
        word = Path(f"/proc/{job.source.pid}/fd/{job.source.fd}").read_bytes()
        if word == b"spin":
            while True:
                pass
        if word == b"environment":
            return MediaRefused(" ".join(os.environ), "undecodable")
        if word == b"abort":
            os.abort()
        if word == b"sleep":
            time.sleep(3600)
        while word.startswith(b"/") and not os.path.exists(word):
            time.sleep(0.01)
        if word == b"raise":
            raise RuntimeError("at 0x7f0000")
        if word == b"allocate":
            return MediaRefused(str(len(bytearray(64 << 30))), "undecodable")
        if word == b"fill":
            with open(f"/proc/{job.target.pid}/fd/{job.target.fd}", "wb") as file:
                while True:
                    file.write(bytes(1 << 20))
        Path(f"/proc/{job.target.pid}/fd/{job.target.fd}").write_bytes(word)
        return MediaJobResult(ProcessedMedia("image", bytes(32), str(os.nice(0)), "<x>", 1), len(word))

media_process.JOB_SECONDS = 0
media_process.MAX_RESULT_BYTES = 1 << 22
from pathlib import Path
media_process.serve_media_socket(Path(sys.argv[1]), int(sys.argv[2]), Jobs)
"""
OBEDIENT_COMMAND = python_command("-c", OBEDIENT_PROCESS)
FOLDERS = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
BUDGET = MemoryBudget(1 << 30)


@pytest.fixture
def workers() -> Iterator[MediaWorkerPool]:
    media_workers = MediaWorkerPool("/model", command=OBEDIENT_COMMAND)
    yield media_workers
    media_workers.close()
    assert media_workers.idle_process_ids == []


async def send(workers: MediaWorkerPool, data: bytes, tenant: str = "") -> MediaJobResult | MediaRefused:
    source, target = MemoryFile(BUDGET), MemoryFile(BUDGET)
    source.write_bytes(data)
    job = MediaJobRequest("image", "file", source.feature_file, target.feature_file, False, "[{},{}]", DecodingLimits())
    return await workers.process_media(source, target, job, tenant)


async def test_does_one_job_after_the_other_in_one_process_with_a_low_priority(workers: MediaWorkerPool):
    first = await send(workers, b"one")
    assert isinstance(first, MediaJobResult)
    assert int(first.item.replacement) == min(os.nice(0) + 10, 19)
    process_ids = workers.idle_process_ids
    assert await send(workers, b"two") == first
    assert workers.idle_process_ids == process_ids


@pytest.mark.parametrize(("word", "reason"), [(b"spin", "too_slow"), (b"abort", "undecodable")], ids=["spin", "abort"])
async def test_refuses_an_item_that_ends_its_process(workers: MediaWorkerPool, word: bytes, reason: str):
    refused = await send(workers, word)
    assert isinstance(refused, MediaRefused)
    assert refused.reason == reason
    assert isinstance(await send(workers, b"next"), MediaJobResult)


async def test_survives_the_signals_that_reach_its_process_group(workers: MediaWorkerPool):
    await send(workers, b"first")
    (process_id,) = workers.idle_process_ids
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process_id, number)
    assert isinstance(await send(workers, b"second"), MediaJobResult)
    assert workers.idle_process_ids == [process_id]


@pytest.mark.parametrize("word", [b"raise", b"allocate", b"fill"])
async def test_survives_errors_and_jobs_that_want_too_much(workers: MediaWorkerPool, word: bytes):
    assert isinstance(await send(workers, b"first"), MediaJobResult)
    process_ids = workers.idle_process_ids
    assert await send(workers, word) == MediaRefused("cannot be processed", "refused_by_model")
    assert workers.idle_process_ids == process_ids


async def test_the_environment_of_the_process_has_no_keys(workers: MediaWorkerPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PARLEY_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    answer = await send(workers, b"environment")
    assert isinstance(answer, MediaRefused)
    assert "PATH" in answer.predicate.split()
    assert not {"PARLEY_API_KEY", "HF_TOKEN"} & set(answer.predicate.split())


async def test_refuses_the_job_of_a_killed_process(workers: MediaWorkerPool):
    assert isinstance(await send(workers, b"first"), MediaJobResult)
    (process_id,) = workers.idle_process_ids
    job = asyncio.ensure_future(send(workers, b"sleep"))
    while workers.idle_process_ids:
        await asyncio.sleep(0.01)
    os.kill(process_id, signal.SIGKILL)
    refused = await job
    assert isinstance(refused, MediaRefused)
    assert refused.reason == "too_slow"
    assert isinstance(await send(workers, b"next"), MediaJobResult)


async def test_starts_another_process_for_one_that_was_killed_while_idle(workers: MediaWorkerPool):
    assert isinstance(await send(workers, b"first"), MediaJobResult)
    (process_id,) = workers.idle_process_ids
    os.kill(process_id, signal.SIGKILL)
    while Path(f"/proc/{process_id}/stat").read_text().split(") ")[1][0] != "Z":
        await asyncio.sleep(0.01)
    assert isinstance(await send(workers, b"next"), MediaJobResult)


async def test_another_process_does_the_job_that_a_killed_one_has_not_read(workers: MediaWorkerPool):
    assert isinstance(await send(workers, b"first"), MediaJobResult)
    (process_id,) = workers.idle_process_ids
    os.kill(process_id, signal.SIGSTOP)
    job = asyncio.ensure_future(send(workers, b"next"))
    while workers.idle_process_ids:
        await asyncio.sleep(0.01)
    os.kill(process_id, signal.SIGKILL)
    assert isinstance(await job, MediaJobResult)
    assert workers.idle_process_ids != [process_id]


async def test_lets_a_short_job_finish_that_nobody_wants_any_more(workers: MediaWorkerPool):
    assert isinstance(await send(workers, b"first"), MediaJobResult)
    process_ids = workers.idle_process_ids
    for _ in range(20):
        job = asyncio.ensure_future(send(workers, b"x" * 1_000_000))
        await asyncio.sleep(0)
        job.cancel()
    assert isinstance(await send(workers, b"next"), MediaJobResult)
    assert workers.idle_process_ids == process_ids


async def test_kills_the_process_of_a_long_job_that_nobody_wants_any_more(
    workers: MediaWorkerPool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers_module, "KILL_DELAY", 0.01)
    assert isinstance(await send(workers, b"first"), MediaJobResult)
    (process_id,) = workers.idle_process_ids
    job = asyncio.ensure_future(send(workers, b"sleep"))
    while workers.idle_process_ids:
        await asyncio.sleep(0.01)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert isinstance(await send(workers, b"next"), MediaJobResult)
    assert workers.idle_process_ids != [process_id]
    del job
    async with asyncio.timeout(20):
        while BUDGET.used:
            await asyncio.sleep(0.01)


async def test_cancels_a_job_that_waits_without_ending_the_process(workers: MediaWorkerPool, tmp_path: Path):
    assert isinstance(await send(workers, b"first"), MediaJobResult)
    process_ids = workers.idle_process_ids
    running = asyncio.ensure_future(send(workers, str(tmp_path / "go").encode()))  # until there is such a file
    while workers.idle_process_ids:
        await asyncio.sleep(0.01)
    waiting = asyncio.ensure_future(send(workers, b"abort"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (tmp_path / "go").touch()
    assert isinstance(await running, MediaJobResult)
    assert isinstance(await send(workers, b"b"), MediaJobResult)
    assert workers.idle_process_ids == process_ids


async def test_says_that_a_processor_cannot_be_loaded_without_its_error():
    workers = MediaWorkerPool("/broken", command=OBEDIENT_COMMAND)
    with pytest.raises(Unsupported, match=r"^This model's media cannot be read: its processor cannot be loaded\.$"):
        await send(workers, b"x")
    workers.close()


async def test_says_that_a_process_does_not_start():
    workers = MediaWorkerPool("/model", command=[sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(NotReady):
        await send(workers, b"x")
    workers.close()


async def test_names_the_extra_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(workers_module.PACKAGES, "parley_no_such_package", "PyNone")
    with pytest.raises(Unsupported, match=r"PyNone is not installed \(pip install 'parley-llm\[media\]'\)"):
        await send(MediaWorkerPool("/model"), b"x")


async def test_the_process_dies_with_its_parent():
    program = (
        "import asyncio, os, sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_media_process import *\n"
        "workers = MediaWorkerPool('/model', command=OBEDIENT_COMMAND)\n"
        "asyncio.run(send(workers, b'x'))\n"
        "print(workers.idle_process_ids[0], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *FOLDERS, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await parent.communicate()
    async with asyncio.timeout(20):
        while Path(f"/proc/{int(output)}").exists():
            await asyncio.sleep(0.02)


async def test_decodes_images_in_a_real_process():
    workers = MediaWorkerPool(str(multimodal_folder("qwen2_vl")))
    await workers.start()
    process_ids = workers.idle_process_ids
    processed: Any = await send(workers, IMAGE)
    assert processed.item.embedding_count == 1
    bomb: Any = await send(workers, png_header(60_000, 60_000))
    assert bomb.reason == "too_many_pixels"
    huge: Any = await send(workers, image_file(image_array()) + bytes(1 << 24))  # data after the image
    assert huge.item.embedding_count == 1
    assert workers.idle_process_ids == process_ids
    workers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process_ids[0], 0)
