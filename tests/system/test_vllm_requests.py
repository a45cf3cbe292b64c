"""Requests of every kind to a server with vLLM as its engine: ``make test-engines``. Needs PARLEY_NIGHTLY=1.

The server computes in float32, so that rounding, which depends on the batch in vLLM, decides nowhere between tokens.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.free_ports import free_port
from support.lora_adapters import write_adapter
from support.request_features import REQUEST_FEATURES, make_body, refused_pairs
from support.server_process import ServerProcess, running_server
from test_composition import comparable_parts, send_request

from parley import demo

PYTHON = os.environ.get("PARLEY_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON or not os.environ.get("PARLEY_NIGHTLY"),
    reason="PARLEY_VLLM_PYTHON does not name a Python with vLLM, or PARLEY_NIGHTLY is not set",
)
START_SECONDS = 280.0  # less than the time after which pytest dumps the stacks
FLAGS = (
    *("--engine", "vllm", "--engine-python", PYTHON, "--dtype", "fp32", "--kv-memory", "256MiB", "--max-batch", "64"),
    *("--max-model-len", "2048"),
)
SETS = [(), *((name,) for name in REQUEST_FEATURES), *combinations(REQUEST_FEATURES, 2)]
PROMPTS = [f"{start} {number}" for start in ("The capital of", "One two", "Tell", "Is", "A") for number in range(10)]
SCORES = {"max_tokens": 16, "temperature": 0, "logprobs": 2, "model": "parley-demo", "return_token_ids": True}


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PARLEY_VLLM_PYTHON", "PARLEY_NIGHTLY"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def lora_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(environment: None, lora_root: Path) -> Iterator[ServerProcess]:
    adapter = write_adapter(lora_root / "adapter", demo.model_folder(), seed=1)
    lora = ("--lora", f"adapted={adapter}", "--lora-root", str(lora_root), "--", "--enforce-eager")
    with running_server(*FLAGS, *lora, seconds=START_SECONDS) as server:
        yield server


@pytest.fixture(scope="module")
def own_answers(environment: None, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The answers of vLLM's own server."""
    port, log = free_port(), tmp_path_factory.mktemp("own") / "server.log"
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(demo.model_folder()), "--port", str(port)]
    command += ["--served-model-name", "parley-demo", "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "64", "--enforce-eager"]
    environment_variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment_variables)
    try:
        assert wait_for_health(port), log.read_text()[-3000:]
        return asyncio.run(ask_all(f"http://127.0.0.1:{port}"))
    finally:
        process.terminate()
        process.wait(60)


def wait_for_health(port: int) -> bool:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return True
        except OSError:
            time.sleep(0.5)
    return False


async def ask_all(url: str) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        answers = [await client.post("/v1/completions", json=SCORES | {"prompt": prompt}) for prompt in PROMPTS]
    return [answer.json()["choices"][0] for answer in answers]


def test_greedy_answers_and_their_scores_are_those_of_vllms_own_server(own_answers, server):
    for prompt, own, answer in zip(PROMPTS, own_answers, asyncio.run(ask_all(server.url)), strict=True):
        assert answer["token_ids"] == own["token_ids"], prompt
        assert answer["logprobs"]["token_logprobs"] == pytest.approx(own["logprobs"]["token_logprobs"], abs=1e-4)
        assert [*answer["logprobs"]["tokens"]] == [*own["logprobs"]["tokens"]]
        assert (answer["text"], answer["finish_reason"]) == (own["text"], own["finish_reason"])


def test_adapter_that_is_loaded_in_place_has_its_new_content(server, lora_root):
    """The prompt is longer than a page, which vLLM's prefix cache must not take from the old adapter."""
    answers = []
    for name, seed in (("changed", 2), ("changed", 3), ("fresh", 3)):
        write_adapter(lora_root / name, demo.model_folder(), seed=seed)
        load = {"lora_name": name, "lora_path": name, "load_inplace": name == "changed" and seed == 3}
        loaded = httpx.post(server.url + "/v1/load_lora_adapter", json=load, timeout=60)
        assert loaded.status_code == 200, loaded.text
        status, answer = server.post("/v1/completions", SCORES | {"prompt": "One two " * 300, "model": name})
        assert status == 200, answer
        answers.append(answer["choices"][0]["logprobs"]["token_logprobs"])
    assert answers[1] == pytest.approx(answers[2], abs=1e-4) and answers[0] != pytest.approx(answers[1], abs=1e-2)


def round_numbers(parts: Any) -> Any:
    """Round numbers, which depend on the batch in their last digits."""
    if isinstance(parts, float):
        return round(parts, 3)
    if isinstance(parts, dict):
        return {name: round_numbers(part) for name, part in parts.items()}
    return [round_numbers(part) for part in parts] if isinstance(parts, list | tuple) else parts


async def ask_alone_and_together(url: str) -> list[tuple[tuple[str, ...], Any, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        alone = [await send_request(client, names) for names in SETS]
        together = await asyncio.gather(*(send_request(client, names) for names in SETS))
    return list(zip(SETS, alone, together, strict=True))


def test_features_compose_as_they_do_alone_or_are_refused_with_the_engine(server):
    wrong, refused, answered = list[str](), 0, 0
    for names, alone, together in asyncio.run(ask_alone_and_together(server.url)):
        title = " + ".join(names) or "plain"
        if isinstance(alone, str):
            named_pair = any(one in alone and other in alone for one, other in refused_pairs(names))
            if not named_pair and "engine vllm" not in alone:
                wrong.append(f"{title}: {alone[:300]}")
            refused += 1
        elif isinstance(together, str):
            wrong.append(f"{title}: refused among others: {together[:300]}")
        else:
            answered += 1
            one, other = round_numbers(comparable_parts(alone)), round_numbers(comparable_parts(together))
            if one != other:
                wrong.append(f"{title}: {make_body(names)}\\n  {one}\\n  {other}")
    print(f"{answered} answered, {refused} refused, {len(wrong)} wrong")
    assert not wrong, "\\n".join(wrong)
    assert answered > 3 * refused
