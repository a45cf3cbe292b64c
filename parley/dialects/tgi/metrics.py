"""The server's counts under the metric names of Text Generation Inference. Knows no other names.

A batch of TGI's router corresponds to a step of the engine here; steps with prefill are counted as ``prefill``. Prompts
join the running sequences and finished ones leave within a step, and tokens are chosen in it; so the times that TGI
reports for filtering and joining batches, and for decoding apart from the step, are zero here: dashboards get the
number of steps, and 0 seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from parley.metrics.model_metrics import ModelMetrics, ModelSnapshot
from parley.metrics.series import BucketHistogram, metric_header, scalar_lines

SCALE = "tgi"  # name of the scale of histograms
LabelledValues = Callable[[ModelSnapshot], Iterable[tuple[str, float]]]  # pairs of labels and value


def _single_value(read_value: Callable[[ModelSnapshot], float]) -> LabelledValues:
    return lambda view: [("", read_value(view))]


def _count_requests(view: ModelSnapshot) -> float:
    totals = view.metrics.totals
    ended_requests = totals.succeeded + totals.failed + totals.cancelled + totals.rejected
    return ended_requests + view.metrics.invalid_requests.total_count + view.open_requests


def _count_failures(view: ModelSnapshot) -> list[tuple[str, float]]:
    totals = view.metrics.totals
    counts = {
        "validation": view.metrics.invalid_requests.total_count,
        "overloaded": totals.rejected,
        "generation": totals.failed,
        "dropped": totals.cancelled,
    }
    return [(f'err="{reason}"', count) for reason, count in counts.items()]


def _tokens_of_blocks(blocks: int, view: ModelSnapshot) -> float:
    return blocks * (view.info.page_tokens if view.info is not None else 0)


TGI_SCALARS: tuple[tuple[str, str, str, LabelledValues], ...] = (
    ("counter", "tgi_request_count", "Requests received.", _single_value(_count_requests)),
    ("counter", "tgi_request_success", "Requests answered.", _single_value(lambda view: view.metrics.totals.succeeded)),
    ("counter", "tgi_request_failure", "Requests not answered, by reason.", _count_failures),
    ("gauge", "tgi_queue_size", "Sequences waiting to run.", _single_value(lambda view: view.stats.waiting)),
    ("gauge", "tgi_batch_current_size", "Sequences in the running batch.",
     _single_value(lambda view: view.stats.running)),
    ("gauge", "tgi_batch_current_max_tokens", "Tokens of KV cache held by running sequences.",
     _single_value(lambda view: _tokens_of_blocks(view.stats.used_pages, view))),
    ("gauge", "tgi_batch_total_tokens", "Tokens that fit in the KV cache.",
     _single_value(lambda view: _tokens_of_blocks(view.stats.total_pages, view))),
)  # fmt: skip

SECONDS_BOUNDS = tuple(float(f"{0.0001 * 1.5**k:.6g}") for k in range(1, 36))
STEP_ROW_BOUNDS = tuple(2**k for k in range(11))

# name, description, histogram, and bucket bounds; None: a hundred lengths up to the model's context
TGI_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], BucketHistogram], Sequence[float] | None], ...] = (
    (
        "tgi_request_duration",
        "Seconds from a request's arrival to its end.",
        lambda metrics: metrics.request_seconds,
        SECONDS_BOUNDS,
    ),
    (
        "tgi_request_validation_duration",
        "Seconds to read, render and tokenize a request.",
        lambda metrics: metrics.prepare_seconds,
        SECONDS_BOUNDS,
    ),
    (
        "tgi_request_queue_duration",
        "Seconds a request waits in the engine's queue.",
        lambda metrics: metrics.engine_queue_seconds,
        SECONDS_BOUNDS,
    ),
    (
        "tgi_request_inference_duration",
        "Seconds from a request's first step to its end.",
        lambda metrics: metrics.inference_seconds,
        SECONDS_BOUNDS,
    ),
    (
        "tgi_request_mean_time_per_token_duration",
        "Mean seconds per token after the first.",
        lambda metrics: metrics.time_per_output_token,
        SECONDS_BOUNDS,
    ),
    ("tgi_request_input_length", "Prompt tokens of a request.", lambda metrics: metrics.prompt_length, None),
    ("tgi_request_generated_tokens", "Output tokens of a request.", lambda metrics: metrics.output_length, None),
    ("tgi_request_max_new_tokens", "max_new_tokens of a request.", lambda metrics: metrics.max_tokens, None),
    (
        "tgi_request_skipped_tokens",
        "Output tokens of a request that needed no step of their own.",
        lambda metrics: metrics.bundled_tokens,
        None,
    ),
    ("tgi_batch_next_size", "Sequences in a step of the engine.", lambda metrics: metrics.step_rows, STEP_ROW_BOUNDS),
)

STEP_HISTOGRAMS: tuple[tuple[str, str], ...] = (
    ("tgi_batch_inference_duration", "Seconds of a step of the engine."),
    ("tgi_batch_forward_duration", "Seconds of a step of the engine, including sampling."),
)
INSTANT_HISTOGRAMS: tuple[tuple[str, str], ...] = (
    ("tgi_batch_concat_duration", "Always 0 seconds: prompts join the running sequences within a step."),
    ("tgi_batch_decode_duration", "Always 0 seconds: tokens are chosen within a step."),
    ("tgi_batch_filter_duration", "Always 0 seconds: finished sequences leave within a step."),
)
STEP_COUNTERS: tuple[tuple[str, str], ...] = (
    ("tgi_batch_inference_count", "Steps of the engine."),
    ("tgi_batch_inference_success", "Steps of the engine that succeeded."),
)


def add_tgi_buckets(metrics: ModelMetrics, context: int) -> None:
    """Add this API's buckets to the histograms of a model with a context of this length in tokens."""
    for _, _, get_distribution, bounds in TGI_HISTOGRAMS:
        distribution = get_distribution(metrics)
        longest = context - 1 if distribution is metrics.prompt_length else context  # a token must fit after a prompt
        distribution.set_scale(SCALE, _hundred_steps(longest) if bounds is None else bounds)
    for seconds in (metrics.prefill_step_seconds, metrics.decode_step_seconds):
        seconds.set_scale(SCALE, SECONDS_BOUNDS)


def _hundred_steps(top: int) -> list[float]:
    """Return a hundred equal steps up to ``top``."""
    return [float(f"{top * k / 100:.6g}") for k in range(1, 101)] if top > 0 else []


def write_tgi_metrics(views: Sequence[ModelSnapshot]) -> str:
    """Return the series of the main model as text; TGI's metrics have no label for the model."""
    view = views[0]
    parts = [scalar_lines(kind, name, help_text, [("", values(view))]) for kind, name, help_text, values in TGI_SCALARS]
    for name, help_text, get_distribution, _ in TGI_HISTOGRAMS:
        parts.append(metric_header("histogram", name, help_text))
        parts += get_distribution(view.metrics).histogram_lines(name, "", SCALE)
    steps = {'method="prefill"': view.metrics.prefill_step_seconds, 'method="decode"': view.metrics.decode_step_seconds}
    for name, help_text in STEP_COUNTERS:
        parts.append(
            scalar_lines(
                "counter",
                name,
                help_text,
                [("", [(label, seconds.observed_count) for label, seconds in steps.items()])],
            )
        )
    joining = [("", [('reason="backpressure"', view.metrics.prefill_step_seconds.observed_count)])]
    parts.append(scalar_lines("counter", "tgi_batch_concat", "Steps in which prompts joined.", joining))
    for name, help_text in INSTANT_HISTOGRAMS:
        parts.append(metric_header("histogram", name, help_text))
        for label, seconds in steps.items():
            instants = BucketHistogram(**{SCALE: SECONDS_BOUNDS[:1]})
            instants.observe(0.0, seconds.observed_count)
            parts += instants.histogram_lines(name, label, SCALE)
    for name, help_text in STEP_HISTOGRAMS:
        parts.append(metric_header("histogram", name, help_text))
        for label, seconds in steps.items():
            parts += seconds.histogram_lines(name, label, SCALE)
    return "".join(parts)
