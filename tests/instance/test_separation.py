"""The built-in model with prefill and decode on two servers answers any request like one server.

``PARLEY_NIGHTLY=1`` makes many more requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models
from support.compare_answers import same_answer
from support.lora_adapters import write_adapter
from support.prefill_decode_pair import HEADERS, REQUEST_UUID, ServerPair, assert_same_answer, post_json
from support.random_requests import SPECIAL_TEXT, generating_routes, random_body
from support.request_features import REQUEST_FEATURES
from support.request_features import make_body as wished

import parley
from parley.disagg.kv.sender import KVSender
from parley.types import ParleySettings

BUILT_IN = Path(parley.__file__).parent / "demo" / "model"
NIGHTLY = bool(os.environ.get("PARLEY_NIGHTLY"))
REQUEST_COUNT = 2200 if NIGHTLY else 24
STATE_MODELS = sorted(tiny_models.STATE_DECODERS)
CHAT = "/v1/chat/completions"
PAGE_BYTES = 48 << 10  # bytes of a KV page of the built-in model


def random_request(rng: random.Random) -> tuple[str, bytes]:
    """Return a request for any route, or for random features of a chat."""
    if rng.random() < 0.4:
        path = rng.choice([path for path, _ in generating_routes()])
        return path, random_body(path, rng)
    features = REQUEST_FEATURES if NIGHTLY else [name for name in REQUEST_FEATURES if name != "lora"]
    members: dict[str, Any] = wished(tuple(rng.sample(features, rng.choice((0, 1, 2, 3)))))
    question = rng.choice(("Hello!", "What is the weather in Paris and London? " * rng.randint(1, 20), SPECIAL_TEXT))
    members["messages"] = [{"role": "user", "content": question}]
    members |= {"max_tokens": rng.choice((1, 2, 7, 32)), "seed": rng.choice((None, 7, 8)), "stream": rng.random() < 0.6}
    return CHAT, json.dumps(members).encode()


async def check_resume(pair: ServerPair, path: str, request_body: bytes, rng: random.Random) -> None:
    """A stream that was cut after any part resumes with exactly the missing bytes."""
    whole = await pair.ask(path, request_body, REQUEST_UUID, HEADERS)
    if whole.status == 200 and len(whole.parts) > 1:
        count = rng.randrange(1, len(whole.parts))
        prior_outputs = [record for _, record in whole.parts[:count]]
        rest = await pair.ask(path, request_body, REQUEST_UUID, HEADERS, past=prior_outputs)
        received = b"".join(data for data, _ in whole.parts[:count]) + rest.body
        assert same_answer(received, whole.body), (path, request_body, count, received, whole.body)


@pytest.mark.parametrize(
    ("same_server", "places"), [(False, None), (True, None), (False, 12), (False, 200)] if NIGHTLY else [(False, None)]
)
async def test_built_in_model_separated_answers_like_one_server(
    alike, tmp_path: Path, same_server: bool, places: int | None
) -> None:
    adapters = {"adapted": str(write_adapter(tmp_path / "adapter", BUILT_IN, seed=1))} if NIGHTLY else {}

    def settings() -> ParleySettings:
        return ParleySettings(
            model=str(BUILT_IN),
            shared=True,
            staging=places and places * PAGE_BYTES,
            threads=1,
            kv_memory=24 << 20,
            max_batch=32,
            adapters=dict(adapters),
        )

    single_server, pair = await alike(settings=settings, names=("tiny", "parley-demo"), here=same_server)
    rng = random.Random("answers")
    for number in range(REQUEST_COUNT):
        path, request_body = random_request(rng)
        await assert_same_answer(single_server, pair, path, request_body)
        if number % 6 == 0:
            await check_resume(pair, path, request_body, rng)
    await pair.wait_until_idle()


@pytest.mark.skipif(not NIGHTLY, reason="takes long: make test-nightly")
async def test_separation_under_page_pressure_changes_no_answer(alike) -> None:
    """Requests are refused and retried and preempt each other; each gets the answer it would get alone."""

    def settings() -> ParleySettings:
        return ParleySettings(model=str(BUILT_IN), shared=True, threads=1, kv_memory=900 << 10, max_batch=16)

    single_server, pair = await alike(settings=settings, names=("tiny", "parley-demo"))
    rng = random.Random("storm")
    bodies = [
        json.dumps(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "What is the weather in Paris? " * rng.randint(1, 16)}],
                "max_tokens": rng.choice((5, 20, 40)),
                "temperature": 0.8,
                "seed": rng.randrange(99),
                "stream": rng.random() < 0.7,
                "n": rng.choice((1, 1, 2)),
            }
        ).encode()
        for _ in range(60)
    ]
    refused = 0

    async def retry_until_accepted(body: bytes) -> bytes:
        nonlocal refused
        while (attempt := await pair.ask(CHAT, body, REQUEST_UUID, HEADERS)).status == 503:
            refused += 1
            await asyncio.sleep(0.05)
        return attempt.body

    def without_cached_tokens(body: bytes) -> bytes:
        return re.sub(rb'"cached_tokens":[0-9]+', b"", body)

    answers = await asyncio.gather(*map(retry_until_accepted, bodies))
    for request_body, answer in zip(bodies, answers, strict=True):
        assert same_answer(
            without_cached_tokens(answer),
            without_cached_tokens((await post_json(single_server, CHAT, request_body)).body),
        ), (request_body, answer)
    assert refused
    # Prompts are counted at prefill; decode only counts the tokens it received or had cached, and those it recomputed.
    prefill_stats, decode_stats, single_stats = (
        server.engine.stats for server in (pair.prefill, pair.decode, single_server)
    )
    assert decode_stats.prompt_tokens == decode_stats.prefix_queries == decode_stats.prefix_hits == 0
    moved, repeated = (
        counter.total_count
        for counter in (pair.decode.model.metrics.external_tokens, pair.decode.model.metrics.recomputed_tokens)
    )
    assert moved + repeated <= single_stats.prompt_tokens <= prefill_stats.prompt_tokens and 0 < repeated < moved
    await pair.wait_until_idle()  # sends each a request of its own, which is counted


@pytest.mark.parametrize("places", [(40, 40), (3, 40), (40, 2)])
async def test_handover_through_host_staging_changes_no_answer(alike, places: tuple[int, int]) -> None:
    """As with an accelerator's cache: several at once, one of them stopped, with too few staging places and enough."""
    staging_places = iter([*places, 0])  # the last is for the single server

    def settings() -> ParleySettings:
        staging = next(staging_places) * PAGE_BYTES or None
        return ParleySettings(
            model=str(BUILT_IN), shared=True, staging=staging, threads=1, kv_memory=40 * PAGE_BYTES, max_batch=8
        )

    single_server, pair = await alike(settings=settings, names=("tiny", "parley-demo"))
    assert [server.engine.info.arena.pages for server in (pair.prefill, pair.decode)] == list(places)
    received_counts: dict[str, int] = {}
    publish_received = pair.decode.engine.publish_received

    def record_received(key: str, count: int) -> None:
        received_counts[key] = count
        publish_received(key, count)

    pair.decode.engine.publish_received = record_received
    rng = random.Random("staging")

    def chat_body(number: int) -> bytes:
        question = f"{number}: " + "What is the weather in Paris? " * rng.randint(1, 9)
        members = {"messages": [{"role": "user", "content": question}], "model": "tiny", "stream": True}
        return json.dumps(
            members | {"max_tokens": 24, "temperature": 0.8, "seed": number, "n": 1 + number % 2}
        ).encode()

    bodies = [chat_body(number) for number in range(9)]

    async def retry_until_accepted(body: bytes, stop: int = 1 << 30) -> bytes:
        while (attempt := await pair.ask(CHAT, body, REQUEST_UUID, HEADERS, stop=stop)).status == 503:
            await asyncio.sleep(0.02)
        return attempt.body

    stopped, *answers = await asyncio.gather(retry_until_accepted(bodies[0], 4), *map(retry_until_accepted, bodies[1:]))
    assert (await post_json(single_server, CHAT, bodies[0])).body.startswith(stopped)
    for request_body, answer in zip(bodies[1:], answers, strict=True):
        assert same_answer(answer, (await post_json(single_server, CHAT, request_body)).body), (request_body, answer)
    assert max(received_counts.values()) <= min(places)
    assert sum(received_counts.values()) > 20 if min(places) == 40 else received_counts
    await pair.wait_until_idle()
    for server, count in zip((pair.prefill, pair.decode), places, strict=True):
        assert (server.engine.stats.unstaged_pages > 0) == (count < 40)


async def test_lost_pages_free_their_reservation_for_the_request(alike, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes most of decode's cache: pages still reserved for the lost ones would be missing for good."""

    def settings() -> ParleySettings:
        return ParleySettings(model=str(BUILT_IN), shared=True, threads=1, kv_memory=20 * PAGE_BYTES, max_batch=8)

    single_server, pair = await alike(settings=settings, names=("tiny", "parley-demo"))
    monkeypatch.setattr(KVSender, "add_computed_pages", lambda self, part, pages: None)
    monkeypatch.setattr(KVSender, "finish_handover", lambda self: asyncio.sleep(0))
    members = {"model": "tiny", "max_tokens": 20, "stream": True, "seed": 4, "temperature": 0.8, "min_tokens": 20}
    body = json.dumps(members | {"messages": [{"role": "user", "content": "What is the weather? " * 40}]}).encode()
    answer = await pair.ask(CHAT, body, REQUEST_UUID, HEADERS)
    assert same_answer(answer.body, (await post_json(single_server, CHAT, body)).body)
    await pair.wait_until_idle()


@pytest.mark.parametrize(
    ("architecture", "transport"),
    [(name, way) for name in STATE_MODELS for way in ("shared", "tcp")] if NIGHTLY else [("qwen3_5", "tcp")],
)
async def test_states_travel_with_the_pages_of_their_prompt(alike, architecture: str, transport: str) -> None:
    """Answers of one server; decode computes nothing of a prompt again but its last tokens; a lost stream resumes."""

    def settings() -> ParleySettings:
        folder = tiny_models.model_folder(architecture)
        return ParleySettings(model=str(folder), shared=True, threads=1, kv_memory=16 << 20, max_batch=8)

    single_server, pair = await alike(settings=settings, names=("tiny", "parley-demo"))
    for member in pair.members:
        member.peer._shared = transport == "shared"
    rng = random.Random("states")
    path = "/v1/completions"
    for number in range(4):
        prompt = [rng.randrange(3, 600) for _ in range((70, 80, 81, 15)[number])]
        members = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "seed": number, "n": 1 + number % 2}
        body = json.dumps(members | {"logprobs": 1, "stream": number % 2 == 0}).encode()
        await assert_same_answer(single_server, pair, path, body)
        await check_resume(pair, path, body, rng)
    metrics = pair.decode.model.metrics
    moved, repeated = (counter.total_count for counter in (metrics.external_tokens, metrics.recomputed_tokens))
    assert moved > 2 * (64 + 64 + 80) and repeated < 2 * 4 * 16
    await pair.wait_until_idle()
