"""Counts and durations of requests, by path, status, API and key.

``http_requests_total`` and the two histograms have the names of prometheus-fastapi-instrumentator, which vLLM exports.
A path is a route's template, so that clients cannot make the number of series grow. Of keys, which an operator may
replace for years, the first ones have series of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from parley.metrics.key_names import KeyNames
from parley.metrics.series import BucketHistogram, HistogramDelta, format_labels, metric_header, scalar_lines

UNKNOWN_PATH = "none"
OTHER_METHOD = "OTHER"
METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))
CLIENT_LEFT = 499  # the status of a request whose client left before the answer
SCALE = "seconds"  # name of the scale of histograms
COARSE_BOUNDS = (0.1, 0.5, 1)
FINE_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)


class HttpRequestDelta(NamedTuple):
    """The requests of one process since the last delta: counts by path, method and status, and by API, key and status;
    seconds by path and method, and of all requests."""

    by_path: list[tuple[str, str, int, int]]
    by_client: list[tuple[str, str, int, int]]
    seconds: list[tuple[str, str, HistogramDelta]]
    all_seconds: HistogramDelta


class HttpRequestMetrics:
    """The requests that a server has answered since its start, without health probes and scrapes."""

    def __init__(self) -> None:
        self._by_path: Counter[tuple[str, str, int]] = Counter()  # by path, method and status
        self._by_client: Counter[tuple[str, str, int]] = Counter()  # by API, key and status
        self._key_names = KeyNames()
        self._seconds: dict[tuple[str, str], BucketHistogram] = {}  # by path and method
        self._all_seconds = BucketHistogram(**{SCALE: FINE_BOUNDS})

    def record_request(self, path: str, method: str, status: int, seconds: float, api: str, key: str) -> None:
        """Record an answered request.

        ``path``: the route's template, "" if the URL is unknown. ``status``: 0 if the client left before the answer.
        ``key``: the name of its API key, "" without one.
        """
        path, status = path or UNKNOWN_PATH, status or CLIENT_LEFT
        method = method if method in METHODS else OTHER_METHOD
        self._by_path[path, method, status] += 1
        self._by_client[api, self._key_names.series_name(key), status] += 1
        self._histogram_of(path, method).observe(seconds)
        self._all_seconds.observe(seconds)

    def take_delta(self) -> HttpRequestDelta:
        """Return the counts since the last call, for another process to add, and reset them."""
        delta = HttpRequestDelta(
            [(*place, count) for place, count in self._by_path.items()],
            [(*client, count) for client, count in self._by_client.items()],
            [(*place, histogram.take_delta()) for place, histogram in self._seconds.items()],
            self._all_seconds.take_delta(),
        )
        self._by_path.clear()
        self._by_client.clear()
        return delta

    def add_delta(self, delta: HttpRequestDelta) -> None:
        """Add the counts of another process."""
        for path, method, status, count in delta.by_path:
            self._by_path[path, method, status] += count
        for api, key, status, count in delta.by_client:
            self._by_client[api, self._key_names.series_name(key), status] += count
        for path, method, seconds in delta.seconds:
            self._histogram_of(path, method).add_delta(seconds)
        self._all_seconds.add_delta(delta.all_seconds)

    def _histogram_of(self, path: str, method: str) -> BucketHistogram:
        histogram = self._seconds.get((path, method))
        if histogram is None:
            histogram = self._seconds[path, method] = BucketHistogram(**{SCALE: COARSE_BOUNDS})
        return histogram

    def render_lines(self) -> str:
        """Return all series in Prometheus' text format."""
        by_class: Counter[tuple[str, str, str]] = Counter()
        for (path, method, status), count in self._by_path.items():
            by_class[path, method, f"{status // 100}xx"] += count
        paths = [
            (format_labels({"handler": path, "method": method, "status": status}), count)
            for (path, method, status), count in by_class.items()
        ]
        clients = [
            (format_labels({"api": api, "key": key, "status": str(status)}), count)
            for (api, key, status), count in self._by_client.items()
        ]
        return (
            scalar_lines("counter", "http_requests_total", "Requests by path, method and status.", [("", paths)])
            + "".join(self._histogram_lines())
            + scalar_lines("counter", "parley:requests_total", "Requests by API, key and status.", [("", clients)])
        )

    def _histogram_lines(self) -> Iterator[str]:
        name = "http_request_duration_seconds"
        yield metric_header("histogram", name, "Seconds from a request's arrival to the end of its answer, by path.")
        for (path, method), histogram in self._seconds.items():
            yield from histogram.histogram_lines(name, format_labels({"handler": path, "method": method}), SCALE)
        name = "http_request_duration_highr_seconds"
        yield metric_header("histogram", name, "Seconds from a request's arrival to the end of its answer.")
        yield from self._all_seconds.histogram_lines(name, "", SCALE)
