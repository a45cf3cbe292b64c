"""Media processes and engines that are killed while they decode or encode an image, alone and in a separated pair.

Each request gets its answer or one error in its API's form, streams end with one terminal event, and the next requests
have the same tokens as before. Nothing stays behind: no descriptor, child process or file in memory.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.cluster_processes import Cluster, ParleyProcess
from support.free_ports import free_port_range
from support.media_answers import image_data_url
from support.media_files import image_file
from support.multimodal_models import multimodal_folder
from support.request_mixture import Answer, judge_answers, send_request, wait_until

pytestmark = pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes a minute: PARLEY_NIGHTLY=1")

FLAGS = ("--kv-memory", "24MiB", "--dtype", "fp32", "--name", "tiny", "--threads", "1", "--trust-request-mm-kwargs")
MEDIA_PROCESS, ENGINE = "parley.worker.media_process", "parley.worker.process"
# An image of 49 million pixels takes a while to decode, and 1,200 embeddings take the encoder a while.
LARGE = base64.b64encode(image_file(Image.new("RGB", (7000, 7000)))).decode()
MANY_PIXELS = {"min_pixels": 1_000_000, "max_pixels": 1_100_000}


def chat(url: str, **members: Any) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 12, "temperature": 0}
    return "/v1/chat/completions", body | {"ignore_eos": True} | members


def requests_of_every_api(data: str) -> list[tuple[str, dict[str, Any]]]:
    """Return requests about one image, whole and streamed."""
    url = f"data:image/png;base64,{data}"
    inputs = {"inputs": f"![]({url})", "parameters": {"max_new_tokens": 12}}
    part = {"type": "image_url", "image_url": url}
    triton = {"text_input": "<|image_pad|>", "image": [data]}
    return [
        chat(url),
        chat(url, stream=True),
        ("/vllm/v1/chat/completions", chat(url)[1]),
        ("/mindie/v1/chat/completions", chat(url)[1] | {"stream": True}),
        ("/mindie", {"inputs": [part], "parameters": {"max_new_tokens": 12}}),
        ("/tgi/generate", inputs),
        ("/tgi/generate_stream", inputs),
        ("/triton/v2/models/tiny/generate", triton),
        ("/databricks/serving-endpoints/tiny/invocations", {"messages": chat(url)[1]["messages"], "max_tokens": 12}),
    ]


def find_child(parent: int, module: str) -> int | None:
    """Return the process id of a child that runs a module."""
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in path.read_text("ascii").split():
            if module in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
                return int(child)
    return None


def processor_seconds(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def kill_when_busy(parent: int, module: str, seconds: float) -> None:
    """Kill a child once it has used some seconds of processor time from now on."""
    child = find_child(parent, module)
    assert child is not None
    before = processor_seconds(child)
    assert await wait_until(lambda: processor_seconds(child) > before + seconds, 60)
    os.kill(child, signal.SIGKILL)


def held_files(process_id: int) -> list[str]:
    """Return what the descriptors of a process refer to, without the sockets of clients."""
    links = []
    for entry in os.scandir(f"/proc/{process_id}/fd"):
        try:
            links.append(os.readlink(entry.path).partition(":[")[0])
        except FileNotFoundError:
            continue
    return sorted(link for link in links if link != "socket")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParleyProcess]:
    port = free_port_range(1)
    command = [sys.executable, "-m", "parley", "serve", str(multimodal_folder("qwen2_vl")), "--port", str(port), *FLAGS]
    process = ParleyProcess(command, f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("server") / "server.log")
    yield process
    process.kill_group()


async def is_ready(process: ParleyProcess) -> bool:
    return await wait_until(lambda: process.fetch("/health/ready")[0] == 200, 90)


async def ask(url: str, *calls: tuple[str, dict[str, Any]]) -> list[Answer]:
    answers = [Answer() for _ in calls]
    await asyncio.gather(*(send_request(url, *call, answer) for call, answer in zip(calls, answers, strict=True)))
    assert all(answer.whole for answer in answers), answers
    return answers


def assert_ended_once(answer: Answer, statuses: set[int]) -> None:
    """Check that an answer is an error of one of the statuses, or a stream whose only error is its last event."""
    events = list(answer.events())
    failed = ["error" in json.dumps(event) for event in events]
    assert failed.count(True) == 1 and failed[-1], answer.body
    assert answer.status in statuses | ({200} if answer.stream else set()), (answer.status, answer.body)
    for secret in (b"Traceback", b"/proc", b"0x"):
        assert secret not in answer.body


async def check_same(url: str, expected: str) -> None:
    (answer,) = await ask(url, chat(image_data_url(1)))
    assert answer.status == 200, answer.body
    assert next(answer.events())["choices"][0]["message"]["content"] == expected


async def test_requests_whose_media_process_is_killed_are_refused(server: ParleyProcess) -> None:
    assert await is_ready(server)
    (control,) = await ask(server.url, chat(image_data_url(1)))
    expected = next(control.events())["choices"][0]["message"]["content"]
    files = held_files(server.process_group)
    for number, call in enumerate(requests_of_every_api(LARGE)):
        await ask(server.url, chat(image_data_url(100 + number)))  # starts a process
        killing = asyncio.create_task(kill_when_busy(server.process_group, MEDIA_PROCESS, 0.1))
        (answer,) = await ask(server.url, call)
        await killing
        assert_ended_once(answer, {400, 422})
        await check_same(server.url, expected)
    # Images that were asked for are kept: one in memory for each call.
    assert len(held_files(server.process_group)) <= len(files) + len(requests_of_every_api(LARGE))


async def test_requests_whose_engine_is_killed_while_it_encodes_fail(server: ParleyProcess) -> None:
    assert await is_ready(server)
    (control,) = await ask(server.url, chat(image_data_url(1)))
    expected = next(control.events())["choices"][0]["message"]["content"]
    for stream in (False, True):
        max_files = len(held_files(server.process_group)) + 1  # the image is kept
        killing = asyncio.create_task(kill_when_busy(server.process_group, ENGINE, 0.05))
        call = chat(image_data_url(10 + stream), stream=stream, mm_processor_kwargs=MANY_PIXELS)
        (answer,) = await ask(server.url, call)
        await killing
        assert_ended_once(answer, {503})
        assert await is_ready(server)
        await check_same(server.url, expected)
        assert len(held_files(server.process_group)) <= max_files


@pytest.mark.parametrize("number", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("whole", [False, True], ids=["engine", "instance"])
async def test_a_pair_answers_about_an_image_after_a_kill(tmp_path: Path, number: int, whole: bool) -> None:
    """P is killed while it encodes, D while it streams. ``whole``: the instance is killed, and not its engine alone."""
    flags = ("--model", str(multimodal_folder("qwen2_vl")), *FLAGS)
    cluster = Cluster(tmp_path, "prefill", "decode", flags=flags, separate="always", heartbeat=0.25)
    try:
        url, victim = cluster.coordinator.url, cluster.instances[number]
        calls = [chat(image_data_url(1), max_tokens=600, stream=stream) for stream in (False, True)]
        answers = [Answer() for _ in calls]
        sending = [
            asyncio.create_task(send_request(url, *call, answer)) for call, answer in zip(calls, answers, strict=True)
        ]
        engine = find_child(victim.process_group, ENGINE)
        assert engine is not None
        before = processor_seconds(engine)
        if number:
            assert await wait_until(lambda: answers[1].count > 1, 90)
        else:
            assert await wait_until(lambda: processor_seconds(engine) > before + 0.2, 90)
        if whole:
            await asyncio.to_thread(victim.restart)
        else:
            os.kill(engine, signal.SIGKILL)
        await asyncio.wait(sending, timeout=90)
        await asyncio.to_thread(cluster.ready)
        controls = await ask(url, *calls)
        assert [control.status for control in controls] == [200, 200]
        assert set(judge_answers(answers, [control.contents() for control in controls])) <= {"exact", "error"}, answers
        await asyncio.to_thread(cluster.wait_until_idle)
    finally:
        cluster.close()
