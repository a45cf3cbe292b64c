"""The server's counts under the metric names of Text Embeddings Inference. Knows no other names.

Metrics without a counterpart on this server are left out rather than reported as 0. A request counts once, also if it
has a batch of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from parley.metrics.model_metrics import ModelMetrics, ModelSnapshot
from parley.metrics.series import BucketHistogram, metric_header, scalar_lines

SCALE = "tei"  # name of the scale of histograms
SECONDS_BOUNDS = tuple(float(f"{0.00001 * 1.5**k:.6g}") for k in range(1, 45))
STEP_ROW_BOUNDS = tuple(2**k for k in range(11))
LabelledValues = Callable[[ModelSnapshot], Iterable[tuple[str, float]]]  # pairs of labels and value


def _count_requests(view: ModelSnapshot) -> list[tuple[str, float]]:
    totals = view.metrics.totals
    ended_requests = totals.succeeded + totals.failed + totals.cancelled + totals.rejected
    return [("", ended_requests + view.metrics.invalid_requests.total_count + view.open_requests)]


def _count_failures(view: ModelSnapshot) -> list[tuple[str, float]]:
    totals = view.metrics.totals
    counts = {
        "validation": view.metrics.invalid_requests.total_count,
        "overloaded": totals.rejected,
        "inference": totals.failed,
    }
    return [(f'err="{reason}"', count) for reason, count in counts.items()]


TEI_SCALARS: tuple[tuple[str, str, str, LabelledValues], ...] = (
    ("counter", "te_request_count", "Requests received.", _count_requests),
    ("counter", "te_request_success", "Requests answered.", lambda view: [("", view.metrics.totals.succeeded)]),
    ("counter", "te_request_failure", "Requests not answered, by reason.", _count_failures),
    ("gauge", "te_queue_size", "Texts waiting to run.", lambda view: [("", view.stats.waiting)]),
)
TEI_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], BucketHistogram], Sequence[float] | None], ...] = (
    ("te_request_duration", "Seconds from arrival to end.", lambda metrics: metrics.request_seconds, SECONDS_BOUNDS),
    (
        "te_request_tokenization_duration",
        "Seconds to read and tokenize.",
        lambda metrics: metrics.prepare_seconds,
        SECONDS_BOUNDS,
    ),
    (
        "te_request_queue_duration",
        "Seconds in the queue.",
        lambda metrics: metrics.engine_queue_seconds,
        SECONDS_BOUNDS,
    ),
    (
        "te_request_inference_duration",
        "Seconds of inference.",
        lambda metrics: metrics.inference_seconds,
        SECONDS_BOUNDS,
    ),
    ("te_request_input_length", "Tokens of a text.", lambda metrics: metrics.prompt_length, None),
    ("te_batch_next_size", "Texts in a step of the engine.", lambda metrics: metrics.step_rows, STEP_ROW_BOUNDS),
)


def add_tei_buckets(metrics: ModelMetrics, context: int) -> None:
    """Add this API's buckets to the histograms of a model with a context of this length in tokens."""
    lengths = [float(f"{context * k / 100:.6g}") for k in range(1, 101)] if context else []
    for _, _, get_distribution, bounds in TEI_HISTOGRAMS:
        get_distribution(metrics).set_scale(SCALE, lengths if bounds is None else bounds)


def write_tei_metrics(views: Sequence[ModelSnapshot]) -> str:
    """Return the page of the main model; the original's metrics have no label for the model."""
    view = views[0]
    parts = [scalar_lines(kind, name, help_text, [("", values(view))]) for kind, name, help_text, values in TEI_SCALARS]
    for name, help_text, get_distribution, _ in TEI_HISTOGRAMS:
        parts.append(metric_header("histogram", name, help_text))
        parts += get_distribution(view.metrics).histogram_lines(name, "", SCALE)
    return "".join(parts)
