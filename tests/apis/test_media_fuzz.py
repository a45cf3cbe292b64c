"""Odd requests with media to models that see or hear: each gets an answer or an error of its API, nothing stays behind.

``make fuzz`` sends 20,000 of them.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support.fuzz import MAX_EXAMPLES, encode, run_in_loop
from support.http_client import Answer, RunningServer
from support.media_answers import image_bytes, image_data_url
from support.media_files import sine_wave, wav_file
from support.media_host import http_answer, redirect_to, run_media_host
from support.multimodal_models import multimodal_folder
from support.odd_media import clip_calls, media_calls
from support.sound_forms import FORM_TYPE

from parley.dialects.request_context import ApiOptions
from parley.serving.server_options import MediaOptions
from parley.settings.media_hosts import parse_media_host
from parley.types import ParleySettings

EXAMPLES = MAX_EXAMPLES if "PARLEY_FUZZ" in os.environ else 25
CACHE_BYTES = 4 << 20
# What no error may have, unless its request has it.
LEAK = re.compile(rb"0x[0-9a-f]{6,}|/proc/|site-packages|\.py\b|BytesIO|Errno|Traceback|Invalid data found")

PARSE_ERROR = re.compile("failed to parse|Unable to parse|attempt to access")


@pytest.fixture
async def start(serve, tmp_path: Path):
    """A function that starts a server of a family, which may fetch from a host and read files of ``tmp_path``.

    It returns the server and the host's address.
    """
    (tmp_path / "a.png").write_bytes(image_bytes(1))
    (tmp_path / "cut.jpg").write_bytes(image_bytes(1, "PNG")[:200])
    (tmp_path / "a.wav").write_bytes(wav_file(sine_wave(0.1, 16_000)[None], 16_000))
    (tmp_path / "link.png").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe.png")
    async with run_media_host() as host:
        host.answers |= {
            "/a.png": http_answer(image_bytes(1)),
            "/b.jpg": http_answer(image_bytes(2)),
            "/cut.png": http_answer(image_bytes(3)[:300]),
            "/loop.png": redirect_to("/loop.png"),
            "/private.png": redirect_to("http://169.254.169.254/a.png"),
            "/empty.mp4": http_answer(b""),
        }

        async def start_server(family: str) -> tuple[RunningServer, str]:
            server = await serve(
                settings=ParleySettings(
                    model=str(multimodal_folder(family)), dtype="float32", kv_memory=8 << 20, threads=1
                ),
                media=MediaOptions(
                    hosts=(parse_media_host(f"127.0.0.1:{host.port}"),),
                    folder=str(tmp_path),
                    cache=CACHE_BYTES,
                    accepts_embeddings=True,
                ),
                api_options=ApiOptions(enable_mm_embeds=True, trust_request_mm_kwargs=True),
            )
            return server, f"127.0.0.1:{host.port}"

        yield start_server


async def ask_about(server: RunningServer, part: dict[str, Any]) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}], "max_tokens": 8, "temperature": 0}
    answer = await server.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]["content"]


def is_triton_parse_error(path: str, answer: Answer) -> bool:
    """Whether it is a 500 for JSON of a wrong type, as Triton answers."""
    return path.startswith("/triton") and PARSE_ERROR.match(answer.json["error"]) is not None


def check_answer(path: str, body: bytes, answer: Answer, error_members: tuple[str, ...]) -> None:
    assert answer.status < 500 or is_triton_parse_error(path, answer), (path, body, answer.body)
    if answer.status != 200:
        assert 0 < len(answer.body) < 4000, (path, body)
        if answer.headers["content-type"].startswith("text/plain"):
            assert answer.body.startswith(b"Failed to "), (path, body, answer.body)
        else:
            assert tuple(answer.json) == error_members, (path, body, answer.body)
        leak = LEAK.search(answer.body)
        assert leak is None or leak[0] in body, (path, body, answer.body)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        events = answer.body.removesuffix(b"\n\n").split(b"\n\n")
        assert b"data: [DONE]" not in events[:-1], (path, body, answer.body)
        if events[0].startswith(b'data: {"error"'):  # TGI begins the stream before it knows
            assert path.startswith("/tgi") and events[1:] in ([], [b"data: [DONE]"]), (path, body, answer.body)
    elif answer.headers["content-type"].startswith("application/json") or "ndjson" in answer.headers["content-type"]:
        assert [json.loads(line) for line in answer.body.splitlines()], (path, body)
    else:  # a transcript as text or subtitles
        assert b"form-data" in body and answer.body.decode().endswith("\n"), (path, body, answer.body)


async def test_odd_media_get_an_answer_or_an_error_of_their_api(start: Any, tmp_path: Path):
    server, host = await start("qwen2_vl")
    await fuzz_calls(
        server, media_calls, {"type": "image_url", "image_url": {"url": image_data_url(1)}}, host, tmp_path
    )


async def test_odd_clips_get_an_answer_or_an_error_of_their_api(start: Any, tmp_path: Path):
    server, host = await start("qwen3_asr")
    clip = base64.b64encode(wav_file(sine_wave(0.5, 16_000)[None], 16_000)).decode()
    part = {"type": "input_audio", "input_audio": {"data": clip, "format": "wav"}}
    await fuzz_calls(server, clip_calls, part, host, tmp_path)


async def fuzz_calls(server: RunningServer, calls: Any, part: dict[str, Any], host: str, folder: Path) -> None:
    """Send generated requests; the answer to a message with ``part`` stays the same, and nothing stays behind."""
    other_files = Counter(memory_files())  # of tests that ran before in this process
    before = await ask_about(server, part)
    descriptors = len(os.listdir("/proc/self/fd"))
    children = child_processes()

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(call=calls)
    async def fuzz(call):
        error_members, (path, members) = call
        if isinstance(members, bytes):
            answer = await server.post(path, members, **{"content-type": FORM_TYPE.decode()})
            return check_answer(path, members, answer, error_members)
        body = encode(members).replace(b"{host}", host.encode()).replace(b"{folder}", str(folder).encode())
        check_answer(path, body, await server.post(path, body), error_members)

    await run_in_loop(fuzz)
    await server.wait_until_idle()
    assert await ask_about(server, part) == before
    server.model._media_loader._cache.clear()
    async with asyncio.timeout(20):  # a job that was cancelled keeps its files for seconds
        while server.model._media_loader.memory_used:
            gc.collect()
            await asyncio.sleep(0.05)
    assert not Counter(memory_files()) - other_files
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2  # the server keeps an idle connection or two
    assert len(child_processes()) == len(children)


def child_processes() -> list[str]:
    """Return the process ids of the children that any thread of this process has started."""
    return " ".join(path.read_text("ascii") for path in Path("/proc/self/task").glob("*/children")).split()


def memory_files() -> list[str]:
    """Return the files in memory that this process has open."""
    links = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            links.append(os.readlink(entry.path))
        except FileNotFoundError:
            continue  # the descriptor of this very look
    return [link for link in links if link.startswith("/memfd:")]
