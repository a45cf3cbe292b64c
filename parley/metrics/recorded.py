"""The metrics of a model, recorded in one place. They have no names here: each dialect's ``metrics`` module writes them
under the names of the server it is compatible with, so that existing dashboards work.
"""

from __future__ import annotations

from dataclasses import dataclass

from parley.metrics.series import Count, Distribution, Rate, Recent
from parley.metrics.totals import Totals
from parley.types import ModelInfo, Stats

# Bounds of vLLM's histograms, and of all TGI histograms that measure time. Seconds.
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
               640, 2560)  # fmt: skip
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TGI = tuple(float(f"{0.0001 * 1.5**k:.6g}") for k in range(1, 36))
# Bounds of histograms of counts.
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, *CHOICES)
RECENT, SECONDS = 1000, 10
# Bounds of MindIE's histograms.
SOON = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
WHOLE = (1, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
LENGTHS = (10, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 16_000, 20_000, 32_000, 50_000, 64_000, 128_000)
STEP = (1, *(2**k for k in range(3, 15)))


class Metrics:
    """All metrics of one model since its start. The engine's own counters are in its ``EngineStats``."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.finished = Count("stop", "length", "abort", "error", "repetition")  # finished choices, by reason
        self.rejected = Count("queue_full")  # valid requests refused for lack of capacity, by reason
        self.refused = Count("")  # invalid requests
        self.cached = Count("")  # prompt tokens found in the prefix cache
        self.moved = Count("")  # prompt tokens counted by other instances whose pages were received or cached here
        self.repeated = Count("")  # prompt tokens counted by other instances that were recomputed here
        # per request, in seconds
        self.first_token = Distribution(vllm=FIRST_TOKEN, mindie=SOON)  # TTFT: from its arrival
        self.between_tokens = Distribution(vllm=PER_TOKEN, mindie=GAP)  # of a choice
        self.per_token = Distribution(vllm=PER_TOKEN, tgi=TGI)  # TPOT: mean after the first token
        self.whole = Distribution(vllm=LATENCY, tgi=TGI, mindie=WHOLE)  # from its arrival to its last token
        self.prepared = Distribution(tgi=TGI)  # reading, rendering, tokenising
        self.waited = Distribution(tgi=TGI)  # in the engine's queue
        self.queued = Distribution(vllm=LATENCY)  # from its arrival to its first step
        self.prefill = Distribution(vllm=LATENCY)  # from its first step to its first token
        self.decode = Distribution(vllm=LATENCY)  # from its first token to its last
        self.inference = Distribution(vllm=LATENCY, tgi=TGI)  # from its first step to its last token
        self.first_tokens, self.gaps = Recent(maxlen=RECENT), Recent(maxlen=RECENT)  # like first_token, between_tokens
        # per request, counts
        self.choices = Distribution(vllm=CHOICES)
        self.prompt_length = Distribution()
        self.computed_length = Distribution()  # prompt tokens that were not found in the prefix cache
        self.output_length = Distribution()  # sum over all choices
        self.longest_output = Distribution()  # of the longest choice
        self.max_tokens = Distribution()
        self.skipped = Distribution()  # output tokens that arrived together with the previous one
        self.preempted = Distribution(vllm=PREEMPTIONS)  # preemptions of its choices
        # per step of the engine
        self.step_tokens = Distribution(vllm=STEP)
        self.step_rows = Distribution(tgi=tuple(2**k for k in range(11)))
        self.prefill_seconds = Distribution(tgi=TGI)  # of steps with prompt tokens
        self.decode_seconds = Distribution(tgi=TGI)  # of all other steps
        # tokens of all steps
        self.prompt_rate, self.output_rate = Rate(SECONDS), Rate(SECONDS)
        self._generated = 0
        self.fit(0)

    def fit(self, context: int) -> None:
        """Set bounds of the length histograms that suit a model's context, in tokens. Call before any request."""
        powers = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
        lengths = [bound for bound in powers if bound <= context]
        self.prompt_length.scale(vllm=lengths, tgi=_steps(context - 1), mindie=LENGTHS)
        self.output_length.scale(vllm=lengths, tgi=_steps(context), mindie=LENGTHS)
        self.max_tokens.scale(vllm=lengths, tgi=_steps(context))
        self.skipped.scale(tgi=_steps(context))
        self.longest_output.scale(vllm=lengths)
        self.computed_length.scale(vllm=lengths)

    def step(self, stats: Stats) -> None:
        """Record the engine's counters after a step. Does nothing if the step had no tokens."""
        if not stats.step_tokens:
            return
        self.step_tokens.observe(stats.step_tokens)
        self.step_rows.observe(stats.step_rows)
        self.prompt_rate.add(stats.step_prompt)
        self.output_rate.add(max(0, stats.generated_tokens - self._generated))
        self._generated = stats.generated_tokens
        (self.prefill_seconds if stats.step_prompt else self.decode_seconds).observe(stats.step_seconds)


def _steps(top: int) -> list[float]:
    """Return a hundred equal steps up to ``top``."""
    return [float(f"{top * k / 100:.6g}") for k in range(1, 101)] if top > 0 else []


@dataclass(frozen=True, slots=True)
class View:
    """The state of a model at the time of a scrape.

    ``info`` is None before the model is loaded. ``active_adapters``: adapters of open requests, each with whether a
    request still waits for its first token; ``adapter_places``: adapters that fit in memory, 0 without adapters.
    """

    model: str
    metrics: Metrics
    stats: Stats
    info: ModelInfo | None
    prefix_cache: bool
    ready: bool
    progress: float
    open: int
    adapters: frozenset[tuple[str, bool]] = frozenset()
    places: int = 0
