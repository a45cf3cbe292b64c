"""The metrics page: the same facts under parley's metric names and under those of each server that has dashboards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from parley.dialects.dialect import Dialect, MetricsWriter
from parley.dialects.mounts import ADMIN_PLANES, API_MOUNTS
from parley.metrics.http_requests import HttpRequestMetrics
from parley.metrics.model_metrics import ModelMetrics, ModelSnapshot
from parley.metrics.process import process_lines
from parley.metrics.record_faults import record_fault_lines
from parley.metrics.series import LabelledCounter, format_labels, scalar_lines

METRICS_CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

PARLEY_SERIES: tuple[tuple[str, str, str, Callable[[ModelSnapshot], float]], ...] = (
    ("counter", "engine_steps_total", "Engine steps.", lambda view: view.stats.steps),
    ("counter", "media_encode_seconds_total", "Time spent on encoding media.", lambda view: view.stats.encode_seconds),
    (
        "counter",
        "engine_restarts_total",
        "Starts of an engine that had ended or hung.",
        lambda view: view.engine_restarts,
    ),
    ("gauge", "ready", "1 while requests are accepted.", lambda view: view.ready),
    ("gauge", "start_progress", "Loading progress, 0 to 1.", lambda view: view.progress),
    ("gauge", "requests_open", "Requests being served.", lambda view: view.open_requests),
)


def fit_buckets(metrics: ModelMetrics, context: int) -> None:
    """Give the histograms of a model the buckets of every API. ``context``: the model's context in tokens, 0 if
    unknown."""
    for dialect in (*(mount.dialect for mount in API_MOUNTS if not mount.prefix), *ADMIN_PLANES.values()):
        if dialect.add_buckets is not None:
            dialect.add_buckets(metrics, context)


def render_metrics_page(
    views: Sequence[ModelSnapshot],
    responses: Mapping[str, LabelledCounter],
    requests: HttpRequestMetrics,
    dialect: Dialect | None = None,
    record_faults: int = 0,
) -> str:
    """Render the page in the Prometheus text format.

    ``views``: one per model, the main model first. ``responses``: responses by status, for each protocol.
    ``requests``: those over HTTP. ``dialect``: the API whose page is requested; it may have a page of its own.
    ``record_faults``: how often the store of responses could not be used.
    """
    if dialect is not None and dialect.own_metrics is not None:
        return dialect.own_metrics(views)
    return (
        "".join(series(views) for series in _api_metrics_writers())
        + _response_counts(responses)
        + requests.render_lines()
        + _parley_metrics(views)
        + record_fault_lines(record_faults)
        + process_lines()
    )


def _api_metrics_writers() -> list[MetricsWriter]:
    """Return the metrics writers of the APIs that are mounted at the root."""
    writers = [mount.dialect.shared_metrics for mount in API_MOUNTS if not mount.prefix]
    return [writer for writer in writers if writer is not None]


def _response_counts(responses: Mapping[str, LabelledCounter]) -> str:
    return "".join(
        scalar_lines(
            "counter", f"parley:{protocol}_responses_total", "Responses by status.", [("", _counts_by_status(count))]
        )
        for protocol, count in responses.items()
    )


def _counts_by_status(count: LabelledCounter) -> Iterable[tuple[str, float]]:
    return [(format_labels({"status": status}), number) for status, number in count.by_label.items()]


def _parley_metrics(views: Sequence[ModelSnapshot]) -> str:
    labelled_views = [(format_labels({"model_name": view.model}), view) for view in views]
    return (
        "".join(
            scalar_lines(
                kind,
                f"parley:{name}",
                description,
                [(common, [("", read_value(view))]) for common, view in labelled_views],
            )
            for kind, name, description, read_value in PARLEY_SERIES
        )
        + scalar_lines(
            "gauge",
            "parley:engine_info",
            "What computes a model: format of its weights, device, and the level of the kernels.",
            [(common, _engine_facts(view)) for common, view in labelled_views],
        )
        + scalar_lines(
            "counter",
            "parley:media_items_total",
            "Media items in prompts, by kind.",
            [(common, _counts_by_kind(view)) for common, view in labelled_views],
        )
        + scalar_lines(
            "counter",
            "parley:tokens_total",
            "Tokens of requests that ended here, by API key and kind.",
            [(common, _tokens_by_key(view)) for common, view in labelled_views],
        )
    )


def _engine_facts(view: ModelSnapshot) -> Iterable[tuple[str, float]]:
    info = view.info
    if info is None:
        return []
    facts = {
        "engine": info.engine,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "device": info.device,
        "kernels": info.kernels,
    }
    return [(format_labels(facts), 1)]


def _tokens_by_key(view: ModelSnapshot) -> Iterable[tuple[str, float]]:
    counts = view.metrics.key_tokens.items()
    return [(format_labels({"key": key, "kind": kind}), count) for (key, kind), count in counts]


def _counts_by_kind(view: ModelSnapshot) -> Iterable[tuple[str, float]]:
    kinds = view.info.media_kinds if view.info is not None else frozenset()
    return [(format_labels({"kind": kind}), view.stats.media_items.get(kind, 0)) for kind in sorted(kinds)]
