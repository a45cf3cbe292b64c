"""The page of metrics: the same facts under the names of each server whose dashboards people have, and its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from parley.dialects.dialect import Dialect, Series
from parley.dialects.mounts import SURFACES
from parley.metrics.recorded import View
from parley.metrics.series import Count, labels, scalar

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

OWN: tuple[tuple[str, str, str, Callable[[View], float]], ...] = (
    ("counter", "engine_steps_total", "Steps of the engine.", lambda view: view.stats.steps),
    ("gauge", "ready", "1 while requests are taken.", lambda view: view.ready),
    ("gauge", "start_progress", "How far loading has come, 0 to 1.", lambda view: view.progress),
    ("gauge", "requests_open", "Requests being served.", lambda view: view.open),
)


def text(views: Sequence[View], answers: Mapping[str, Count], dialect: Dialect | None = None) -> str:
    """The page, in Prometheus' text format. ``views``: of each model, the main one first; ``answers``: over each
    protocol, by status; ``dialect``: the API whose page is asked for, which may have one of its own."""
    if dialect is not None and dialect.page is not None:
        return dialect.page(views)
    return "".join(series(views) for series in _series()) + _answers(answers) + _own(views)


def _series() -> list[Series]:
    """What writes the series of each API at the root."""
    told = [surface.dialect.series for surface in SURFACES if not surface.prefix]
    return [each for each in told if each is not None]


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
