"""The server's counts under the metric names of Text Generation Inference. Knows no other names.

A batch of TGI's router corresponds to a step of the engine here; steps with prefill are counted as ``prefill``. Metrics
without a counterpart on this server (filtering and joining batches, decoding apart from the step) are left out rather
than reported as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from parley.metrics.recorded import Metrics, View
from parley.metrics.series import Distribution, header, scalar

Values = Callable[[View], Iterable[tuple[str, float]]]  # pairs of labels and value


def _one(read: Callable[[View], float]) -> Values:
    return lambda view: [("", read(view))]


def _asked(view: View) -> float:
    totals = view.metrics.totals
    ended = totals.succeeded + totals.failed + totals.cancelled + totals.rejected
    return ended + view.metrics.refused.total + view.open


def _failures(view: View) -> list[tuple[str, float]]:
    totals = view.metrics.totals
    counts = {
        "validation": view.metrics.refused.total,
        "overloaded": totals.rejected,
        "generation": totals.failed,
        "dropped": totals.cancelled,
    }
    return [(f'err="{reason}"', count) for reason, count in counts.items()]


def _tokens(blocks: int, view: View) -> float:
    return blocks * (view.info.block_size if view.info is not None else 0)


SCALARS: tuple[tuple[str, str, str, Values], ...] = (
    ("counter", "tgi_request_count", "Requests received.", _one(_asked)),
    ("counter", "tgi_request_success", "Requests answered.", _one(lambda v: v.metrics.totals.succeeded)),
    ("counter", "tgi_request_failure", "Requests not answered, by reason.", _failures),
    ("gauge", "tgi_queue_size", "Sequences waiting to run.", _one(lambda v: v.stats.waiting)),
    ("gauge", "tgi_batch_current_size", "Sequences in the running batch.", _one(lambda v: v.stats.running)),
    ("gauge", "tgi_batch_current_max_tokens", "Tokens of KV cache held by running sequences.",
     _one(lambda v: _tokens(v.stats.blocks_used, v))),
    ("gauge", "tgi_batch_total_tokens", "Tokens that fit in the KV cache.",
     _one(lambda v: _tokens(v.stats.blocks_total, v))),
)  # fmt: skip

HISTOGRAMS: tuple[tuple[str, str, Callable[[Metrics], Distribution]], ...] = (
    ("tgi_request_duration", "Seconds from a request's arrival to its end.", lambda m: m.whole),
    ("tgi_request_validation_duration", "Seconds to read, render and tokenize a request.", lambda m: m.prepared),
    ("tgi_request_queue_duration", "Seconds a request waits in the engine's queue.", lambda m: m.waited),
    ("tgi_request_inference_duration", "Seconds from a request's first step to its end.", lambda m: m.inference),
    ("tgi_request_mean_time_per_token_duration", "Mean seconds per token after the first.", lambda m: m.per_token),
    ("tgi_request_input_length", "Prompt tokens of a request.", lambda m: m.prompt_length),
    ("tgi_request_generated_tokens", "Output tokens of a request.", lambda m: m.output_length),
    ("tgi_request_max_new_tokens", "max_new_tokens of a request.", lambda m: m.max_tokens),
    ("tgi_request_skipped_tokens", "Output tokens of a request that needed no step of their own.", lambda m: m.skipped),
    ("tgi_batch_next_size", "Sequences in a step of the engine.", lambda m: m.step_rows),
)

BATCHES: tuple[tuple[str, str], ...] = (
    ("tgi_batch_inference_duration", "Seconds of a step of the engine."),
    ("tgi_batch_forward_duration", "Seconds of a step of the engine, including sampling."),
)
COUNTS: tuple[tuple[str, str], ...] = (
    ("tgi_batch_inference_count", "Steps of the engine."),
    ("tgi_batch_inference_success", "Steps of the engine that succeeded."),
)


def told(views: Sequence[View]) -> str:
    """Return the series of the main model as text; TGI's metrics have no label that could tell models apart."""
    view = views[0]
    parts = [scalar(kind, name, help, [("", values(view))]) for kind, name, help, values in SCALARS]
    for name, help, read in HISTOGRAMS:
        parts.append(header("histogram", name, help))
        parts += read(view.metrics).lines(name, "", "tgi")
    steps = {'method="prefill"': view.metrics.prefill_seconds, 'method="decode"': view.metrics.decode_seconds}
    for name, help in COUNTS:
        parts.append(scalar("counter", name, help, [("", [(label, each.total) for label, each in steps.items()])]))
    for name, help in BATCHES:
        parts.append(header("histogram", name, help))
        for label, each in steps.items():
            parts += each.lines(name, label, "tgi")
    return "".join(parts)
