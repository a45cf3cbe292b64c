"""What the server counts, in Prometheus' text format. Names and buckets are those of vLLM, so that its dashboards work;
``names_triton`` tells the same facts under Triton's names.

Three kinds of series are all that is needed here, so they are written out rather than taken from a client library: a
counter or histogram costs an addition when it is fed, and text is only made when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from parley.dialects.dialect import Totals
from parley.server.names_triton import TRITON
from parley.types import Stats

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
               640, 2560)  # fmt: skip
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
CHOICES = (1, 2, 5, 10, 20)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def escape(value: str) -> str:
    """A label's value as the format wants it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def labels(pairs: dict[str, str]) -> str:
    return ",".join(f'{name}="{escape(value)}"' for name, value in pairs.items())


class Counter:
    """A number that only grows, one for each value of its label."""

    def __init__(self, name: str, help: str, label: str | None = None, values: Sequence[str] = ()):
        self.name, self.help, self._label = name, help, label
        self._counts: dict[str, float] = dict.fromkeys(values or ([] if label else [""]), 0.0)

    def add(self, amount: float = 1, value: str = "") -> None:
        self._counts[value] = self._counts.get(value, 0.0) + amount

    def lines(self, common: str) -> Iterator[str]:
        yield f"# HELP {self.name}_total {self.help}\n# TYPE {self.name}_total counter\n"
        for value, count in self._counts.items():
            own = f',{self._label}="{escape(value)}"' if self._label else ""
            yield f"{self.name}_total{{{common}{own}}} {count:.17g}\n"


class Histogram:
    """How often a number fell below each of some bounds."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]):
        self.name, self.help, self._bounds = name, help, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, number: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, number)] += times
        self._sum += number * times

    def lines(self, common: str) -> Iterator[str]:
        yield f"# HELP {self.name} {self.help}\n# TYPE {self.name} histogram\n"
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{{common},le="{bound}"}} {total}\n'
        yield f"{self.name}_sum{{{common}}} {self._sum:.17g}\n{self.name}_count{{{common}}} {total}\n"


class Metrics:
    """All series of one server. The engine's own numbers are read from its last ``Stats`` when text is made."""

    def __init__(self, model: str):
        self._model = model
        self.totals = Totals()
        self.finished = Counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            "finished_reason",
            ("stop", "length", "abort", "error"),
        )
        self.rejected = Counter("vllm:admission_rejections", "Requests refused before the engine saw them.", "reason")
        self.cached = Counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.responses = Counter("parley:http_responses", "Answers by HTTP status.", "status")
        self.calls = Counter("parley:grpc_responses", "Answers over gRPC by status.", "status")
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN
        )
        self.between_tokens = Histogram("vllm:inter_token_latency_seconds", "Between two tokens.", PER_TOKEN)
        self.per_token = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", PER_TOKEN
        )
        self.whole = Histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its last token.", LATENCY
        )
        self.queued = Histogram(
            "vllm:request_queue_time_seconds", "From a request's arrival to its first step.", LATENCY
        )
        self.prefill = Histogram(
            "vllm:request_prefill_time_seconds", "From the engine's being given a request to its first token.", LATENCY
        )
        self.decode = Histogram("vllm:request_decode_time_seconds", "From the first token to the last.", LATENCY)
        self.inference = Histogram(
            "vllm:request_inference_time_seconds", "From the engine's being given a request to its end.", LATENCY
        )
        self.prompt_length = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", LENGTHS)
        self.output_length = Histogram("vllm:request_generation_tokens", "Output tokens of a request.", LENGTHS)
        self.max_tokens = Histogram("vllm:request_params_max_tokens", "max_tokens of a request.", LENGTHS)
        self.choices = Histogram("vllm:request_params_n", "n of a request.", CHOICES)
        self._series = [series for series in vars(self).values() if isinstance(series, Counter | Histogram)]

    def text(self, stats: Stats, *, ready: bool, progress: float, open: int) -> str:
        """The page. ``open``: requests being served."""
        common = labels({"model_name": self._model, "engine": "0"})
        parts = [line for series in self._series for line in series.lines(common)]
        for kind, name, help, read in GAUGES:
            parts.append(f"# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{{{common}}} {read(stats):.17g}\n")
        triton = labels({"model": self._model, "version": "1"})
        for kind, name, help, series in TRITON:
            parts.append(f"# HELP {name} {help}\n# TYPE {name} {kind}\n")
            parts += [f"{name}{{{triton}{label}}} {value:.17g}\n" for label, value in series(self.totals, stats)]
        own = labels({"model_name": self._model})
        for name, help, value in (
            ("parley:ready", "1 while requests are taken.", float(ready)),
            ("parley:start_progress", "How far loading has come, 0 to 1.", progress),
            ("parley:requests_open", "Requests being served.", float(open)),
        ):
            parts.append(f"# HELP {name} {help}\n# TYPE {name} gauge\n{name}{{{own}}} {value:.17g}\n")
        return "".join(parts)


def _share(stats: Stats) -> float:
    return stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0


GAUGES: tuple[tuple[str, str, str, Callable[[Stats], float]], ...] = (
    ("gauge", "vllm:num_requests_running", "Sequences in the running batch.", lambda s: s.running),
    ("gauge", "vllm:num_requests_waiting", "Sequences that wait for a place.", lambda s: s.waiting),
    ("gauge", "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", _share),
    ("counter", "vllm:prompt_tokens_total", "Prompt tokens computed.", lambda s: s.prompt_tokens),
    ("counter", "vllm:generation_tokens_total", "Tokens generated.", lambda s: s.generated_tokens),
    ("counter", "vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("counter", "vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("counter", "vllm:num_preemptions_total", "Sequences preempted.", lambda s: s.preemptions),
    ("counter", "parley:engine_steps_total", "Steps of the engine.", lambda s: s.steps),
)
