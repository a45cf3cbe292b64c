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
from support.compare_answers import same
from support.lora_adapters import write_adapter
from support.prefill_decode_pair import HEADERS, UNIQUE, Pair, compare, single
from support.random_requests import body, routes
from support.request_features import ASKED
from support.request_features import body as wished

import parley
from parley.instance.prefill import Prefill
from parley.types import Settings

BUILT_IN = Path(parley.__file__).parent / "demo" / "model"
NIGHTLY = bool(os.environ.get("PARLEY_NIGHTLY"))
COUNT = 2200 if NIGHTLY else 24
CHAT = "/v1/chat/completions"
PAGE = 48 << 10  # bytes of a KV page of the built-in model


def wish(rng: random.Random) -> tuple[str, bytes]:
    """Return a request for any route, or for random features of a chat."""
    if rng.random() < 0.4:
        path = rng.choice([path for path, _ in routes()])
        return path, body(path, rng)
    known = ASKED if NIGHTLY else [name for name in ASKED if name != "lora"]
    members: dict[str, Any] = wished(tuple(rng.sample(known, rng.choice((0, 1, 2, 3)))))
    question = rng.choice(("Hello!", "What is the weather in Paris and London? " * rng.randint(1, 20)))
    members["messages"] = [{"role": "user", "content": question}]
    members |= {"max_tokens": rng.choice((1, 2, 7, 32)), "seed": rng.choice((None, 7, 8)), "stream": rng.random() < 0.6}
    return CHAT, json.dumps(members).encode()


async def resume(pair: Pair, path: str, asked: bytes, rng: random.Random) -> None:
    """A stream that was cut after any part resumes with exactly the missing bytes."""
    whole = await pair.ask(path, asked, UNIQUE, HEADERS)
    if whole.status == 200 and len(whole.parts) > 1:
        count = rng.randrange(1, len(whole.parts))
        past = [record for _, record in whole.parts[:count]]
        rest = await pair.ask(path, asked, UNIQUE, HEADERS, past=past)
        got = b"".join(data for data, _ in whole.parts[:count]) + rest.body
        assert same(got, whole.body), (path, asked, count, got, whole.body)


@pytest.mark.parametrize(
    ("here", "places"), [(False, None), (True, None), (False, 12), (False, 200)] if NIGHTLY else [(False, None)]
)
async def test_built_in_model_separated_answers_like_one_server(
    alike, tmp_path: Path, here: bool, places: int | None
) -> None:
    adapters = {"adapted": str(write_adapter(tmp_path / "adapter", BUILT_IN, seed=1))} if NIGHTLY else {}

    def settings() -> Settings:
        return Settings(
            model=str(BUILT_IN),
            shared=True,
            staging=places and places * PAGE,
            threads=1,
            kv_memory=24 << 20,
            max_batch=32,
            adapters=dict(adapters),
        )

    one, pair = await alike(settings=settings, names=("tiny", "parley-demo"), here=here)
    rng = random.Random("answers")
    for number in range(COUNT):
        path, asked = wish(rng)
        await compare(one, pair, path, asked)
        if number % 6 == 0:
            await resume(pair, path, asked, rng)
    await pair.idle()


@pytest.mark.skipif(not NIGHTLY, reason="takes long: make test-nightly")
async def test_separation_under_page_pressure_changes_no_answer(alike) -> None:
    """Requests are refused and retried and preempt each other; each gets the answer it would get alone."""

    def settings() -> Settings:
        return Settings(model=str(BUILT_IN), shared=True, threads=1, kv_memory=900 << 10, max_batch=16)

    one, pair = await alike(settings=settings, names=("tiny", "parley-demo"))
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

    async def insist(body: bytes) -> bytes:
        nonlocal refused
        while (given := await pair.ask(CHAT, body, UNIQUE, HEADERS)).status == 503:
            refused += 1
            await asyncio.sleep(0.05)
        return given.body

    def uncached(body: bytes) -> bytes:
        return re.sub(rb'"cached_tokens":[0-9]+', b"", body)

    given = await asyncio.gather(*map(insist, bodies))
    for asked, got in zip(bodies, given, strict=True):
        assert same(uncached(got), uncached((await single(one, CHAT, asked)).body)), (asked, got)
    assert refused
    # Prompts are counted at prefill; decode only counts the tokens it received or had cached, and those it recomputed.
    here, there, alone = (each.engine.stats for each in (pair.prefill, pair.decode, one))
    assert there.prompt_tokens == there.prefix_queries == there.prefix_hits == 0
    moved, repeated = (each.total for each in (pair.decode.model.metrics.moved, pair.decode.model.metrics.repeated))
    assert moved + repeated <= alone.prompt_tokens <= here.prompt_tokens and 0 < repeated < moved
    await pair.idle()  # sends each a request of its own, which is counted


@pytest.mark.parametrize("places", [(40, 40), (3, 40), (40, 2)])
async def test_handover_through_host_staging_changes_no_answer(alike, places: tuple[int, int]) -> None:
    """As with an accelerator's cache: several at once, one of them stopped, with too few staging places and enough."""
    sides = iter([*places, 0])  # the last is for the single server

    def settings() -> Settings:
        staging = next(sides) * PAGE or None
        return Settings(model=str(BUILT_IN), shared=True, staging=staging, threads=1, kv_memory=40 * PAGE, max_batch=8)

    one, pair = await alike(settings=settings, names=("tiny", "parley-demo"))
    assert [served.engine.info.arena.pages for served in (pair.prefill, pair.decode)] == list(places)
    landed: dict[str, int] = {}
    land = pair.decode.engine.landed
    pair.decode.engine.landed = lambda key, count: (landed.__setitem__(key, count), land(key, count))
    rng = random.Random("staging")

    def asked(number: int) -> bytes:
        question = f"{number}: " + "What is the weather in Paris? " * rng.randint(1, 9)
        told = {"messages": [{"role": "user", "content": question}], "model": "tiny", "stream": True}
        return json.dumps(told | {"max_tokens": 24, "temperature": 0.8, "seed": number, "n": 1 + number % 2}).encode()

    bodies = [asked(number) for number in range(9)]

    async def insist(body: bytes, stop: int = 1 << 30) -> bytes:
        while (given := await pair.ask(CHAT, body, UNIQUE, HEADERS, stop=stop)).status == 503:
            await asyncio.sleep(0.02)
        return given.body

    stopped, *given = await asyncio.gather(insist(bodies[0], 4), *map(insist, bodies[1:]))
    assert (await single(one, CHAT, bodies[0])).body.startswith(stopped)
    for each, got in zip(bodies[1:], given, strict=True):
        assert same(got, (await single(one, CHAT, each)).body), (each, got)
    assert max(landed.values()) <= min(places)
    assert sum(landed.values()) > 20 if min(places) == 40 else landed
    await pair.idle()
    for served, count in zip((pair.prefill, pair.decode), places, strict=True):
        assert (served.engine.stats.unstaged > 0) == (count < 40)


async def test_lost_pages_free_their_reservation_for_the_request(alike, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes most of decode's cache: pages still reserved for the lost ones would be missing for good."""

    def settings() -> Settings:
        return Settings(model=str(BUILT_IN), shared=True, threads=1, kv_memory=20 * PAGE, max_batch=8)

    one, pair = await alike(settings=settings, names=("tiny", "parley-demo"))
    monkeypatch.setattr(Prefill, "_filled", lambda self, number, pages: None)
    monkeypatch.setattr(Prefill, "_settle", lambda self, giver: asyncio.sleep(0, (giver.close(), self._release())))
    asked = {"model": "tiny", "max_tokens": 20, "stream": True, "seed": 4, "temperature": 0.8, "min_tokens": 20}
    body = json.dumps(asked | {"messages": [{"role": "user", "content": "What is the weather? " * 40}]}).encode()
    given = await pair.ask(CHAT, body, UNIQUE, HEADERS)
    assert same(given.body, (await single(one, CHAT, body)).body)
    await pair.idle()
