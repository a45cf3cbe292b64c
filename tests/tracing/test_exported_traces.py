"""Traces of requests, as real OTLP receivers get them: connected over a cluster, and without them nothing is lost."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.otlp_receivers import Collector, ReceivedSpan, grpc_collector, http_collector

import parley
from parley.tracing.otlp import OtlpTarget, find_otlp_target

CHAT = "/v1/chat/completions"
CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {
    "content-type": "application/json",
    "traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01",
    "tracestate": "vendor=1",
}
SERVER, INTERNAL, CLIENT = 2, 1, 3  # kinds of spans in OTLP


def chat_body(**members: Any) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5, **members}
    return json.dumps(body).encode()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without OpenTelemetry's variables but for a short delay."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    return monkeypatch


@pytest.fixture
def over_grpc() -> Iterator[Collector]:
    with grpc_collector() as collector:
        yield collector


@pytest.fixture
def over_http() -> Iterator[Collector]:
    with http_collector() as collector:
        yield collector


def depth_first(spans: list[ReceivedSpan], parent_id: str, depth: int = 0) -> list[tuple[int, str, str]]:
    """Return depth, role and name of all spans below a span."""
    lines = []
    for span in sorted((child for child in spans if child.parent_id == parent_id), key=lambda child: child.start):
        lines += [(depth, span.role, span.name), *depth_first(spans, span.span_id, depth + 1)]
    return lines


async def test_cluster_makes_one_connected_trace(environment, over_grpc: Collector, live_cluster) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", over_grpc.endpoint)
    cluster = await live_cluster("prefill", "decode")
    unrecorded = HEADERS | {"traceparent": f"00-{'1' * 32}-{CLIENT_SPAN}-00"}  # passed on, and exported nowhere
    for headers in (unrecorded, HEADERS):
        assert (await cluster.front.call("POST", CHAT, chat_body(), headers)).status == 200
    await cluster.wait_until_idle()
    await cluster.front.until(lambda: len(over_grpc.spans) >= 15)
    spans = over_grpc.spans
    assert {span.trace_id for span in spans} == {CLIENT_TRACE}
    assert len({span.span_id for span in spans}) == len(spans)
    assert depth_first(spans, CLIENT_SPAN) == [
        (0, "coordinator", f"POST {CHAT}"),
        (1, "coordinator", "schedule"),
        (1, "coordinator", "attempt"),
        (2, "prefill", f"POST {CHAT}"),
        (3, "prefill", "chat tiny"),
        (4, "prefill", "prepare"),
        (4, "prefill", "queue"),
        (4, "prefill", "prefill"),
        (3, "prefill", "kv handover"),
        (4, "decode", f"POST {CHAT}"),
        (5, "decode", "chat tiny"),
        (6, "decode", "prepare"),
        (6, "decode", "decode"),
        (5, "decode", "reserve pages"),
        (5, "decode", "receive pages"),
    ]
    assert over_grpc.span_named("kv handover").attributes["parley.kv.bytes"] >= 0
    attempt = over_grpc.span_named("attempt").attributes
    assert (attempt["parley.prefill.instance"], attempt["parley.decode.instance"]) == (1, 2)


async def test_spans_have_the_names_of_the_conventions_and_of_vllm(over_http: Collector, serve) -> None:
    server = await serve(otlp_traces_endpoint=over_http.endpoint, api_keys=("secret-key",))
    headers = HEADERS | {"authorization": "Bearer secret-key", "x-request-id": "mine"}
    body = chat_body(stream=True, temperature=0.5, top_p=0.9, seed=3, n=2)
    assert (await server.call("POST", CHAT, body, headers)).status == 200
    await server.call("GET", "/health")
    refused = await server.call("POST", CHAT, chat_body(temperature=9), {**headers, "traceparent": "00-1"})
    assert refused.status == 400
    await server.until(lambda: len(over_http.spans) >= 7)
    request = next(span for span in over_http.spans if span.trace_id == CLIENT_TRACE and span.kind == SERVER)
    assert (request.name, request.service, request.parent_id) == (f"POST {CHAT}", "parley", CLIENT_SPAN)
    expected = {"http.request.method": "POST", "http.route": CHAT, "http.response.status_code": 200}
    assert expected.items() <= request.attributes.items()
    assert (request.attributes["parley.request.id"], request.attributes["parley.key"]) == ("mine", "key-1")
    chat = over_http.span_named("chat tiny")
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert expected.items() <= chat.attributes.items()
    assert chat.attributes["gen_ai.usage.input_tokens"] == chat.attributes["gen_ai.usage.prompt_tokens"] > 0
    assert 0 < chat.attributes["gen_ai.latency.time_to_first_token"] <= chat.attributes["gen_ai.latency.e2e"]
    assert request.start <= chat.start <= chat.end <= request.end
    phases = [span for span in over_http.spans if span.parent_id == chat.span_id]
    assert sorted(span.name for span in phases) == ["decode", "prefill", "prepare", "queue"]
    assert all(chat.start <= span.start <= span.end <= chat.end for span in phases)
    (other,) = [span for span in over_http.spans if span.trace_id != CLIENT_TRACE]  # the probe is not traced
    assert (other.parent_id, other.attributes["error.type"], other.status) == ("", "400", 0)
    everything = repr(over_http.spans)
    assert "secret-key" not in everything and "Hello!" not in everything


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_spans_of_many_requests_arrive_once_each(environment, serve, protocol: str) -> None:
    environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with grpc_collector() if protocol == "grpc" else http_collector() as collector:
        server = await serve(otlp_traces_endpoint=collector.endpoint)
        for _ in range(3):  # requests whose spans are encoded together, and those that are left
            answers = await asyncio.gather(
                *(server.call("POST", CHAT, chat_body(), {"content-type": "application/json"}) for _ in range(21))
            )
            assert {answer.status for answer in answers} == {200}
        await server.until(lambda: len(collector.spans) >= 63 * 6)
        counts = Counter(span.name for span in collector.spans)
        assert set(counts.values()) == {63} and len(counts) == 6
        assert len({span.span_id for span in collector.spans}) == 63 * 6
        assert len({span.trace_id for span in collector.spans}) == 63


async def test_dead_collector_is_logged_once_and_fails_no_request(environment, serve, caplog) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with grpc_collector() as collector:
        endpoint = collector.endpoint
    server = await serve(otlp_traces_endpoint=endpoint)
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            assert (await server.call("POST", CHAT, chat_body(), HEADERS)).status == 200
            await server.until(lambda: bool(caplog.records))
    assert [record.getMessage() for record in caplog.records if "OTLP" in record.getMessage()] == [
        "The OTLP collector does not take spans; they are dropped until it does."
    ]


async def test_a_collector_that_recovers_is_logged_with_the_requests_whose_spans_were_lost(
    environment, serve, caplog
) -> None:
    with http_collector() as collector:
        collector.refuses = True
        server = await serve(otlp_traces_endpoint=collector.endpoint)
        with caplog.at_level(logging.INFO):
            assert (await server.call("POST", CHAT, chat_body(), HEADERS)).status == 200
            await server.until(lambda: "does not take spans" in caplog.text)
            collector.refuses = False
            assert (await server.call("POST", CHAT, chat_body(), HEADERS)).status == 200
            await server.until(lambda: "takes spans again" in caplog.text)
    assert "The OTLP collector takes spans again. Requests without spans there: about 1." in caplog.messages


def test_only_an_exporter_imports_the_packages() -> None:
    """A server without traces pays nothing for them, not even the import."""
    package = Path(parley.__file__).parent
    texts = {str(file.relative_to(package)): file.read_text("utf-8") for file in package.rglob("*.py")}
    importers = {name for name, text in texts.items() if re.search(r"^\s*(from|import) opentelemetry", text, re.M)}
    assert importers == {"tracing/span_export.py"}
    assert not [name for name, text in texts.items() if re.search(r"^from parley\.tracing\.span_export", text, re.M)]


@pytest.mark.parametrize(
    ("endpoint", "variables", "target"),
    [
        ("", {}, None),
        ("grpc://c:1", {}, OtlpTarget("http://c:1", "grpc")),
        ("grpcs://c:4317", {}, OtlpTarget("https://c:4317", "grpc")),
        ("http://c:4317", {}, OtlpTarget("http://c:4317", "grpc")),
        ("http://c:4318", {}, OtlpTarget("http://c:4318/v1/traces", "http")),
        ("https://c/v1/x", {}, OtlpTarget("https://c/v1/x", "http")),
        (
            "http://c:4317",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            OtlpTarget("http://c:4317/v1/traces", "http"),
        ),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, OtlpTarget("", "grpc")),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/x"}, OtlpTarget("", "http")),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
        ("grpc://c:1", {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_endpoint_and_environment_name_the_collector(
    endpoint: str, variables: dict[str, str], target: OtlpTarget | None
) -> None:
    assert find_otlp_target(endpoint, variables) == target
