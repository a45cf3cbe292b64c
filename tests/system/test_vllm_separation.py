"""Prefill and decode apart with vLLM as the engine: ``make test-engines``. Needs the package nixl beside vLLM.

Answers must be those of one server, also if any process of an instance is killed at any point of their lives. The kills
take an hour: they want PARLEY_NIGHTLY=1, and PARLEY_KILLS may say how often each is repeated.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster_processes import Cluster, ParleyProcess
from support.request_mixture import (
    Answer,
    AnswerContents,
    check_recovered,
    judge_answers,
    send_request,
    undisturbed_answers,
    wait_until,
)

PYTHON = os.environ.get("PARLEY_VLLM_PYTHON", "")
HAS_NIXL = bool(PYTHON) and not subprocess.run([PYTHON, "-c", "import nixl"], capture_output=True).returncode
pytestmark = pytest.mark.skipif(not HAS_NIXL, reason="PARLEY_VLLM_PYTHON does not name a Python with vLLM and nixl")
START_SECONDS = 250.0  # less than the time after which pytest dumps the stacks
RESTART_SECONDS = 240.0
REPEATS = int(os.environ.get("PARLEY_KILLS", "5"))
# float32, so that rounding, which depends on the batch in vLLM, decides nowhere between two tokens.
FLAGS = (
    *("--engine", "vllm", "--engine-python", PYTHON, "--dtype", "fp32", "--kv-memory", "128MiB"),
    *("--max-batch", "16", "--max-model-len", "2048", "--", "--enforce-eager"),
)
WORDS = "One two three four five six seven eight nine ten. "
COMPLETION: dict[str, Any] = {"model": "parley-demo", "ignore_eos": True, "stream": True}
CHAT: dict[str, Any] = {"model": "parley-demo", "messages": [{"role": "user", "content": WORDS * 12 + "Which city?"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
MIXTURE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**COMPLETION, "prompt": WORDS * 40, "max_tokens": 160, "temperature": 0}),
    ("/v1/completions", {**COMPLETION, "prompt": "A " + WORDS * 25, "max_tokens": 120, "seed": 7}),
    ("/v1/completions", {**COMPLETION, "prompt": "We " + WORDS * 9, "max_tokens": 48, "seed": 9, "n": 3,
                         "presence_penalty": 1.0}),
    ("/v1/completions", {**COMPLETION, "prompt": ["To " + WORDS * 9, "It " + WORDS * 3], "max_tokens": 32,
                         "temperature": 0, "frequency_penalty": 0.5}),
    ("/v1/completions", {**COMPLETION, "prompt": "So " + WORDS * 5, "max_tokens": 12, "n": 2, "temperature": 0,
                         "use_beam_search": True, "best_of": 3, "stream": False}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 48, "seed": 6, "stream": True, "response_format": {
        "type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}}),
    ("/generate_stream", {"inputs": "Is " + WORDS * 8, "parameters": {
        "max_new_tokens": 40, "seed": 3, "do_sample": True, "details": False}}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 40, "seed": 8, "ignore_eos": True}),
]  # fmt: skip
VICTIMS = ("engine core", "host", "API process")
MOMENTS = ("prefill", "middle")
CELLS = [(victim, when) for victim in VICTIMS for when in MOMENTS]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PARLEY_VLLM_PYTHON", raising=False)  # servers warn of variables that are no options
        # Threads that wait for each other take all processors if several engines share them.
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield


@pytest.fixture(scope="module")
def expected_answers(environment: None, tmp_path_factory: pytest.TempPathFactory) -> list[AnswerContents]:
    """The answers of one server."""
    cluster = Cluster(tmp_path_factory.mktemp("one"), "mixed", flags=FLAGS, ready_seconds=START_SECONDS)
    try:
        return [answer.contents() for answer in asyncio.run(undisturbed_answers(cluster.coordinator.url, MIXTURE))]
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def cluster(expected_answers: list[AnswerContents], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    roles = ("prefill", "prefill", "decode", "decode") if os.environ.get("PARLEY_NIGHTLY") else ("prefill", "decode")
    folder = tmp_path_factory.mktemp("apart")
    cluster = Cluster(folder, *roles, flags=FLAGS, separate="always", ready_seconds=START_SECONDS)
    try:
        yield cluster
    finally:
        cluster.close()


def requests_ended(cluster: Cluster, role: str) -> int:
    """Returns how many requests the instances of a role have ended."""
    logs = [instance.log.read_text() for instance in cluster.instances if instance.role == role]
    return sum(text.count(" POST /") for text in logs)


async def test_separated_answers_are_those_of_one_server(
    cluster: Cluster, expected_answers: list[AnswerContents]
) -> None:
    alone = await undisturbed_answers(cluster.coordinator.url, MIXTURE)
    assert judge_answers(alone, expected_answers) == ["exact"] * len(MIXTURE), alone
    for role in ("prefill", "decode"):
        assert await wait_until(lambda role=role: requests_ended(cluster, role) >= len(MIXTURE)), cluster.logs()
    url = cluster.coordinator.url
    together = await asyncio.gather(*(send_request(url, path, body) for path, body in MIXTURE))
    assert judge_answers(together, expected_answers) == ["exact"] * len(MIXTURE), together
    log = "".join(instance.log.read_text() for instance in cluster.instances)
    assert "KV pages of another instance are not used" not in log and "transfer failure" not in log, log


async def test_clients_that_leave_free_everything(cluster: Cluster) -> None:
    body = {**COMPLETION, "prompt": WORDS * 30, "max_tokens": 1000, "temperature": 0}
    sending = [asyncio.create_task(send_request(cluster.coordinator.url, "/v1/completions", body)) for _ in range(20)]
    await asyncio.sleep(1.0)
    for task in sending:
        task.cancel()
    await asyncio.gather(*sending, return_exceptions=True)
    await asyncio.to_thread(cluster.wait_until_idle)


def find_process(instance: ParleyProcess, victim: str) -> int:
    """Returns the id of one of an instance's processes."""
    assert instance.process is not None
    below = processes_below(instance.process.pid)
    names = {"engine core": "VLLM::EngineCore", "host": "parley.worker.vllm.host"}
    if victim not in names:
        return instance.process.pid
    return next(pid for pid in below if names[victim] in Path(f"/proc/{pid}/cmdline").read_text())


def processes_below(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for child in map(int, listed) for pid in (child, *processes_below(child))]


async def wait_for_moment(when: str, answers: list[Answer], rng: random.Random) -> None:
    if when == "prefill":
        await asyncio.sleep(rng.uniform(0.0, 0.5))
    else:
        goal = rng.randint(1, 100)
        await wait_until(lambda: answers[0].count >= goal or answers[0].over, 60.0)


@pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes an hour: PARLEY_NIGHTLY=1")
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
async def test_answers_survive_the_death_of_a_process_in_both_roles(
    cluster: Cluster, expected_answers: list[AnswerContents], cell: tuple[str, str]
) -> None:
    victim, when = cell
    tally, longest = Counter[str](), 0.0
    for number in range(REPEATS):
        rng = random.Random(f"{cell} {number}")
        answers = [Answer() for _ in MIXTURE]
        began = time.monotonic()
        sending = [
            asyncio.create_task(send_request(cluster.coordinator.url, path, body, answer))
            for (path, body), answer in zip(MIXTURE, answers, strict=True)
        ]
        for role in rng.sample(("prefill", "decode"), 2):
            await wait_for_moment(when, answers, rng)
            instance = rng.choice(
                [cluster_instance for cluster_instance in cluster.instances if cluster_instance.role == role]
            )
            os.kill(find_process(instance, victim), signal.SIGKILL)
            if victim == "API process":
                await asyncio.to_thread(instance.restart)
        await asyncio.wait(sending, timeout=120.0)
        longest = max(longest, time.monotonic() - began)
        found = judge_answers(answers, expected_answers)
        tally.update(found)
        for verdict, answer, (path, _), contents in zip(found, answers, MIXTURE, expected_answers, strict=True):
            assert verdict in ("exact", "error"), f"{number} {verdict} {path}\n{answer}\n{contents}\n{cluster.logs()}"
        await check_recovered(cluster, expected_answers, MIXTURE, RESTART_SECONDS)
    # For the record: verdicts of all requests, and the longest time until all answers had ended.
    print(json.dumps([*cell, tally, round(longest, 1)]))
