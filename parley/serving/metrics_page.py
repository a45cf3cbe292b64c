"""The metrics page: the same facts under the metric names of each server whose dashboards exist, and under parley's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from parley.dialects.dialect import Dialect, Series
from parley.dialects.mounts import SURFACES
from parley.metrics.recorded import View
from parley.metrics.series import Count, labels, scalar

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

OWN: tuple[tuple[str, str, str, Callable[[View], float]], ...] = (
    ("counter", "engine_steps_total", "Engine steps.", lambda view: view.stats.steps),
    ("gauge", "ready", "1 while requests are accepted.", lambda view: view.ready),
    ("gauge", "start_progress", "Loading progress, 0 to 1.", lambda view: view.progress),
    ("gauge", "requests_open", "Requests being served.", lambda view: view.open),
)


def text(views: Sequence[View], answers: Mapping[str, Count], dialect: Dialect | None = None) -> str:
    """Render the page in the Prometheus text format.

    ``views``: one per model, the main model first. ``responses``: responses by status, for each protocol. ``dialect``:
    the API whose page is requested; it may have a page of its own.
    """
    if dialect is not None and dialect.page is not None:
        return dialect.page(views)
    return "".join(series(views) for series in _series()) + _answers(answers) + _own(views)


def _series() -> list[Series]:
    """Return the metrics writers of the APIs that are mounted at the root."""
    told = [surface.dialect.series for surface in SURFACES if not surface.prefix]
    return [each for each in told if each is not None]


def _answers(answers: Mapping[str, Count]) -> str:
    return "".join(
        scalar("counter", f"parley:{protocol}_responses_total", "Responses by status.", [("", _by_status(count))])
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
