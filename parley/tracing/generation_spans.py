"""The spans of a generation: the request to the model, and below it the phases in the engine.

Attribute names are those of OpenTelemetry's conventions for generative AI, and those of vLLM where it has others:
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from parley.tracing.encode_spans import Attributes, encode_attributes
from parley.tracing.request_trace import RequestTrace
from parley.tracing.trace_context import TraceContext
from parley.types import ChatPrompt, PrefillChunk, Request, SamplingOptions, Usage

PROVIDER = "parley"
DEFAULT_SAMPLING = SamplingOptions()


@dataclass(slots=True)
class GenerationTimes:
    """When the phases of a generation began and ended; 0: they did not. ``arrived`` may lie on another server.

    ``chunks``: the steps that computed its first prompt, if there were several.
    """

    arrived: float
    submitted: float
    ended: float
    first_step: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    chunks: Sequence[PrefillChunk] = field(default_factory=list)


class EndedGeneration(NamedTuple):
    """The values that the spans of a generation report. ``sampling``: None if it generated no text; ``resumed``:
    another server prefilled the prompts; ``error``: why it failed, "" if it did not."""

    operation: str
    request_id: str
    model: str
    stream: bool
    n: int
    max_tokens: int | None
    sampling: SamplingOptions | None
    usage: Usage
    times: GenerationTimes
    output_tokens: int
    finish_reasons: tuple[str, ...]
    preemptions: int
    resumed: bool
    error: str


def encode_generation_spans(trace: RequestTrace, ended: EndedGeneration) -> bytes:
    """Encode the spans of a generation that has ended."""
    times = ended.times
    encode, context = trace.encode_span, trace.new_context()
    name = f"{ended.operation} {ended.model}"
    common = _encode_request_attributes(
        ended.operation, ended.model, ended.stream, ended.n, ended.max_tokens, ended.finish_reasons,
        *_sampling_values(ended.sampling),
    )  # fmt: skip
    spans = [
        encode(
            name,
            trace.started_at,
            times.ended,
            _generation_attributes(ended),
            context=context,
            error=ended.error,
            encoded_attributes=common,
        ),
        encode("prepare", trace.started_at, times.submitted, parent=context),
    ]
    if not ended.resumed:
        spans.append(encode("queue", times.submitted, times.first_step or times.ended, parent=context))
    if times.first_token and not ended.resumed:
        spans += _encode_prefill_spans(trace, ended, context)
    if times.last_token > times.first_token > 0:
        decoded: Attributes = {
            "gen_ai.usage.output_tokens": ended.output_tokens,
            "parley.preemptions": ended.preemptions,
        }
        spans.append(encode("decode", times.first_token, times.last_token, decoded, parent=context))
    return b"".join(spans)


def _generation_attributes(ended: EndedGeneration) -> Attributes:
    """Return the attributes of the span of a whole generation that differ between requests."""
    times = ended.times
    attributes: Attributes = {
        "gen_ai.request.id": ended.request_id,
        "gen_ai.response.id": ended.request_id,
        **_usage_attributes(ended.usage, ended.output_tokens),
        **_latency_attributes(times, ended.resumed),
    }
    if ended.sampling is not None and ended.sampling.seed is not None:
        attributes["gen_ai.request.seed"] = ended.sampling.seed
    if ended.stream and times.first_token and not ended.resumed:
        attributes["gen_ai.response.time_to_first_chunk"] = times.first_token - times.arrived
    if ended.error:
        attributes["error.type"] = ended.error
    return attributes


def _encode_prefill_spans(trace: RequestTrace, ended: EndedGeneration, parent: TraceContext) -> Iterator[bytes]:
    """Encode the span of the prefill, and one for each of its chunks."""
    times, prefill = ended.times, trace.new_context()
    tokens: Attributes = {
        "parley.prompt.tokens": ended.usage.prompt_tokens,
        "parley.prompt.cached_tokens": ended.usage.cached_tokens,
    }
    yield trace.encode_span("prefill", times.first_step, times.first_token, tokens, context=prefill, parent=parent)
    for chunk in times.chunks:
        start = times.submitted + chunk.start_seconds
        chunk_tokens: Attributes = {"parley.chunk.tokens": chunk.tokens}
        yield trace.encode_span("prefill chunk", start, start + chunk.seconds, chunk_tokens, parent=prefill)


def operation_name(request: Request) -> str:
    """Return the name of a request's operation in OpenTelemetry's conventions for generative AI."""
    if request.pooling is not None:
        return "embeddings"
    return "chat" if isinstance(request.prompts[0], ChatPrompt) else "text_completion"


def _sampling_values(sampling: SamplingOptions | None) -> tuple[float, ...]:
    """Return temperature, top_p, top_k and the penalties of frequency and presence; nothing without sampling."""
    if sampling is None:
        return ()
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )


@lru_cache(256, typed=True)  # the requests of an application mostly differ in their texts alone
def _encode_request_attributes(
    operation: str,
    model: str,
    stream: bool,
    n: int,
    max_tokens: int | None,
    finish_reasons: tuple[str, ...],
    temperature: float | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> bytes:
    """Encode the attributes that many requests have in common: names and numbers, no text of users."""
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.stream": stream,
        "gen_ai.request.n": n,
    }
    if n != 1:
        attributes["gen_ai.request.choice.count"] = n
    if max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = max_tokens
    if temperature is not None:
        attributes["gen_ai.request.temperature"] = temperature
        attributes["gen_ai.request.top_p"] = top_p
        if top_k:
            attributes["gen_ai.request.top_k"] = top_k
        if frequency_penalty:
            attributes["gen_ai.request.frequency_penalty"] = frequency_penalty
        if presence_penalty:
            attributes["gen_ai.request.presence_penalty"] = presence_penalty
    if finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = finish_reasons
    return encode_attributes(attributes)


def _usage_attributes(usage: Usage, output_tokens: int) -> Attributes:
    attributes: Attributes = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
        "gen_ai.usage.completion_tokens": output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
    if usage.reasoning_tokens:
        attributes["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
    return attributes


def _latency_attributes(times: GenerationTimes, resumed: bool) -> Attributes:
    """Return vLLM's attributes of durations, in seconds."""
    attributes: Attributes = {"gen_ai.latency.e2e": times.ended - times.arrived}
    if not resumed and times.first_step:
        attributes["gen_ai.latency.time_in_queue"] = times.first_step - times.submitted
        attributes["gen_ai.latency.time_in_model_inference"] = times.ended - times.first_step
    if not resumed and times.first_token:
        attributes["gen_ai.latency.time_to_first_token"] = times.first_token - times.arrived
        attributes["gen_ai.latency.time_in_model_prefill"] = times.first_token - times.first_step
    if times.last_token > times.first_token > 0:
        attributes["gen_ai.latency.time_in_model_decode"] = times.last_token - times.first_token
    return attributes
