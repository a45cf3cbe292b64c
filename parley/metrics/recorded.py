"""The metrics of a model, recorded in one place. They have no names here: each dialect's ``metrics`` module writes them
under the names of the server it is compatible with, so that existing dashboards work.
"""

from __future__ import annotations

from dataclasses import dataclass

from parley.metrics.series import BucketHistogram, LabelledCounter, RateMeter, RecentValues
from parley.metrics.totals import RequestTotals
from parley.types import EngineStats, ModelInfo

# Bounds of vLLM's histograms, and of all TGI histograms that measure time. Seconds.
LATENCY_BOUNDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
               640, 2560)  # fmt: skip
TPOT_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TGI_BOUNDS = tuple(float(f"{0.0001 * 1.5**k:.6g}") for k in range(1, 36))
# Bounds of histograms of counts.
CHOICE_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (0, *CHOICE_BOUNDS)
RECENT_COUNT, RATE_SECONDS = 1000, 10
# Bounds of MindIE's histograms.
MINDIE_TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
MINDIE_GAP_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
MINDIE_LATENCY_BOUNDS = (1, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
MINDIE_LENGTH_BOUNDS = (
    10,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    16_000,
    20_000,
    32_000,
    50_000,
    64_000,
    128_000,
)
STEP_TOKEN_BOUNDS = (1, *(2**k for k in range(3, 15)))


class ModelMetrics:
    """All metrics of one model since its start. The engine's own counters are in its ``EngineStats``."""

    def __init__(self) -> None:
        self.totals = RequestTotals()
        self.finished_choices = LabelledCounter(
            "stop", "length", "abort", "error", "repetition"
        )  # finished choices, by reason
        self.rejected_requests = LabelledCounter("queue_full")  # valid requests refused for lack of capacity, by reason
        self.invalid_requests = LabelledCounter("")  # invalid requests
        self.cached_tokens = LabelledCounter("")  # prompt tokens found in the prefix cache
        self.external_tokens = LabelledCounter(
            ""
        )  # prompt tokens counted by other instances whose pages were received or cached here
        self.recomputed_tokens = LabelledCounter(
            ""
        )  # prompt tokens counted by other instances that were recomputed here
        # per request, in seconds
        self.time_to_first_token = BucketHistogram(
            vllm=TTFT_BOUNDS, mindie=MINDIE_TTFT_BOUNDS
        )  # TTFT: from its arrival
        self.inter_token_seconds = BucketHistogram(vllm=TPOT_BOUNDS, mindie=MINDIE_GAP_BOUNDS)  # of a choice
        self.time_per_output_token = BucketHistogram(
            vllm=TPOT_BOUNDS, tgi=TGI_BOUNDS
        )  # TPOT: mean after the first token
        self.request_seconds = BucketHistogram(
            vllm=LATENCY_BOUNDS, tgi=TGI_BOUNDS, mindie=MINDIE_LATENCY_BOUNDS
        )  # from its arrival to its last token
        self.prepare_seconds = BucketHistogram(tgi=TGI_BOUNDS)  # reading, rendering, tokenising
        self.engine_queue_seconds = BucketHistogram(tgi=TGI_BOUNDS)  # in the engine's queue
        self.queue_seconds = BucketHistogram(vllm=LATENCY_BOUNDS)  # from its arrival to its first step
        self.request_prefill_seconds = BucketHistogram(vllm=LATENCY_BOUNDS)  # from its first step to its first token
        self.request_decode_seconds = BucketHistogram(vllm=LATENCY_BOUNDS)  # from its first token to its last
        self.inference_seconds = BucketHistogram(
            vllm=LATENCY_BOUNDS, tgi=TGI_BOUNDS
        )  # from its first step to its last token
        self.recent_ttft, self.recent_gaps = (
            RecentValues(maxlen=RECENT_COUNT),
            RecentValues(maxlen=RECENT_COUNT),
        )  # like first_token, between_tokens
        # per request, counts
        self.choice_counts = BucketHistogram(vllm=CHOICE_BOUNDS)
        self.prompt_length = BucketHistogram()
        self.computed_length = BucketHistogram()  # prompt tokens that were not found in the prefix cache
        self.output_length = BucketHistogram()  # sum over all choices
        self.longest_output = BucketHistogram()  # of the longest choice
        self.max_tokens = BucketHistogram()
        self.bundled_tokens = BucketHistogram()  # output tokens that arrived together with the previous one
        self.preemption_counts = BucketHistogram(vllm=PREEMPTION_BOUNDS)  # preemptions of its choices
        # per step of the engine
        self.step_tokens = BucketHistogram(vllm=STEP_TOKEN_BOUNDS)
        self.step_rows = BucketHistogram(tgi=tuple(2**k for k in range(11)))
        self.prefill_step_seconds = BucketHistogram(tgi=TGI_BOUNDS)  # of steps with prompt tokens
        self.decode_step_seconds = BucketHistogram(tgi=TGI_BOUNDS)  # of all other steps
        # tokens of all steps
        self.prompt_rate, self.output_rate = RateMeter(RATE_SECONDS), RateMeter(RATE_SECONDS)
        self._generated_tokens = 0
        self.fit_bounds(0)

    def fit_bounds(self, context: int) -> None:
        """Set bounds of the length histograms that suit a model's context, in tokens. Call before any request."""
        powers = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
        lengths = [bound for bound in powers if bound <= context]
        self.prompt_length.set_scales(vllm=lengths, tgi=_hundred_steps(context - 1), mindie=MINDIE_LENGTH_BOUNDS)
        self.output_length.set_scales(vllm=lengths, tgi=_hundred_steps(context), mindie=MINDIE_LENGTH_BOUNDS)
        self.max_tokens.set_scales(vllm=lengths, tgi=_hundred_steps(context))
        self.bundled_tokens.set_scales(tgi=_hundred_steps(context))
        self.longest_output.set_scales(vllm=lengths)
        self.computed_length.set_scales(vllm=lengths)

    def record_step(self, stats: EngineStats) -> None:
        """Record the engine's counters after a step. Does nothing if the step had no tokens."""
        if not stats.step_tokens:
            return
        self.step_tokens.observe(stats.step_tokens)
        self.step_rows.observe(stats.step_rows)
        self.prompt_rate.add_amount(stats.step_prompt_tokens)
        self.output_rate.add_amount(max(0, stats.generated_tokens - self._generated_tokens))
        self._generated_tokens = stats.generated_tokens
        (self.prefill_step_seconds if stats.step_prompt_tokens else self.decode_step_seconds).observe(
            stats.step_seconds
        )


def _hundred_steps(top: int) -> list[float]:
    """Return a hundred equal steps up to ``top``."""
    return [float(f"{top * k / 100:.6g}") for k in range(1, 101)] if top > 0 else []


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """The state of a model at the time of a scrape.

    ``info`` is None before the model is loaded. ``active_adapters``: adapters of open requests, each with whether a
    request still waits for its first token; ``adapter_places``: adapters that fit in memory, 0 without adapters.
    """

    model: str
    metrics: ModelMetrics
    stats: EngineStats
    info: ModelInfo | None
    prefix_cache: bool
    ready: bool
    progress: float
    open_requests: int
    active_adapters: frozenset[tuple[str, bool]] = frozenset()
    adapter_places: int = 0
