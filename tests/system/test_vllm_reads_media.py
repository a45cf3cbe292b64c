"""A vision model behind vLLM: ``make test-engines``. Skipped unless PARLEY_VLLM_PYTHON names vLLM's Python."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.free_ports import free_port
from support.media_files import image_file
from support.multimodal_models import write_model_for_vllm
from support.server_process import ServerProcess, running_server

PYTHON = os.environ.get("PARLEY_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="PARLEY_VLLM_PYTHON does not name a Python with vLLM")
START_SECONDS = 280.0
COMMON_FLAGS = ("--max-model-len", "2048", "--dtype", "float32")
SIZES = [(64, 96), (40, 40), (120, 300)]
TOKENS = 12


def image(number: int, height: int = 64, width: int = 64) -> str:
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return base64.b64encode(image_file(pixels)).decode()


def chat_body(*images: str, **members: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {"model": "m", "messages": [{"role": "user", "content": content}]} | options | members


BODIES = [chat_body(*images, logprobs=True) for images in ([image(k, *size)] for k, size in enumerate(SIZES))] + [
    chat_body(image(1), image(2, 200, 50), logprobs=True),
    chat_body(logprobs=True),
]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    call = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=120) as answer:
        return json.load(answer)


def comparable_parts(answer: dict[str, Any]) -> tuple[int, str, list[float]]:
    """Return what must not differ: the number of tokens in the prompt, the answer, and its log-probabilities."""
    choice = answer["choices"][0]
    scores = [round(logprob["logprob"], 3) for logprob in choice["logprobs"]["content"]]
    return answer["usage"]["prompt_tokens"], choice["message"]["content"], scores


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_for_vllm(tmp_path_factory.mktemp("vision") / "m")


@pytest.fixture(scope="module")
def reference(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, list[float]]]:
    """What ``vllm serve`` answers."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(model_folder), "--served-model-name", "m"]
    command += ["--port", str(port), "--enforce-eager", "--generation-config", "vllm", *COMMON_FLAGS]
    log = tmp_path_factory.mktemp("vllm") / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        end = time.monotonic() + START_SECONDS
        while not answers(port):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        return [comparable_parts(post(f"http://127.0.0.1:{port}/v1/chat/completions", body)) for body in BODIES]
    finally:
        process.terminate()
        process.wait(30)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def server(model_folder: Path, reference: Any) -> Iterator[ServerProcess]:
    # after the reference: there is memory for one vLLM
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PARLEY_VLLM_PYTHON", raising=False)  # servers warn of variables that are no options
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        flags = (str(model_folder), "--engine", "vllm", "--engine-python", PYTHON, "--max-batch", "32", *COMMON_FLAGS)
        vllm_flags = ("--", "--enforce-eager", "--limit-mm-per-prompt", '{"image": 3}')
        with running_server(*flags, *vllm_flags, seconds=START_SECONDS) as server:
            post(server.url + "/v1/chat/completions", BODIES[0])  # the media process has started
            yield server


def chat(server: ServerProcess, body: dict[str, Any]) -> tuple[int, str, list[float]]:
    return comparable_parts(post(server.url + "/v1/chat/completions", body))


def test_images_are_answered_as_vllm_answers_them(server, reference):
    assert [chat(server, body) for body in BODIES] == reference
    assert len({text for _, text, _ in reference}) == len(reference)


def test_images_are_answered_alike_in_every_api(server, reference):
    prompt_tokens, text, _ = reference[0]
    content = image(0, *SIZES[0])
    source = {"type": "base64", "media_type": "image/png", "data": content}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    message = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "messages": [{"role": "user", "content": parts}]}
    answer = post(server.url + "/v1/messages", message)
    assert (answer["usage"]["input_tokens"], answer["content"][0]["text"]) == (prompt_tokens, text)
    turn = {"role": "user", "content": "What is it?", "images": [content]}
    options = {"num_predict": TOKENS, "temperature": 0}
    answer = post(server.url + "/api/chat", {"model": "m", "stream": False, "messages": [turn], "options": options})
    assert (answer["prompt_eval_count"], answer["message"]["content"]) == (prompt_tokens, text)
    parameters = {"max_new_tokens": TOKENS, "details": True}
    inputs = f"![](data:image/png;base64,{content})What is it?"
    answer = post(server.url + "/tgi/generate", {"inputs": inputs, "parameters": parameters})
    assert answer["details"]["generated_tokens"] == TOKENS


def test_images_are_answered_alike_among_others_and_in_choices(server):
    bodies = [chat_body(image(100 + k, 64, 64 + 8 * k), logprobs=True) for k in range(20)]
    alone = [chat(server, body) for body in bodies]
    together: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda k=k: together.update({k: chat(server, bodies[k])})) for k in range(len(bodies))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[k] for k in range(len(bodies))] == alone
    sampled = {"temperature": 1, "logprobs": True}
    singles = [chat(server, chat_body(image(1), seed=7 + k, **sampled))[1] for k in range(3)]
    answer = post(server.url + "/v1/chat/completions", chat_body(image(1), seed=7, n=3, **sampled))
    assert [choice["message"]["content"] for choice in answer["choices"]] == singles


def test_pages_are_found_again_by_the_content_of_an_image(server):
    def cached(number: int) -> int:
        images = [image(number, 200, 200)] * 3
        usage = post(server.url + "/v1/chat/completions", chat_body(*images))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(50), cached(51), cached(50)] == [0, 0, 128]  # a page of vLLM for CPUs


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (["AAAA"], "in no format that is read here"),
        ([image(1, 1, 900)], "cannot be processed by this model"),
        ([image(1)] * 4, "at most 3 image items"),
    ],
)
def test_unusable_images_are_refused_before_they_are_queued(server, images, words):
    status, answer = server.post("/v1/chat/completions", chat_body(*images))
    assert status == 400 and words in json.dumps(answer)


def test_disconnected_clients_leave_nothing_running(server):
    for number in range(20):
        endless = chat_body(image(200 + number), stream=True, max_tokens=1800)
        body = json.dumps(endless).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            lines = ("POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
            head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
            client.sendall(head.encode() + body)
            if number % 2:
                assert b" 200 " in client.recv(1000)
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    assert server.wait_for(lambda: not any(map(server.metric, gauges)), 20)
