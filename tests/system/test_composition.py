"""Every feature with every other: the answer must equal the one of an engine without cache, drafts or other requests.

Two servers run the built-in model. One gets every request alone, without prefix cache and speculation. The other gets
all requests at once, and again (so that prompts are cached), with draft tokens and so few pages that requests preempt
each other. Tokens, texts, calls, log-probabilities and finish reasons must be equal. Requests of other APIs are among
them, and must have the answers of chat completions. ``PARLEY_NIGHTLY=1`` sends all pairs of theirs, and continues with
larger sets of features, drawn with a seed that a failure reports.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import runpy
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from support.composed_routes import COMPOSED_ROUTES, ComposedRoute, chat_parts, different_parts
from support.lora_adapters import write_adapter
from support.request_features import FEATURES, REQUEST_FEATURES, make_body, refused_pairs

import parley

Names = tuple[str, ...]

DOCS = Path(__file__).resolve().parents[2] / "docs"
BUILT_IN = Path(parley.__file__).parent / "demo" / "model"
PAIRS: list[Names] = [(), *((name,) for name in REQUEST_FEATURES), *combinations(REQUEST_FEATURES, 2)]
SAMPLED_PAIRS = 6  # of each other API, unless all are sent
ALONE = ("--max-batch", "3", "--no-prefix-cache", "--kv-memory", "32MiB")
CROWD = ("--max-batch", "48", "--kv-memory", "1700KiB", "--speculate", "ngram")


def comparable_parts(answer: dict[str, Any]) -> Any:
    """Returns the parts that must be equal in two answers."""
    choices = []
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        texts = message.get("content") or "", message.get("reasoning_content") or ""
        scores = (choice.get("logprobs") or {}).get("content") or []
        choices.append((choice["index"], texts, calls, choice["finish_reason"], choice.get("stop_reason"), scores))
    usage = answer["usage"]
    counts = usage["prompt_tokens"], usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]
    return sorted(choices, key=lambda choice: choice[0]), counts, answer.get("prompt_logprobs")


def join_chunks(lines: list[str]) -> dict[str, Any]:
    """Joins a stream's chunks into one answer."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for line in lines:
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        assert "error" not in chunk, chunk
        whole["usage"] = chunk.get("usage") or whole.get("usage")
        whole["prompt_logprobs"] = chunk.get("prompt_logprobs") or whole.get("prompt_logprobs")
        for piece in chunk["choices"]:
            fresh = {"index": piece["index"], "message": {"tool_calls": []}, "logprobs": {"content": []}}
            choice = choices.setdefault(piece["index"], fresh)
            delta, message = piece["delta"], choice["message"]
            for member in ("content", "reasoning_content"):
                message[member] = message.get(member, "") + (delta.get(member) or "")
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"].get("arguments") or ""
            choice["logprobs"]["content"] += (piece.get("logprobs") or {}).get("content") or []
            choice["finish_reason"] = piece["finish_reason"]
            choice["stop_reason"] = piece.get("stop_reason")
    return whole | {"choices": list(choices.values())}


async def send_request(client: httpx.AsyncClient, names: Names, priority: int = 0) -> Any:
    """Returns the answer to a request for these features, or the error text that refuses it."""
    request_body = {"priority": priority} | make_body(names)
    if not request_body.get("stream"):
        answer = await client.post("/v1/chat/completions", json=request_body)
        return answer.json() if answer.status_code == 200 else answer.text
    async with client.stream("POST", "/v1/chat/completions", json=request_body) as answer:
        if answer.status_code != 200:
            return (await answer.aread()).decode()
        return join_chunks([line async for line in answer.aiter_lines()])


def route_sets(route: ComposedRoute) -> list[Names]:
    """Returns the sets of features to request at another API's route: each alone, and some or all pairs."""
    names = [name for name in REQUEST_FEATURES if name in route.members]
    pairs = [pair for pair in combinations(names, 2) if not refused_pairs(pair)]
    if not os.environ.get("PARLEY_NIGHTLY"):
        pairs = random.Random(route.path).sample(pairs, SAMPLED_PAIRS)
    return [(), *((name,) for name in names), *pairs]


async def send_elsewhere(client: httpx.AsyncClient, route: ComposedRoute, names: Names) -> Any:
    """Returns the parts of another API's answer to a request for these features, or the error text that refuses it."""
    request_body = route.make_body(names)
    answer = await client.post(route.path, json=request_body)
    if answer.status_code != 200:
        return answer.text
    streamed = request_body.get("stream")
    return route.read_answer(route.join_stream(answer.text.split("\n")) if streamed else answer.json())


async def send_to_all_routes(client: httpx.AsyncClient) -> list[tuple[ComposedRoute, Names, Any]]:
    requests = [(route, names) for route in COMPOSED_ROUTES for names in route_sets(route)]
    answers = await asyncio.gather(*(send_elsewhere(client, route, names) for route, names in requests))
    return [(*request, answer) for request, answer in zip(requests, answers, strict=True)]


def check_elsewhere(answers: list[tuple[ComposedRoute, Names, Any]], expected: dict[Names, Any]) -> list[str]:
    """Lists the answers of other APIs that are not those of chat completions alone."""
    wrong = []
    for route, names, parts in answers:
        title = f"{route.title}: {' + '.join(names) or 'plain'}"
        if isinstance(parts, str):
            wrong.append(f"{title}: refused: {parts[:300]}")
        else:
            wrong += different_parts(chat_parts(expected[without_delivery(names)]), parts, title)
    return wrong


def without_delivery(names: Names) -> Names:
    """Returns the features that change what an answer is, not how and when it comes."""
    return tuple(name for name in names if name not in ("streaming", "priority"))


async def compare_servers(alone: str, crowd: str, sets: list[Names], *, elsewhere: bool = False) -> list[str]:
    """Sends these requests to both servers and returns every difference as one line.

    ``elsewhere``: requests of the other APIs are among those of the crowd. They need all pairs in ``sets``.
    """
    limits = httpx.Limits(max_connections=None if elsewhere else len(sets))
    wrong = []
    async with httpx.AsyncClient(base_url=crowd, timeout=300, limits=limits) as client:
        # Later requests are more urgent, so they take slots and pages from running ones.
        first, others = await asyncio.gather(
            asyncio.gather(*(send_request(client, names, -place) for place, names in enumerate(sets))),
            send_to_all_routes(client) if elsewhere else asyncio.sleep(0, []),
        )
        again = await asyncio.gather(
            *(send_request(client, names, -place) for place, names in enumerate(reversed(sets)))
        )
    expected: dict[Names, Any] = {}
    async with httpx.AsyncClient(base_url=alone, timeout=300) as client:
        for names, one, other in zip(sets, first, reversed(again), strict=True):
            key = without_delivery(names)
            if key not in expected:
                expected[key] = await send_request(client, key)
            wrong += check_answers(names, expected[key], [one, other])
    return wrong + check_elsewhere(others, expected) + ineffective_features(expected)


def ineffective_features(answers: dict[Names, Any]) -> list[str]:
    """Lists features that change nothing in an answer and do not show in it: their tests would prove nothing."""
    singles = {names[0]: answer for names, answer in answers.items() if len(names) == 1 and isinstance(answer, dict)}
    return [
        f"{name} changes nothing: {comparable_parts(answer)}"
        for name, answer in singles.items()
        if FEATURES[name].check is None and () in answers and comparable_parts(answer) == comparable_parts(answers[()])
    ]


def check_answers(names: Names, alone: Any, crowd: list[Any]) -> list[str]:
    title = " + ".join(names) or "plain"
    pairs = refused_pairs(names)
    if pairs:
        refused = [
            isinstance(message, str) and any(one in message and other in message for one, other in pairs)
            for message in crowd
        ]
        return [] if all(refused) else [f"{title}: not refused with {pairs}: {str(crowd)[:300]}"]
    for answer in (alone, *crowd):
        if isinstance(answer, str):
            return [f"{title}: refused: {answer[:300]}"]
    checks = [FEATURES[name].check for name in names]
    wrong = [f"{title}: {name} does not show in {alone}" for name, check in zip(names, checks, strict=True)
             if check is not None and not check(make_body(names), alone)]  # fmt: skip
    for answer in crowd:
        if comparable_parts(answer) != comparable_parts(alone):
            wrong.append(f"{title}: {comparable_parts(answer)} is not {comparable_parts(alone)}")
            break
    return wrong


def write_uncertain_model(folder: Path) -> Path:
    """Copies the built-in model with smaller logits: it is less certain, so small errors change the text."""
    shutil.copytree(BUILT_IN, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 0.4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def servers(serve, tmp_path):
    model = write_uncertain_model(tmp_path / "calm")
    adapter = write_adapter(tmp_path / "adapter", model, seed=1)
    common = (str(model), "--name", "parley-demo", "--lora", f"adapted={adapter}", "--threads", "1", "--quiet")
    return serve(*common, *ALONE), serve(*common, *CROWD)


def test_every_feature_composes_with_every_other(servers):
    alone, crowd = servers
    wrong = asyncio.run(compare_servers(alone.url, crowd.url, PAIRS, elsewhere=True))
    assert not wrong, "\n".join(wrong)
    for name in (
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_hits_total",
        "vllm:spec_decode_num_draft_tokens_total",
    ):
        assert crowd.metric(name) > len(PAIRS) / 4 and not alone.metric(name), name


def test_composition_page_matches_the_tested_features():
    script = runpy.run_path(str(DOCS / "composition.py"))
    assert script["PAGE"].read_text("utf-8") == script["composition_page"](), "docs/composition.md is old: make docs"


@pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes long: make test-nightly")
def test_many_features_compose_in_one_request(servers):
    alone, crowd = servers
    seed = int(os.environ.get("PARLEY_SEED", "0")) or random.randrange(2**32)
    draw = random.Random(seed)
    for _ in range(20):
        sets = [
            tuple(sorted(draw.sample(REQUEST_FEATURES, draw.randint(3, 8)), key=REQUEST_FEATURES.index))
            for _ in range(100)
        ]
        wrong = asyncio.run(compare_servers(alone.url, crowd.url, [*dict.fromkeys(sets)]))
        assert not wrong, f"PARLEY_SEED={seed}\n" + "\n".join(wrong)
