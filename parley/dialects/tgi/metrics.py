"""The server's facts under the names that Text Generation Inference gives them. Knows no other names.

Its router's batches are steps of the engine here: those in which prompts are read are its ``prefill``. What it measures
and this server does not do (filtering and joining batches, decoding apart from the step) is left out, not told as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from parley.metrics.recorded import Metrics, View
from parley.metrics.series import Distribution, header, scalar

Values = Callable[[View], Iterable[tuple[str, float]]]  # labels, and the value


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
    ("counter", "tgi_request_count", "Requests that came.", _one(_asked)),
    ("counter", "tgi_request_success", "Requests that were answered.", _one(lambda v: v.metrics.totals.succeeded)),
    ("counter", "tgi_request_failure", "Requests that were not, by reason.", _failures),
    ("gauge", "tgi_queue_size", "Sequences that wait for a place.", _one(lambda v: v.stats.waiting)),
    ("gauge", "tgi_batch_current_size", "Sequences in the running batch.", _one(lambda v: v.stats.running)),
    ("gauge", "tgi_batch_current_max_tokens", "Tokens for which running sequences hold room in the KV cache.",
     _one(lambda v: _tokens(v.stats.blocks_used, v))),
    ("gauge", "tgi_batch_total_tokens", "Tokens that the KV cache has room for.",
     _one(lambda v: _tokens(v.stats.blocks_total, v))),
)  # fmt: skip

HISTOGRAMS: tuple[tuple[str, str, Callable[[Metrics], Distribution]], ...] = (
    ("tgi_request_duration", "From a request's arrival to its end.", lambda m: m.whole),
    ("tgi_request_validation_duration", "Reading, rendering and tokenising.", lambda m: m.prepared),
    ("tgi_request_queue_duration", "In the engine's queue.", lambda m: m.waited),
    ("tgi_request_inference_duration", "From a request's first step to its end.", lambda m: m.inference),
    ("tgi_request_mean_time_per_token_duration", "Mean time per token after the first.", lambda m: m.per_token),
    ("tgi_request_input_length", "Prompt tokens of a request.", lambda m: m.prompt_length),
    ("tgi_request_generated_tokens", "Output tokens of a request.", lambda m: m.output_length),
    ("tgi_request_max_new_tokens", "max_new_tokens of a request.", lambda m: m.max_tokens),
    ("tgi_request_skipped_tokens", "Tokens of a request that came without a step of their own.", lambda m: m.skipped),
    ("tgi_batch_next_size", "Sequences of a step of the engine.", lambda m: m.step_rows),
)

BATCHES: tuple[tuple[str, str], ...] = (
    ("tgi_batch_inference_duration", "Seconds of a step of the engine."),
    ("tgi_batch_forward_duration", "Seconds of a step of the engine, drawing of tokens included."),
)
COUNTS: tuple[tuple[str, str], ...] = (
    ("tgi_batch_inference_count", "Steps of the engine."),
    ("tgi_batch_inference_success", "Steps of the engine that did not fail."),
)


def told(views: Sequence[View]) -> str:
    """These series as text, of the main model alone: they have no common labels that would tell models apart."""
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
