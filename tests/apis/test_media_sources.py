"""Images by URL and from files, over HTTP in every API: what is allowed is read, and attacks are refused."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import Any

import pytest
from support.media_answers import image_base64
from support.media_host import MediaHost, http_answer, redirect_to, run_media_host
from support.multimodal_models import multimodal_folder

from parley.serving.server_options import MediaOptions
from parley.settings.media_hosts import parse_media_host
from parley.types import ParleySettings

IMAGE = base64.b64decode(image_base64(1))
QUESTION = "What is this?"


@pytest.fixture
async def host():
    async with run_media_host() as media_host:
        media_host.answers["/a.png"] = http_answer(IMAGE)
        yield media_host


@pytest.fixture
async def ask(serve, host: MediaHost, tmp_path):
    """Start a server that fetches from the host and reads files of a folder; return what asks it in each API."""
    (tmp_path / "a.png").write_bytes(IMAGE)
    (tmp_path / "link.png").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe.png")
    hosts = (parse_media_host(f"127.0.0.1:{host.port}"), parse_media_host("any-public"))
    settings = ParleySettings(model=str(multimodal_folder("llava")), dtype="float32", kv_memory=8 << 20, threads=1)
    server = await serve(settings=settings, media=MediaOptions(hosts=hosts, folder=str(tmp_path)))

    async def ask_api(api: str, url: str):
        return await server.post(PATHS[api], BODIES[api](url))

    return ask_api


def chat_body(part: Any) -> dict[str, Any]:
    content = [part, {"type": "text", "text": QUESTION}]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}


def openai_body(url: str) -> dict[str, Any]:
    return chat_body({"type": "image_url", "image_url": {"url": url}})


def mindie_body(url: str) -> dict[str, Any]:
    return chat_body({"type": "image_url", "image_url": url})


def tgi_body(url: str) -> dict[str, Any]:
    return {"inputs": f"![]({url}){QUESTION}", "parameters": {"max_new_tokens": 6}}


PATHS = {
    "openai": "/v1/chat/completions",
    "vllm": "/vllm/v1/chat/completions",
    "mindie": "/mindie/v1/chat/completions",
    "databricks": "/databricks/serving-endpoints/tiny/invocations",
    "tgi": "/tgi/generate",
}
BODIES = {
    "openai": openai_body,
    "vllm": openai_body,
    "mindie": mindie_body,
    "databricks": lambda url: {name: value for name, value in openai_body(url).items() if name != "model"},
    "tgi": tgi_body,
}


def answer_text(api: str, answer: Any) -> str:
    assert answer.status == 200, (api, answer.body)
    return answer.json["generated_text"] if api == "tgi" else answer.json["choices"][0]["message"]["content"]


async def test_images_by_url_and_from_files_are_those_in_base64(ask, host: MediaHost, tmp_path):
    for api in PATHS:
        sent = answer_text(api, await ask(api, f"data:image/png;base64,{image_base64(1)}"))
        assert answer_text(api, await ask(api, f"http://127.0.0.1:{host.port}/a.png")) == sent
        if api in ("openai", "vllm", "mindie"):
            assert answer_text(api, await ask(api, f"file://{tmp_path}/a.png")) == sent
    assert len(host.heads) == len(PATHS)


async def test_attacks_by_url_are_refused_in_every_api(ask, host: MediaHost, tmp_path):
    async with run_media_host() as sink:  # on a port that no rule names
        sink.answers["/a.png"] = http_answer(IMAGE)
        answers = {
            "/private.png": redirect_to("http://169.254.169.254/latest/a.png"),
            "/port.png": redirect_to(f"http://127.0.0.1:{sink.port}/a.png"),
            "/number.png": redirect_to(f"http://2130706433:{sink.port}/a.png"),
            "/endless.png": redirect_to("/endless.png"),
            "/huge.png": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
            "/text.png": http_answer(b"no image"),
            "/compressed.png": http_answer(b"\x1f\x8b" * 100, "Content-Encoding: gzip"),
        }
        host.answers |= answers
        attacks = [
            "http://127.0.0.1/a.png",
            f"http://127.0.0.1:{sink.port}/a.png",
            f"http://localhost:{sink.port}/a.png",
            "http://[::1]/a.png",
            "http://2130706433/a.png",
            "http://0x7f.1/a.png",
            "http://169.254.169.254/a.png",
            f"http://good.example@127.0.0.1:{host.port}/a.png",
            f"http://good.example\\@127.0.0.1:{host.port}/a.png",
            *(f"http://127.0.0.1:{host.port}{path}" for path in [*answers, "/missing.png"]),
            "file:///etc/passwd.png",
            f"file://{tmp_path}/link.png",
            f"file://{tmp_path}/pipe.png",
            f"file://{tmp_path}/../../../etc/passwd.png",
            "gopher://127.0.0.1/a.png",
        ]
        fetched = f"http://127.0.0.1:{host.port}/a.png"
        control = {api: answer_text(api, await ask(api, fetched)) for api in PATHS}
        descriptors = len(os.listdir("/proc/self/fd"))
        for api in PATHS:
            for url in attacks:
                answer = await ask(api, url)
                assert answer.status in (400, 422), (api, url, answer.body)
                sentence = answer.body.decode().replace(url, "")
                for secret in ("Errno", "latest", "root:", "httpcore", "Traceback", "/proc", f"{tmp_path}"):
                    assert secret not in sentence, (api, url, answer.body)
        assert not sink.heads
        await host.wait_until_idle()
    assert {api: answer_text(api, await ask(api, fetched)) for api in PATHS} == control
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2  # the server keeps an idle connection or two


async def test_a_client_that_leaves_ends_the_fetch_of_its_image(ask, host: MediaHost):
    async def say_nothing(_writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    host.answers["/slow.png"] = say_nothing
    asking = asyncio.create_task(ask("openai", f"http://127.0.0.1:{host.port}/slow.png"))
    while not host.heads:
        await asyncio.sleep(0.01)
    asking.cancel()
    await host.wait_until_idle()
    assert answer_text("openai", await ask("openai", f"http://127.0.0.1:{host.port}/a.png"))


async def test_a_link_in_a_text_is_not_fetched_for_a_model_that_reads_text_only(serve, host: MediaHost):
    server = await serve(media=MediaOptions(hosts=(parse_media_host(f"127.0.0.1:{host.port}"),)))
    answer = await server.post("/tgi/generate", tgi_body(f"http://127.0.0.1:{host.port}/a.png"))
    assert answer.status == 200 and not host.heads
