"""The load generator: its counts are exact, against a real server and against servers that misbehave."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from random import Random
from socket import SHUT_RDWR

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cli_process import send_answer, send_events

from parley.cli.apis import BENCHED_APIS
from parley.cli.load.generator import RequestSample, poisson_starts
from parley.cli.load.images import random_png
from parley.cli.load.summary import count_within, percentile, summarize_load
from parley.dialects.bench import LoadShape, sse_events

EVENT = b'{"choices":[{"text":"a"}]}'
USAGE = b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}'
SMALL = ("--prompt-len", "4", "--output-len", "2", "--concurrency", "2", "--requests", "6", "--warm-up", "0")


def test_bench_sends_exact_lengths_and_counts_every_request(parley, url):
    shape = ("--prompt-len", "20", "--output-len", "5", "--shared-prefix", "16", "--requests", "7")
    done = parley("bench", "--url", url, "--concurrency", "1,3", *shape, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["concurrency"] for result in results] == [1, 3]
    for result in results:
        assert (result["requests"], result["errors"], result["short"]) == (7, 0, 0)
        assert (result["prompt_tokens"], result["output_tokens"]) == (7 * 20, 7 * 5)
        for key in ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms"):
            assert 0 <= result[key]["p50"] <= result[key]["p99"]
        assert result["ttft_ms"]["p50"] <= result["latency_ms"]["p50"]
        assert math.isclose(result["output_tokens_per_second"], 35 / result["seconds"], rel_tol=0.02)


def test_bench_sends_requests_at_a_rate_and_counts_those_within_limits(parley, url):
    shape = ("--prompt-len", "20", "--output-len", "5", "--requests", "8", "--request-rate", "200", "--json")
    done = parley("bench", "--url", url, *shape, "--slo", "ttft=1000s,latency=1000s")
    assert (done.returncode, done.stderr) == (0, "")
    (result,) = map(json.loads, done.stdout.splitlines())
    assert (result["request_rate"], result["concurrency"], result["requests"]) == (200, None, 8)
    assert result["within_slo"] == 8 and math.isclose(result["goodput"], result["requests_per_second"], rel_tol=0.02)


def test_arrivals_have_the_rate_and_limits_count_per_request():
    starts = poisson_starts(5000, 20.0, "seed")
    assert starts == sorted(starts) and math.isclose(starts[-1], 5000 / 20.0, rel_tol=0.1)
    gaps = [after - before for before, after in pairwise(starts)]
    assert math.isclose(sum(gap > 0.05 for gap in gaps) / len(gaps), math.exp(-1), abs_tol=0.03)
    fast = RequestSample(0.0, end=1.0, arrivals=[0.2, 0.6], tokens=5)
    slow = RequestSample(0.0, end=2.0, arrivals=[0.9, 1.9], tokens=5)
    failed = RequestSample(0.0, end=0.1, error="refused")
    samples = [fast, slow, failed]
    assert [count_within(samples, limits) for limits in ({}, {"ttft": 0.5}, {"tpot": 0.1}, {"tpot": 0.25})] == [
        2,
        1,
        1,
        2,
    ]
    assert count_within(samples, {"latency": 1.5, "ttft": 0.1}) == 0


@pytest.mark.parametrize("api", sorted(BENCHED_APIS))
def test_bench_measures_the_same_lengths_with_every_api(parley, url, api):
    shape = ("--prompt-len", "40", "--output-len", "5", "--shared-prefix", "8", "--requests", "4", "--concurrency", "2")
    done = parley("bench", "--url", url, "--api", api, *shape, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["api"], result["requests"], result["errors"], result["short"]) == (api, 4, 0, 0)
    assert (result["prompt_tokens"], result["output_tokens"]) == (4 * 40, 4 * 5)
    assert 0 <= result["ttft_ms"]["p50"] <= result["latency_ms"]["p50"]
    assert result["tpot_ms"]["p50"] is not None


@pytest.mark.parametrize(
    ("api", "detected", "why"),
    [
        ("tgi", [b'{"token":{},"generated_text":null,"details":null}'], "the connection was closed"),
        ("tgi", [b'{"error":"It broke.","error_type":"generation"}'], "It broke."),
        ("triton", [b'{"text_output":"a","num_output_tokens":1,"finish_reason":"None"}'], "the connection was closed"),
        ("triton", [b'{"error":"It broke."}'], "It broke."),
        ("chat", [b'{"choices":[{"delta":{"content":"a"}}]}'], "the connection was closed"),
    ],
)
def test_bench_detects_incomplete_streams_of_every_api(api, detected, why):
    sample = RequestSample(
        0.0, end=1.0, status=200, pieces=[(0.5, b"".join(b"data: " + event + b"\n\n" for event in detected))]
    )
    sample.parse_events(BENCHED_APIS[api])
    assert sample.error.startswith(why)


def test_bench_reports_a_prompt_length_below_the_chat_template(parley, url):
    done = parley("bench", "--url", url, "--api", "chat", "--prompt-len", "3")
    assert done.returncode == 1 and "increase --prompt-len" in done.stderr


def test_bench_table_has_one_line_per_concurrency(parley, url):
    done = parley("bench", "--url", url, *SMALL)
    head, row = done.stdout.splitlines()
    assert done.returncode == 0 and "TTFT" in head
    assert row.split()[:3] == ["2", "6", "0"]


def test_bench_reports_refusals_with_the_servers_reason(parley, url):
    done = parley("bench", "--url", url, "--prompt-len", "5000", "--concurrency", "2", "--requests", "2", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1
    assert (result["errors"], result["output_tokens"], result["ttft_ms"]["p50"]) == (2, 0, None)
    assert "2 requests failed: status 400: " in done.stderr


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (lambda h: send_events(h, EVENT, USAGE), "the connection was closed before the answer was complete"),
        (lambda h: send_events(h, EVENT, b'{"error":{"message":"It ended."}}', b"[DONE]"), "It ended."),
        (lambda h: send_events(h, EVENT, b"{", b"[DONE]"), "an event that is not JSON"),
        (lambda h: send_events(h, EVENT, b"[DONE]"), "a stream without tokens or without a usage record"),
        (lambda h: send_answer(h, 429, b'{"error":{"message":"Full."}}'), "status 429: Full."),
        (lambda h: send_answer(h, 503, b"<html>"), "status 503: no reason given"),
        (lambda h: h.connection.shutdown(SHUT_RDWR), "the connection was closed before the answer was complete"),
        (lambda h: (h.wfile.write(b"nonsense\r\n\r\n"), h.wfile.flush()), "not an HTTP answer"),
        (lambda h: time.sleep(30), "no complete answer within 0.5 s"),
    ],
    ids=["cut", "error event", "no JSON", "no usage", "429", "503", "dropped", "no HTTP", "silent"],
)
def test_bench_counts_every_failure_and_never_hangs(parley, faulty, script, why):
    timeout = "500ms" if "0.5 s" in why else "60s"
    done = parley("bench", "--url", faulty(script), *SMALL, "--timeout", timeout, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1
    assert (result["requests"], result["errors"], result["output_tokens"]) == (6, 6, 0)
    assert all(reason.startswith(why) for reason in result["reasons"]), result["reasons"]


def test_bench_excludes_failed_requests_from_throughput(parley, faulty):
    requests = []

    def second_fails(handler) -> None:
        requests.append(handler)
        send_events(handler, EVENT, EVENT, USAGE, *([b"[DONE]"] if len(requests) % 2 else []))

    done = parley("bench", "--url", faulty(second_fails), *SMALL, "--json")
    result = json.loads(done.stdout)
    assert (result["requests"], result["errors"], result["output_tokens"], result["cached_tokens"]) == (6, 3, 6, 3)
    assert done.returncode == 1


def test_bench_mentions_short_answers_and_deviating_counts(parley, faulty):
    url = faulty(lambda h: send_events(h, EVENT, EVENT, USAGE, b"[DONE]"))
    done = parley("bench", "--url", url, *SMALL, "--output-len", "3", "--prompt-len", "9")
    assert done.returncode == 0
    assert "6 answers had fewer than 3 tokens." in done.stderr
    assert "The server counted 24 prompt tokens, not 54." in done.stderr


def test_bench_refuses_a_server_without_tokenize(parley, faulty):
    done = parley("bench", "--url", faulty(lambda h: send_answer(h, 404, b"{}")) + "/below")
    assert done.returncode == 1 and "has no /tokenize that gives token ids" in done.stderr


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.sampled_from([0.5, 0.99]))
def test_percentile_is_the_smallest_value_that_covers_its_share(values, share):
    result = percentile(values, share)
    covered = sum(value <= result for value in values)
    below = sum(value < result for value in values)
    assert result in values
    assert covered >= share * len(values) > below - 1e-9
    assert percentile([], share) is None


@given(st.lists(st.text("ab:\r ", max_size=8)), st.lists(st.integers(1, 9), min_size=1))
def test_bench_reads_the_same_events_from_any_chunks(lines, cuts):
    data = "".join(f"data: {line.strip()}x\n\n: ping\n" for line in lines).encode()
    pieces, start = [], 0
    while start < len(data):
        step = cuts[len(pieces) % len(cuts)]
        pieces.append((float(start), data[start : start + step]))
        start += step
    whole = [event for _, event in sse_events([(0.0, data)])]
    cut = list(sse_events(pieces))
    assert [event for _, event in cut] == whole and len(whole) == len(lines)
    assert [when for when, _ in cut] == sorted(when for when, _ in cut)


def test_bench_times_follow_their_definitions():
    sample = RequestSample(10.0, end=13.0, status=200, arrivals=[11.0, 11.5, 12.5], prompt_tokens=4, tokens=4)
    result = summarize_load([sample, RequestSample(10.0, error="no")], 4.0, 2, LoadShape("m", 4, 1.0))
    assert (result["ttft_ms"]["p50"], result["tpot_ms"]["p50"], result["latency_ms"]["p50"]) == (1000, 500, 3000)
    assert (result["itl_ms"]["p50"], result["itl_ms"]["p99"]) == (500, 1000)
    assert (result["output_tokens_per_second"], result["requests_per_second"]) == (1.0, 0.25)
    assert result["each_tokens_per_second"] == {"p50": 1.33, "p99": 1.33}
    assert result["reasons"] == {"no": 1}


def test_random_images_are_png_files_of_their_size():
    from io import BytesIO

    from PIL import Image

    data = random_png(5, 3, Random(1))
    image = Image.open(BytesIO(data))
    assert (image.size, image.mode, image.format) == ((5, 3), "RGB", "PNG")
    image.load()
    assert data != random_png(5, 3, Random(2))


def test_bench_sends_images_before_the_text(parley, url):
    done = parley("bench", "--url", url, "--images", "1", *SMALL)
    assert (done.returncode, done.stderr) == (
        2,
        "parley: --images needs --api chat.\nTry `parley bench --help`.\n",
    )
    size = ("--image-size", "8", "--prompt-len", "40")
    done = parley("bench", "--url", url, "--images", "2", "--api", "chat", *SMALL, *size, "--json")
    assert done.returncode == 1  # the model of this server reads text only, and names the first part
    assert "6 requests failed: status 400: 'messages[0].content[0].type' is 'image_url'" in done.stderr
