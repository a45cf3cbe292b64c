"""The summary of one load: latencies, rates, and how much they vary within it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from parley.cli.load.generator import RequestSample
from parley.dialects.bench import LoadShape

PARTS = 5  # parts into which a load is cut, to show its noise


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of the values do not exceed, or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


def collect_times(successes: Sequence[RequestSample]) -> dict[str, list[float]]:
    """Return the times of all requests in seconds, by the name that a summary has them under."""
    return {
        "ttft_ms": [sample.arrivals[0] - sample.start for sample in successes if sample.arrivals],
        "tpot_ms": [
            (sample.arrivals[-1] - sample.arrivals[0]) / (sample.tokens - 1)
            for sample in successes
            if sample.arrivals and sample.tokens > 1
        ],
        "itl_ms": [
            arrival - earlier_arrival
            for sample in successes
            for earlier_arrival, arrival in zip(sample.arrivals, sample.arrivals[1:], strict=False)
        ],
        "latency_ms": [sample.end - sample.start for sample in successes],
    }


def summarize_load(samples: Sequence[RequestSample], wall: float, concurrency: int, shape: LoadShape) -> dict[str, Any]:
    """Return the measurements of one load: times in ms, rates per second. Failed requests count only as errors.

    TTFT: from sending to the first output. ITL: between two events with output. TPOT: from first to last output, per
    token after the first. ``each``: a request's own tokens per second; 99 % of the requests reach its p99.
    """
    successes = [sample for sample in samples if not sample.error]
    slowness = [(sample.end - sample.start) / sample.tokens for sample in successes]
    tokens, prompt = sum(sample.tokens for sample in successes), sum(sample.prompt_tokens for sample in successes)
    return {
        "concurrency": concurrency,
        "requests": len(samples),
        "errors": len(samples) - len(successes),
        "reasons": dict(Counter(sample.error for sample in samples if sample.error).most_common()),
        "short": sum(sample.tokens < (sample.requested_tokens or shape.output_tokens) for sample in successes),
        "seconds": round(wall, 6),
        "prompt_tokens": prompt,
        "cached_tokens": sum(sample.cached_tokens for sample in successes),
        "output_tokens": tokens,
        **{name: _percentiles_ms(values) for name, values in collect_times(successes).items()},
        "each_tokens_per_second": {
            name: None if (value := percentile(slowness, share)) is None else round(1 / value, 2)
            for name, share in (("p50", 0.5), ("p99", 0.99))
        },
        "output_tokens_per_second": round(tokens / wall, 2),
        "tokens_per_second": round((prompt + tokens) / wall, 2),
        "requests_per_second": round(len(successes) / wall, 3),
    }


def count_within(samples: Sequence[RequestSample], limits: Mapping[str, float]) -> int:
    """Return how many requests keep all limits: seconds by ``ttft``, ``tpot`` and ``latency``, as in the summary."""
    return sum(
        not sample.error and all(measured <= limits.get(name, inf) for name, measured in _own_times(sample).items())
        for sample in samples
    )


def _own_times(sample: RequestSample) -> dict[str, float]:
    if not sample.arrivals:
        return {"latency": sample.end - sample.start, "ttft": inf}
    first, last = sample.arrivals[0], sample.arrivals[-1]
    per_token = (last - first) / (sample.tokens - 1) if sample.tokens > 1 else 0.0
    return {"ttft": first - sample.start, "tpot": per_token, "latency": sample.end - sample.start}


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    points = {"p50": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99)}
    points["mean"] = sum(seconds) / len(seconds) if seconds else None
    return {name: None if value is None else round(value * 1000, 3) for name, value in points.items()}


def summarize_parts(
    samples: Sequence[RequestSample], wall: float, limits: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Return the measurements of ``PARTS`` parts of one load, whose spread shows the noise (the method of batch means).

    Each part has the times of equally many requests, in the order of sending, and the rates of an equal share of the
    ``wall`` seconds. Return [] if there are too few requests.
    """
    successes = sorted((sample for sample in samples if not sample.error), key=lambda sample: sample.start)
    if len(successes) < PARTS * 2 or wall <= 0:
        return []
    begin, seconds = successes[0].start, wall / PARTS
    cuts = [len(successes) * part // PARTS for part in range(PARTS + 1)]
    tokens = token_rates(successes, begin, wall, PARTS)
    parts: list[dict[str, Any]] = []
    slices: list[list[RequestSample]] = [[] for _ in range(PARTS)]
    for sample in successes:
        slices[_slice_number(sample.end - begin, wall, PARTS)].append(sample)
    for part, slice_samples in enumerate(slices):
        times = collect_times(successes[cuts[part] : cuts[part + 1]])
        rates = {
            "output_tokens_per_second": round(tokens[part], 2),
            "requests_per_second": round(len(slice_samples) / seconds, 3),
        }
        if limits:
            rates["goodput"] = round(count_within(slice_samples, limits) / seconds, 3)
        parts.append({name: _percentiles_ms(values) for name, values in times.items()} | rates)
    return parts


def token_rates(successes: Sequence[RequestSample], begin: float, wall: float, count: int) -> list[float]:
    """Return the tokens per second in each of ``count`` equal slices of the ``wall`` seconds after ``begin``.

    A request's tokens are taken as spread equally over its events with output.
    """
    tokens = [0.0] * count
    for sample in successes:
        for arrival in sample.arrivals:
            tokens[_slice_number(arrival - begin, wall, count)] += sample.tokens / len(sample.arrivals)
    return [slice_tokens * count / wall for slice_tokens in tokens]


def _slice_number(seconds: float, wall: float, count: int) -> int:
    return min(count - 1, max(0, int(seconds * count / wall)))
