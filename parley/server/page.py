"""The page of metrics: the same facts under the names of each server whose dashboards people have, and its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from parley.server import names_mindie, names_tgi, names_vllm
from parley.server.metrics import View
from parley.server.names_triton import TRITON
from parley.server.series import Count, labels, scalar

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

ALONE = {"mindie-metrics": names_mindie.told}  # APIs that have a page of their own, by name
OWN: tuple[tuple[str, str, str, Callable[[View], float]], ...] = (
    ("counter", "engine_steps_total", "Steps of the engine.", lambda view: view.stats.steps),
    ("gauge", "ready", "1 while requests are taken.", lambda view: view.ready),
    ("gauge", "start_progress", "How far loading has come, 0 to 1.", lambda view: view.progress),
    ("gauge", "requests_open", "Requests being served.", lambda view: view.open),
)


def text(views: Sequence[View], answers: Mapping[str, Count], api: str = "") -> str:
    """The page, in Prometheus' text format. ``views``: of each model, the main one first, of which alone TGI's series
    speak; ``answers``: over each protocol, by status; ``api``: whose page is asked for."""
    if api in ALONE:
        return ALONE[api](views)
    return names_vllm.told(views) + names_tgi.told(views[0]) + _triton(views) + _answers(answers) + _own(views)


def _triton(views: Sequence[View]) -> str:
    each = [(labels({"model": view.model, "version": "1"}), view) for view in views]
    return "".join(
        scalar(kind, name, help, [(common, values(view.metrics.totals, view.stats)) for common, view in each])
        for kind, name, help, values in TRITON
    )


def _answers(answers: Mapping[str, Count]) -> str:
    return "".join(
        scalar("counter", f"parley:{protocol}_responses_total", "Answers by status.", [("", _by_status(count))])
        for protocol, count in answers.items()
    )


def _by_status(count: Count) -> Iterable[tuple[str, float]]:
    return [(labels({"status": status}), number) for status, number in count.counts.items()]


def _own(views: Sequence[View]) -> str:
    each = [(labels({"model_name": view.model}), view) for view in views]
    return "".join(
        scalar(kind, f"parley:{name}", help, [(common, [("", read(view))]) for common, view in each])
        for kind, name, help, read in OWN
    )
