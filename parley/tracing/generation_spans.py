"""The spans of a generation: the request to the model, and below it the phases in the engine.

Attribute names are those of OpenTelemetry's conventions for generative AI, and those of vLLM where it has others:
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parley.tracing.encode_spans import Attributes
from parley.tracing.request_trace import RequestTrace
from parley.types import Chat, PrefillChunk, Request, Sampling, Usage

PROVIDER = "parley"
DEFAULT_SAMPLING = Sampling()


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
    sampling: Sampling | None
    usage: Usage
    times: GenerationTimes
    output_tokens: int
    finish_reasons: tuple[str, ...]
    preemptions: int
    resumed: bool
    error: str


def encode_generation_spans(trace: RequestTrace, ended: EndedGeneration) -> bytes:
    """Encode the spans of a generation that has ended."""
    times, resumed, usage = ended.times, ended.resumed, ended.usage
    attributes = {
        "gen_ai.operation.name": ended.operation,
        "gen_ai.provider.name": PROVIDER,
        **_request_attributes(ended),
        **_usage_attributes(usage, ended.output_tokens),
        **_latency_attributes(times, resumed),
    }
    if ended.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = ended.finish_reasons
    if ended.stream and times.first_token and not resumed:
        attributes["gen_ai.response.time_to_first_chunk"] = times.first_token - times.arrived
    if ended.error:
        attributes["error.type"] = ended.error
    encode, context = trace.encode_span, trace.new_context()
    name = f"{ended.operation} {ended.model}"
    spans = [
        encode(name, trace.started_at, times.ended, attributes, context=context, error=ended.error),
        encode("prepare", trace.started_at, times.submitted, parent=context),
    ]
    if not resumed:
        spans.append(encode("queue", times.submitted, times.first_step or times.ended, parent=context))
    if times.first_token and not resumed:
        prefill = trace.new_context()
        tokens: Attributes = {
            "parley.prompt.tokens": usage.prompt_tokens,
            "parley.prompt.cached_tokens": usage.cached_tokens,
        }
        spans.append(encode("prefill", times.first_step, times.first_token, tokens, context=prefill, parent=context))
        for chunk in times.chunks:
            start = times.submitted + chunk.start_seconds
            chunk_tokens: Attributes = {"parley.chunk.tokens": chunk.tokens}
            spans.append(encode("prefill chunk", start, start + chunk.seconds, chunk_tokens, parent=prefill))
    if times.last_token > times.first_token > 0:
        decoded: Attributes = {
            "gen_ai.usage.output_tokens": ended.output_tokens,
            "parley.preemptions": ended.preemptions,
        }
        spans.append(encode("decode", times.first_token, times.last_token, decoded, parent=context))
    return b"".join(spans)


def operation_name(request: Request) -> str:
    """Return the name of a request's operation in OpenTelemetry's conventions for generative AI."""
    if request.pooling is not None:
        return "embeddings"
    return "chat" if isinstance(request.prompts[0], Chat) else "text_completion"


def _request_attributes(ended: EndedGeneration) -> Attributes:
    """Return the attributes of a request: names and numbers, no text of users."""
    attributes: Attributes = {
        "gen_ai.request.model": ended.model,
        "gen_ai.response.model": ended.model,
        "gen_ai.request.id": ended.request_id,
        "gen_ai.response.id": ended.request_id,
        "gen_ai.request.stream": ended.stream,
        "gen_ai.request.n": ended.n,
    }
    if ended.n != 1:
        attributes["gen_ai.request.choice.count"] = ended.n
    if ended.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = ended.max_tokens
    sampling = ended.sampling
    if sampling is not None:
        attributes["gen_ai.request.temperature"] = sampling.temperature
        attributes["gen_ai.request.top_p"] = sampling.top_p
        if sampling.top_k:
            attributes["gen_ai.request.top_k"] = sampling.top_k
        if sampling.seed is not None:
            attributes["gen_ai.request.seed"] = sampling.seed
        if sampling.frequency_penalty:
            attributes["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
        if sampling.presence_penalty:
            attributes["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    return attributes


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
