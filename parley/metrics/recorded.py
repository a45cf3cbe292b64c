"""What the server counts of a model: one place where facts are recorded. They have no names here: each dialect's
``metrics`` gives them the names of its server, whose dashboards people have.
"""

from __future__ import annotations

from dataclasses import dataclass

from parley.metrics.series import Count, Distribution, Rate, Recent
from parley.metrics.totals import Totals
from parley.types import ModelInfo, Stats

# Bounds of vLLM's histograms, and of all of TGI's that measure time. Seconds.
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
               640, 2560)  # fmt: skip
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TGI = tuple(float(f"{0.0001 * 1.5**k:.6g}") for k in range(1, 36))
# Numbers of something.
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
    """All facts of one model since its start. What the engine counts itself is in its ``Stats``."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.finished = Count("stop", "length", "abort", "error", "repetition")  # choices that ended, by reason
        self.rejected = Count("queue_full")  # requests refused because there was no room, by reason
        self.refused = Count("")  # requests that were wrong
        self.cached = Count("")  # prompt tokens found in the prefix cache
        self.moved = Count("")  # of prompts that others have counted, those whose pages they brought, or that were here
        self.repeated = Count("")  # and those that were computed once more
        # seconds of a request
        self.first_token = Distribution(vllm=FIRST_TOKEN, mindie=SOON)  # from its arrival
        self.between_tokens = Distribution(vllm=PER_TOKEN, mindie=GAP)  # of a choice
        self.per_token = Distribution(vllm=PER_TOKEN, tgi=TGI)  # mean after the first
        self.whole = Distribution(vllm=LATENCY, tgi=TGI, mindie=WHOLE)  # from its arrival to its last token
        self.prepared = Distribution(tgi=TGI)  # reading, rendering, tokenising
        self.waited = Distribution(tgi=TGI)  # in the engine's queue
        self.queued = Distribution(vllm=LATENCY)  # from its arrival to its first step
        self.prefill = Distribution(vllm=LATENCY)  # from its first step to its first token
        self.decode = Distribution(vllm=LATENCY)  # from its first token to its last
        self.inference = Distribution(vllm=LATENCY, tgi=TGI)  # from its first step to its last token
        self.first_tokens, self.gaps = Recent(maxlen=RECENT), Recent(maxlen=RECENT)  # as first_token and between_tokens
        # numbers of a request
        self.choices = Distribution(vllm=CHOICES)
        self.prompt_length = Distribution()
        self.computed_length = Distribution()  # of the prompt, what was not found in the cache
        self.output_length = Distribution()  # of all choices together
        self.longest_output = Distribution()  # of its longest choice
        self.max_tokens = Distribution()
        self.skipped = Distribution()  # output tokens that came together with the one before
        self.preempted = Distribution(vllm=PREEMPTIONS)  # how often its choices were
        # of a step of the engine
        self.step_tokens = Distribution(vllm=STEP)
        self.step_rows = Distribution(tgi=tuple(2**k for k in range(11)))
        self.prefill_seconds = Distribution(tgi=TGI)  # of steps in which prompts are read
        self.decode_seconds = Distribution(tgi=TGI)  # of all others
        # tokens of all steps
        self.prompt_rate, self.output_rate = Rate(SECONDS), Rate(SECONDS)
        self._generated = 0
        self.fit(0)

    def fit(self, context: int) -> None:
        """Give lengths the bounds that go with a model's context, in tokens; before there are any requests."""
        powers = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
        lengths = [bound for bound in powers if bound <= context]
        self.prompt_length.scale(vllm=lengths, tgi=_steps(context - 1), mindie=LENGTHS)
        self.output_length.scale(vllm=lengths, tgi=_steps(context), mindie=LENGTHS)
        self.max_tokens.scale(vllm=lengths, tgi=_steps(context))
        self.skipped.scale(tgi=_steps(context))
        self.longest_output.scale(vllm=lengths)
        self.computed_length.scale(vllm=lengths)

    def step(self, stats: Stats) -> None:
        """The engine tells of itself; a step was made if it had tokens."""
        if not stats.step_tokens:
            return
        self.step_tokens.observe(stats.step_tokens)
        self.step_rows.observe(stats.step_rows)
        self.prompt_rate.add(stats.step_prompt)
        self.output_rate.add(max(0, stats.generated_tokens - self._generated))
        self._generated = stats.generated_tokens
        (self.prefill_seconds if stats.step_prompt else self.decode_seconds).observe(stats.step_seconds)


def _steps(top: int) -> list[float]:
    """A hundred equal steps."""
    return [float(f"{top * k / 100:.6g}") for k in range(1, 101)] if top > 0 else []


@dataclass(frozen=True, slots=True)
class View:
    """What is told of a model when somebody asks. ``open``: requests being served; ``info`` is None before it is
    loaded. ``adapters``: those of open requests, and whether they wait for a first token; ``places``: so many adapters
    may be in memory, 0 where there are none."""

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
