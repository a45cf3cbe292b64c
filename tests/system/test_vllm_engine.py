"""A server with vLLM as its engine: ``make test-engines``. Skipped unless PARLEY_VLLM_PYTHON names vLLM's Python."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.server_process import ServerProcess, running_server

from parley.engine.vllm_engine import START_FILE
from parley.watermark import detect_watermark

PYTHON = os.environ.get("PARLEY_VLLM_PYTHON", "")
SEEDS = 100 if os.environ.get("PARLEY_NIGHTLY") else 5
pytestmark = pytest.mark.skipif(not PYTHON, reason="PARLEY_VLLM_PYTHON does not name a Python with vLLM")
START_SECONDS = 250.0  # less than the time after which pytest dumps the stacks
FLAGS = ("--engine", "vllm", "--engine-python", PYTHON, "--max-batch", "32", "--max-model-len", "2048")
VLLM_FLAGS = ("--", "--enforce-eager")
HOST_MODULE = "parley.worker.vllm.host"  # other children of a server compile grammars
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
ENDLESS = {"max_tokens": 1900, "ignore_eos": True, "stream": True}


# Three requests in slots 5, 2 and 0; the second has no options of the plugin's. Then slot 5 gets another request.
SLOT_SCRIPT = """
import sys
sys.path.append(sys.argv[1])
import start
from types import SimpleNamespace
import msgspec
import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from parley.model.sampling.extra_options import ExtraOptions
from parley.model.sampling.row_edits import RowEdits
from parley.types import SamplingOptions
from parley.worker.vllm import logits_plugin

penalties = SamplingOptions(repetition_penalty=1.5, presence_penalty=0.5, penalty_window=3)
options = {
    5: ExtraOptions(watermark=True, no_repeat_ngram=2, penalties=penalties),
    0: ExtraOptions(typical_p=0.3, temperature=0.5),
}
tokens = torch.zeros(8, 16, dtype=torch.int32)
tokens[5, :7] = torch.tensor([1, 2, 3, 1, 2, 4, 1])
states = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=tokens), prompt_len=SimpleNamespace(np=np.full(8, 4)))
logits_plugin.load_token_bytes = lambda folder: lambda token: b""
editor = logits_plugin.SlotEditor(SimpleNamespace(model_config=SimpleNamespace(model="m")), states)
for slot in (5, 2, 0):
    extra = {"parley": msgspec.to_builtins(options[slot])} if slot in options else None
    assert editor.add_request(slot, SamplingParams(extra_args=extra)) == (slot in options)


def context(*slots, length):
    rows = torch.tensor(slots)
    ends = torch.full((len(slots),), length - 1)
    return LogitsContext(rows, rows, np.array(slots), torch.zeros(len(slots)), rows, ends, np.full(len(slots), length))


for length in (4, 6, 7):
    logits = torch.randn(3, 40)
    expected = logits.clone()
    own = RowEdits(options[5], tokens[5, :length].tolist(), lambda token: b"")
    own.edit_logits(expected[0])
    RowEdits(options[0], [], lambda token: b"").cut_logits(expected[2], 0.5)
    assert torch.equal(editor.apply(logits, context(5, 2, 0, length=length)), expected)
assert not editor.add_request(5, SamplingParams())
logits = torch.randn(1, 40)
assert torch.equal(editor.apply(logits.clone(), context(5, length=7)), logits)
"""


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PARLEY_VLLM_PYTHON", "PARLEY_NIGHTLY"):
            patch.delenv(name, raising=False)  # servers warn of variables that are no options
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield


@pytest.fixture(scope="module")
def server(environment: None) -> Iterator[ServerProcess]:
    with running_server(*FLAGS, *VLLM_FLAGS, seconds=START_SECONDS) as server:
        yield server


def complete(server: ServerProcess, **members: Any) -> list[str]:
    status, answer = server.post("/v1/completions", {"prompt": "The capital of", "max_tokens": 12} | members)
    assert status == 200, answer
    return [choice["text"] for choice in answer["choices"]]


def chat(server: ServerProcess, **members: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Say a number."}]
    status, answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 60} | members)
    assert status == 200, answer
    return answer["choices"][0]


def test_choices_equal_single_requests_also_among_others(server):
    singles = [complete(server, seed=7 + k)[0] for k in range(3)]
    assert complete(server, seed=7, n=3) == singles and len(set(singles)) > 1
    among_others: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda k=k: among_others.append(complete(server, seed=7 if k == 9 else 100 + k)))
        for k in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [singles[0]] in among_others
    assert len(set(complete(server, temperature=0, n=2))) == 1


@pytest.mark.parametrize("ignores_end", [False, True])
@pytest.mark.parametrize("kind", ["schema", "regex", "choice", "gbnf", "call"])
def test_answers_obey_their_grammar(server, kind, ignores_end):
    forms: dict[str, tuple[dict[str, Any], str]] = {
        "schema": ({"structured_outputs": {"json": SCHEMA}}, r'\{\s*"n":\s*\d{1,2}\s*\}'),
        "regex": ({"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}, "[a-f]{3}-[0-9]{2}"),
        "choice": ({"structured_outputs": {"choice": ["Rome", "Oslo"]}}, "Rome|Oslo"),
        "gbnf": ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}, "a[0-9]b"),
        "call": ({"tools": [TOOL], "tool_choice": "required"}, r'\{\s*"n":\s*\d{1,2}\s*\}'),
    }
    members, pattern = forms[kind]
    with ThreadPoolExecutor(16) as threads:
        answers = threads.map(lambda seed: chat(server, seed=seed, ignore_eos=ignores_end, **members), range(SEEDS))
        for choice in answers:
            message = choice["message"]
            text = message["tool_calls"][0]["function"]["arguments"] if kind == "call" else message["content"]
            assert re.fullmatch(pattern, text), text


def test_members_reach_vllm(server):
    assert complete(server, max_tokens=0, echo=True) == ["The capital of"]
    (plain,) = complete(server, temperature=0)
    (banned,) = complete(server, temperature=0, bad_words=[plain.split()[0], " " + plain.split()[0]])
    assert banned.split()[0] != plain.split()[0]
    assert complete(server, temperature=0, stop=[plain.split()[1]]) == [plain.split(plain.split()[1])[0]]
    status, answer = server.post("/v1/completions", {"prompt": "The capital of", "max_tokens": 2, "logprobs": 2,
                                                     "echo": True, "temperature": 0})  # fmt: skip
    scores = answer["choices"][0]["logprobs"]
    assert status == 200 and scores["token_logprobs"][0] is None and len(scores["token_logprobs"]) == 5
    assert all(len(top) == 2 for top in scores["top_logprobs"][1:])
    beams = complete(server, use_beam_search=True, best_of=3, n=2, temperature=0)
    assert len(set(beams)) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", {"prompt": "a", "temperature": 2.5}, 400, "'temperature'"),
        ("/tgi/generate", {"inputs": "a", "parameters": {"temperature": 5.0, "do_sample": True}}, 422, "engine vllm"),
        (
            "/v1/completions",
            {"prompt": "a", "allowed_token_ids": [5], "structured_outputs": {"regex": "b"}},
            400,
            "'allowed_token_ids' is not available with the engine vllm",
        ),
        ("/v1/embeddings", {"input": "a"}, 400, "does not make embeddings"),
    ],
)
def test_refuses_what_vllm_lacks_in_the_form_of_the_api(server, path, body, status, words):
    answer = server.post(path, body)
    assert answer[0] == status and words in json.dumps(answer[1])


def test_options_of_the_plugin_have_their_effect_alone_and_among_others(server):
    seeds = range(8)
    typical = [complete(server, seed=seed, typical_p=0.3)[0] for seed in seeds]
    assert typical != [complete(server, seed=seed)[0] for seed in seeds]
    among_others: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda k=k: among_others.update({k: complete(server, seed=k, typical_p=0.3)[0]}))
        for k in seeds
    ]
    threads += [threading.Thread(target=complete, args=(server,)) for _ in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [among_others[k] for k in seeds] == typical


@pytest.mark.parametrize("watermark", [False, True])
def test_watermark_is_found_where_it_was_wanted(server, watermark):
    pairs: list[tuple[int, int]] = []
    for seed in range(8):
        parameters = {"watermark": watermark, "do_sample": True, "seed": seed, "temperature": 2.0, "details": True}
        body = {"inputs": "Tell a story", "parameters": parameters | {"max_new_tokens": 100}}
        status, answer = server.post("/tgi/generate", body)
        assert status == 200, answer
        pairs += pairwise(token["id"] for token in answer["details"]["tokens"])
    green = sum(detect_watermark(pair).green for pair in pairs)
    assert (green > 0.6 * len(pairs)) == watermark


@pytest.mark.parametrize("size", [0, 2])
def test_pairs_of_tokens_repeat_only_if_they_may(server, size):
    members = {"max_tokens": 150, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {"prompt": "Tell a story", "no_repeat_ngram_size": size} | members
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    ids = answer["choices"][0]["token_ids"]
    assert (len(set(pairwise(ids))) == len(ids) - 1) == (size == 2)


def test_reasoning_ends_at_its_budget(server):
    free, limited = (
        chat(server, temperature=0, max_tokens=100, chat_template_kwargs={"enable_thinking": True}, **members)
        for members in ({}, {"thinking_token_budget": 2})
    )
    assert len(limited["message"]["reasoning"] or "") < len(free["message"]["reasoning"])
    assert limited["message"]["content"]


def test_newer_model_runner_gets_the_same_edits():
    """That runner needs a GPU, or Triton; here its interface gets rows, and the tokens in its buffers."""
    subprocess.run([PYTHON, "-P", "-c", SLOT_SCRIPT, str(START_FILE.parent)], check=True, timeout=120)


def test_disconnected_clients_leave_nothing_running(server):
    for number in range(200):
        body = json.dumps({"prompt": f"Tell {number}", **ENDLESS}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            if number % 2:
                client.recv(1000)
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    assert server.wait_for(lambda: not any(map(server.metric, gauges)))


def processes_of_group(leader: int) -> dict[int, str]:
    """Return the processes of a process group, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader and fields[0] != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("victim", "signal_number"),
    [("engine core", signal.SIGKILL), ("engine core", signal.SIGSTOP), ("host", signal.SIGKILL)],
)
def test_process_that_ends_or_hangs_ends_its_streams_and_leaves_no_process(server, victim, signal_number):
    (host,) = server.children(HOST_MODULE)
    group = processes_of_group(host)
    process = host if victim == "host" else next(pid for pid, words in group.items() if "EngineCore" in words)
    call = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps({"prompt": "a", **ENDLESS}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(call, timeout=60) as stream:
        stream.readline()
        os.kill(process, signal_number)
        lines = [line for line in stream.read().decode().splitlines() if line]
    assert sum('"error"' in line for line in lines) == 1 and lines[-1] == "data: [DONE]"
    assert server.wait_for(lambda: not processes_of_group(host), 15)
    assert server.wait_for(server.is_ready, START_SECONDS), server.output()
    assert complete(server, temperature=0)


def test_killed_server_leaves_no_process(serve: Callable[..., ServerProcess]):
    server = serve(*FLAGS, *VLLM_FLAGS, wait=False)
    assert server.wait_for(lambda: server.children(HOST_MODULE) != [], 30)
    (host,) = server.children(HOST_MODULE)
    assert server.wait_for(lambda: len(processes_of_group(host)) > 1, START_SECONDS)
    server.process.kill()
    server.process.wait()
    assert server.wait_for(lambda: not processes_of_group(host), 15)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--", "--no-such-flag"), "vLLM does not accept the flags after --: unrecognized arguments: --no-such-flag."),
        (("--kv-memory", "1MiB", *VLLM_FLAGS), "vLLM did not start: "),
        (("--exact", *VLLM_FLAGS), "--exact needs a GPU"),
    ],
)
def test_failed_start_is_one_sentence(serve: Callable[..., ServerProcess], flags, words):
    server = serve(*FLAGS, *flags, wait=False)
    assert server.process.wait(START_SECONDS) == 1
    lines = [line for line in server.output().splitlines() if line.startswith("parley: ")]
    assert len(lines) == 1 and words in lines[0], server.output()
    assert "Traceback" not in server.output()
