"""Files and options that attack decoders are refused in good time; afterwards everything is as before.

``PARLEY_NIGHTLY=1`` adds attacks that take long.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.media_files import image_array, image_file, png_header, sine_wave, sound_file, video_file, wav_file
from support.multimodal_models import multimodal_folder

from parley.errors import BadMedia
from parley.serving.media.fetcher import MediaFetcher
from parley.serving.media.loader import MediaLoader
from parley.serving.media.local_files import LocalMediaFolder
from parley.serving.media.workers import MediaWorkerPool
from parley.serving.server_options import MediaOptions
from parley.types import EncodedMedia, Media

SDP = b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=audio 5004 RTP/AVP 0\r\n"
CONCAT = b"ffconcat version 1.0\nfile /etc/passwd\n"
IMAGE = image_file(image_array(90, 60))
JPEG = base64.b64encode(image_file(image_array(8, 8), "JPEG")).decode()
# What must not be in an error: addresses in memory, paths, names of libraries, classes and files.
LEAK = re.compile(r"0x[0-9a-f]|/proc|/etc|/usr|/work|\.py|PIL|BytesIO|ffmpeg|av\.|Errno|Traceback|torch", re.IGNORECASE)


def gif_of_many_frames() -> bytes:
    frames = [Image.new("P", (4, 4), number % 200) for number in range(2000)]
    return image_file(frames[0], "GIF", save_all=True, append_images=frames[1:])


def jpeg_of_many_scans(count: int) -> bytes:
    """A progressive JPEG file of ``count`` scans, of which each repeats the last one of a file of few."""
    data = image_file(Image.new("L", (64, 64)), "JPEG", progressive=True)
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last_scan * (count - data.count(b"\xff\xda")) + data[-2:]


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


ATTACKS: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "huge header": ("image", png_header(60_000, 60_000), {}, "too_many_pixels"),
    "pixel bomb": ("image", image_file(Image.new("1", (14_000, 14_000))), {}, "too_many_pixels"),
    "zero pixels": ("image", png_header(0, 0), {}, "undecodable"),
    "empty": ("image", b"", {}, "unknown_format"),
    "svg": (
        "image",
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        {},
        "unknown_format",
    ),
    "jpeg 2000": ("image", image_file(image_array(), "JPEG2000"), {}, "unknown_format"),
    "many scans": ("image", jpeg_of_many_scans(101), {}, "too_slow"),
    "cut png": ("image", cut(IMAGE), {}, "undecodable"),
    "too narrow": ("image", image_file(image_array(300, 1)), {}, "refused_by_model"),
    "many pixels wanted": (
        "image",
        IMAGE,
        {"processor_options": {"min_pixels": 10**10, "max_pixels": 10**10}},
        "too_slow",
    ),
    "large integer": ("image", IMAGE, {"processor_options": {"max_pixels": -(10**30)}}, "refused_by_model"),
    "other text": ("image", IMAGE, {"processor_options": {"text": ["x"]}}, "refused_by_model"),
    "deep option": (
        "image",
        IMAGE,
        {"processor_options": {"size": json.loads("[" * 90 + "]" * 90)}},
        "refused_by_model",
    ),
    "odd option": ("image", IMAGE, {"processor_options": {"\ud800" * 3: 1}}, "refused_by_model"),
    "sdp": ("video", SDP, {}, "unknown_format"),
    "concat": ("video", CONCAT, {}, "unknown_format"),
    "sdp as mp4": ("video", b"\0\0\0\x18ftypisom" + SDP, {}, "undecodable"),
    "sound as video": ("video", sound_file("mp4", "aac", sine_wave(1, 48_000)[None], 48_000), {}, "undecodable"),
    "cut mp4": ("video", cut(video_file()), {}, "undecodable"),
    "endless frames": (
        "video",
        video_file(),
        {"loading_options": {"num_frames": 10**30}, "frames": "," * (1 << 20)},
        "too_long",
    ),
    "all frames": (
        "video",
        video_file(frames=1100, width=16, height=16),
        {"loading_options": {"num_frames": -1}},
        "too_long",
    ),
    "no sound here": ("audio", wav_file(sine_wave(1, 16_000)[None], 16_000), {}, "refused_by_model"),
}


@pytest.fixture(scope="module")
def workers() -> Any:
    media_workers = MediaWorkerPool(str(multimodal_folder("qwen2_vl")))
    yield media_workers
    media_workers.close()


def make_loader(workers: MediaWorkerPool) -> MediaLoader:
    options = MediaOptions(cache=0)
    return MediaLoader(workers, MediaFetcher(options), LocalMediaFolder(options), options)


def media(kind: Any, data: bytes, **fields: Any) -> Media:
    text, media_type = fields.pop("frames", None), ""
    if text is not None:
        media_type = "video/jpeg"
    source = EncodedMedia(text if text is not None else base64.b64encode(data).decode(), media_type)
    return Media(**({"kind": kind, "source": source, "field": "field[0]"} | fields))


async def digest_of(loader: MediaLoader) -> bytes:
    lease = await loader.load_items([media("image", IMAGE)], "")
    digest = lease.items[0].digest
    lease.release()
    return digest


async def memory_is_free(loader: MediaLoader) -> None:
    """Wait until the last files are closed: a thread may still hold one for a moment after its job."""
    async with asyncio.timeout(20):
        while loader.memory_used:
            gc.collect()
            await asyncio.sleep(0.01)


def resident_bytes(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text("ascii")
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) << 10


async def test_attacks_are_refused_and_leave_nothing_behind(workers: MediaWorkerPool):
    loader = make_loader(workers)
    expected = await digest_of(loader)
    process_ids = workers.idle_process_ids
    before = resident_bytes(process_ids[0]), len(os.listdir("/proc/self/fd"))
    for name, (kind, data, fields, reason) in ATTACKS.items():
        with pytest.raises(BadMedia) as caught:
            await loader.load_items([media(kind, data, **fields)], name)
        assert caught.value.reason == reason, (name, caught.value.message)
        assert not LEAK.search(caught.value.message), caught.value.message
    await loader.load_items([media("image", gif_of_many_frames())], "")  # its first frame is read
    del caught
    assert await digest_of(loader) == expected
    assert workers.idle_process_ids == process_ids  # none of these ends the process
    await memory_is_free(loader)
    assert len(os.listdir("/proc/self/fd")) <= before[1]
    assert resident_bytes(process_ids[0]) < before[0] + (256 << 20)


async def test_clients_that_attack_and_leave_do_not_stop_others(workers: MediaWorkerPool):
    loader = make_loader(workers)
    expected = await digest_of(loader)
    process_ids = workers.idle_process_ids

    async def attack(number: int) -> None:
        bomb = image_file(image_array(64 + number, 64))
        task = asyncio.ensure_future(loader.load_items([media("image", bomb)] * 2, "attacker"))
        await asyncio.sleep(0.002 * number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    attacks = [asyncio.ensure_future(attack(number)) for number in range(40)]
    for _ in range(3):
        assert await digest_of(loader) == expected
    await asyncio.gather(*attacks)
    attacks.clear()
    await memory_is_free(loader)  # the last job may still run
    assert workers.idle_process_ids == process_ids
    assert await digest_of(loader) == expected
    await memory_is_free(loader)


@pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="writing the file takes long")
async def test_minutes_of_silence_in_few_bytes_end_at_the_limit():
    audio_workers = MediaWorkerPool(str(multimodal_folder("qwen3_asr")))
    loader = make_loader(audio_workers)
    opus = sound_file("ogg", "libopus", np.zeros((1, 620 * 8_000), np.float32), 8_000)
    with pytest.raises(BadMedia) as caught:
        await loader.load_items([media("audio", opus)], "")
    assert caught.value.reason == "too_long"
    audio_workers.close()
