"""The page of metrics: the same facts under the names of each server whose dashboards people have, and its own."""

from __future__ import annotations

from parley.server import names_mindie, names_tgi, names_vllm
from parley.server.metrics import View
from parley.server.names_triton import TRITON
from parley.server.series import labels, scalar

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


ALONE = {"mindie-metrics": names_mindie.told}  # APIs that have a page of their own, by name


def text(view: View, api: str = "") -> str:
    """The page, in Prometheus' text format."""
    if api in ALONE:
        return ALONE[api](view)
    return names_vllm.told(view) + names_tgi.told(view) + _triton(view) + _own(view)


def _triton(view: View) -> str:
    common = labels({"model": view.model, "version": "1"})
    return "".join(
        scalar(kind, name, help, common, values(view.metrics.totals, view.stats)) for kind, name, help, values in TRITON
    )


def _own(view: View) -> str:
    common = labels({"model_name": view.model})
    metrics = view.metrics
    responses = [(labels({"status": status}), count) for status, count in metrics.responses.counts.items()]
    calls = [(labels({"status": status}), count) for status, count in metrics.calls.counts.items()]
    return "".join(
        scalar(kind, f"parley:{name}", help, common, values)
        for kind, name, help, values in (
            ("counter", "http_responses_total", "Answers by HTTP status.", responses),
            ("counter", "grpc_responses_total", "Answers over gRPC by status.", calls),
            ("counter", "engine_steps_total", "Steps of the engine.", [("", view.stats.steps)]),
            ("gauge", "ready", "1 while requests are taken.", [("", view.ready)]),
            ("gauge", "start_progress", "How far loading has come, 0 to 1.", [("", view.progress)]),
            ("gauge", "requests_open", "Requests being served.", [("", view.open)]),
        )
    )
