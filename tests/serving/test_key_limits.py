"""Limits of API keys: the pure limiter against exact arithmetic, and the answers of each API over HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api_keys import SECOND, Clock, make_keys
from support.http_client import HELLO_CHAT, RunningServer, build_request

from parley.errors import RateLimited
from parley.metrics.http_requests import HttpRequestMetrics
from parley.metrics.key_names import MAX_KEYS
from parley.serving.keys.rate_limits import DAY_SECONDS
from parley.types import KeyLimits, KeyOwner, Tenant

COMPLETION = {"prompt": "a b c", "max_tokens": 4}  # 4 tokens and 4


def tenant(**limits: int) -> Tenant:
    return Tenant(id="t", owner=KeyOwner("alice"), limits=KeyLimits(**limits))


# -- the limiter


@settings(max_examples=40, deadline=None)
@given(
    limit=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.integers(0, 90 * SECOND), st.integers(1, 50)), max_size=30),
)
def test_requests_are_admitted_exactly_while_the_budget_has_one(limit, steps):
    clock = Clock()
    limiter, key = clock.limiter(), tenant(requests_per_minute=limit)
    left = Fraction(limit)  # the model: exact arithmetic
    for pause, attempts in steps:
        clock.nanoseconds += pause
        left = min(Fraction(limit), left + Fraction(limit * pause, 60 * SECOND))
        for _ in range(attempts):
            if left >= 1:
                limiter.admit_request(key).settle_tokens()
                left -= 1
            else:
                with pytest.raises(RateLimited) as refusal:
                    limiter.admit_request(key)
                assert refusal.value.retry_after == pytest.approx(float((1 - left) * 60 / limit))
        assert limiter.states_of(key).requests == (limit, int(left), pytest.approx(float((limit - left) * 60 / limit)))


@settings(max_examples=40, deadline=None)
@given(
    per_minute=st.integers(1, 500),
    requests=st.lists(
        st.tuples(st.integers(0, 90 * SECOND), st.integers(1, 60), st.none() | st.integers(0, 60), st.integers(0, 90)),
        max_size=30,
    ),
)
def test_tokens_are_reserved_and_settled_exactly(per_minute, requests):
    """Each request has a pause before it, tokens of its prompt, its limit of output tokens, and those it gets."""
    clock = Clock()
    limiter, key = clock.limiter(), tenant(tokens_per_minute=per_minute)
    left, open_leases = Fraction(per_minute), []
    for pause, prompt, most, output in requests:
        clock.nanoseconds += pause
        left = min(Fraction(per_minute), left + Fraction(per_minute * pause, 60 * SECOND))
        if left < 1:
            with pytest.raises(RateLimited):
                limiter.admit_request(key)
            continue
        lease, reserved = limiter.admit_request(key), prompt + (most or 0)
        if reserved > left:
            with pytest.raises(RateLimited) as refusal:
                lease.reserve_tokens(prompt, most)
            assert (refusal.value.retry_after is None) == (reserved > per_minute)
            lease.settle_tokens()
        else:
            lease.reserve_tokens(prompt, most)
            left -= reserved
            open_leases.append((lease, reserved, prompt + (output if most is None else min(output, most))))
        if len(open_leases) > 2:
            lease, reserved, used = open_leases.pop(0)
            lease.settle_tokens(used)
            lease.settle_tokens(used)  # the second time changes nothing
            left = min(Fraction(per_minute), left + reserved - used)
        remaining = limiter.states_of(key).tokens.remaining
        assert remaining == max(0, int(left // 1))


def test_daily_tokens_reset_with_the_day_and_ended_requests_free_their_places():
    clock = Clock()
    limiter, key = clock.limiter(), tenant(tokens_per_day=100, concurrent_requests=2)
    clock.nanoseconds = (DAY_SECONDS - 10) * SECOND
    first, second = limiter.admit_request(key), limiter.admit_request(key)
    with pytest.raises(RateLimited, match="concurrent requests: limit 2, used 2"):
        limiter.admit_request(key)
    first.reserve_tokens(60, 20)
    with pytest.raises(RateLimited, match="tokens per day: limit 100, used 80, requested 30") as refusal:
        second.reserve_tokens(10, 20)
    assert refusal.value.retry_after == 10
    clock.nanoseconds += 20 * SECOND
    second.reserve_tokens(50, 50)  # a new day
    first.settle_tokens(70)  # what it gives back belongs to the day before
    with pytest.raises(RateLimited, match="tokens per day"):
        limiter.admit_request(key)


def test_other_limits_apply_at_once_and_keep_what_was_used():
    clock = Clock()
    limiter = clock.limiter()
    for _ in range(4):
        limiter.admit_request(tenant(requests_per_minute=10)).settle_tokens()
    assert limiter.states_of(tenant(requests_per_minute=5)).requests.remaining == 1
    limiter.admit_request(tenant(requests_per_minute=5)).settle_tokens()
    with pytest.raises(RateLimited):
        limiter.admit_request(tenant(requests_per_minute=5))
    limiter.admit_request(tenant()).settle_tokens()


# -- over HTTP


def stop_clock(server: RunningServer) -> Clock:
    clock = Clock()
    server.service.key_ledger.limiter = clock.limiter()
    return clock


async def test_limits_are_exact_under_64_concurrent_clients(serve):
    headers, keys = make_keys(
        requests={"requests_per_minute": 100}, tokens={"tokens_per_minute": 100 * 8}, open={"concurrent_requests": 8}
    )
    server = await serve(hashed_keys=keys, tick=0.001)
    stop_clock(server)

    async def send(name: str, count: int) -> Counter[int]:
        connection = await server.connect()
        statuses: Counter[int] = Counter()
        for _ in range(count):
            await connection.send(build_request("POST", "/v1/completions", COMPLETION, headers[name]))
            statuses[(await connection.answer()).status] += 1
        return statuses

    for name, count, answered in (("requests", 3, 100), ("tokens", 3, 100)):
        statuses = sum(await asyncio.gather(*(send(name, count) for _ in range(64))), Counter())
        assert statuses == {200: answered, 429: 64 * count - answered}
    states = server.service.key_ledger.limiter.states_of(Tenant())
    assert states.requests is states.tokens is None
    statuses = sum(await asyncio.gather(*(send("open", 1) for _ in range(64))), Counter())
    assert statuses[200] >= 8 and statuses[200] + statuses[429] == 64
    await server.wait_until_idle()


FORMS = {
    "/v1/chat/completions": (429, ("error", "code"), "rate_limit_exceeded"),
    "/v1/messages": (429, ("error", "type"), "rate_limit_error"),
    "/generate": (429, ("error_type",), "refused"),
    "/vllm/v1/chat/completions": (429, ("error", "code"), 429),
    "/v2/models/tiny/generate": (429, ("error",), None),
    "/api/chat": (429, ("error",), None),
    "/serving-endpoints/tiny/invocations": (429, ("error_code",), "REQUEST_LIMIT_EXCEEDED"),
    "/mindie/infer": (429, ("error_type",), None),
    "/tei/embed": (429, ("error_type",), None),
}


async def test_every_api_refuses_in_its_own_form_and_says_when_to_retry(serve):
    headers, keys = make_keys(alice={"requests_per_minute": 1, "tokens_per_minute": 1000})
    server = await serve(hashed_keys=keys)
    stop_clock(server)
    chat = HELLO_CHAT | {"max_tokens": 2}
    first = await server.post("/v1/chat/completions", chat, **headers["alice"])
    assert first.status == 200
    used = first.json["usage"]["total_tokens"]
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert first.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert first.headers["x-ratelimit-remaining-tokens"] == str(1000 - used)
    for path, (status, members, expected) in FORMS.items():
        answer = await server.post(path, chat, **headers["alice"])
        assert (answer.status, answer.headers["retry-after"]) == (status, "60"), path
        value = answer.json
        for member in members:
            value = value[member]
        assert value == expected if expected is not None else value, path
        assert "requests per minute" in answer.body.decode(), path
    message = await server.post("/v1/messages", chat, **headers["alice"])
    assert message.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert message.headers["anthropic-ratelimit-tokens-limit"] == "1000"
    assert message.headers["anthropic-ratelimit-requests-reset"].endswith("z")  # in small letters, as all values here


async def test_tokens_are_checked_before_the_engine_has_the_request(serve):
    headers, keys = make_keys(alice={"tokens_per_minute": 20})
    server = await serve(hashed_keys=keys)
    stop_clock(server)
    refused = await server.post("/v1/completions", COMPLETION | {"max_tokens": 17}, **headers["alice"])
    assert refused.status == 429 and refused.json["error"]["type"] == "tokens"
    assert "requested 21" in refused.json["error"]["message"] and "retry-after" not in refused.headers
    assert server.model.metrics.totals.succeeded == server.model.metrics.totals.cancelled == 0
    accepted = await server.post("/v1/completions", COMPLETION | {"max_tokens": 16, "stop": "b"}, **headers["alice"])
    used = accepted.json["usage"]["total_tokens"]
    assert accepted.status == 200 and used < 20
    after = await server.post("/v1/completions", COMPLETION | {"max_tokens": 17}, **headers["alice"])
    assert f"used {used}" in after.json["error"]["message"]  # what was not used was given back
    await server.wait_until_idle()


async def test_keys_have_scopes_and_end(serve):
    headers, keys = make_keys(
        models={"models": ["other"]},
        apis={"apis": ["anthropic"]},
        expired={"expires": "2020-01-01"},
        plain={},
        boss={"admin": True},
    )
    server = await serve(hashed_keys=keys)
    chat = HELLO_CHAT | {"max_tokens": 2}
    statuses = {name: (await server.post("/v1/chat/completions", chat, **headers[name])).status for name in headers}
    assert statuses == {"models": 403, "apis": 403, "expired": 401, "plain": 200, "boss": 200}
    assert (await server.post("/v1/messages", chat, **headers["apis"])).status == 200
    resets = {name: (await server.post("/reset_prefix_cache", **headers[name])).status for name in ("plain", "boss")}
    assert resets == {"plain": 403, "boss": 200}
    key = headers["plain"]["authorization"]
    for wrong in (key[:-1], key.replace("parley-", "parley-0"), "Bearer parley-", "Bearer parley-" + "0" * 12 + "-x"):
        assert (await server.post("/v1/chat/completions", chat, authorization=wrong)).status == 401
    assert (await server.post("/v1/chat/completions", chat)).status == 401


def test_metrics_have_a_bounded_number_of_keys():
    metrics = HttpRequestMetrics()
    for number in range(MAX_KEYS + 50):
        metrics.record_request("/p", "POST", 200, 0.1, "api", f"key-{number}")
    lines = [line for line in metrics.render_lines().splitlines() if line.startswith("parley:requests_total{")]
    assert len(lines) == MAX_KEYS + 1 and any('key="other"' in line and line.endswith(" 50") for line in lines)


async def test_a_key_file_without_keys_lets_nobody_in(serve):
    server = await serve(hashed_keys=())
    assert (await server.post("/v1/chat/completions", HELLO_CHAT)).status == 401
