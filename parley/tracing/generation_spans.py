"""The spans of a generation: the request to the model, and below it the phases in the engine.

Attribute names are those of OpenTelemetry's conventions for generative AI, and those of vLLM where it has others:
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parley.tracing.request_trace import Attributes, RequestTrace
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


def add_generation_spans(
    trace: RequestTrace,
    request: Request,
    usage: Usage,
    times: GenerationTimes,
    *,
    output_tokens: int,
    finish_reasons: Sequence[str],
    preemptions: int,
    resumed: bool,
    error: str = "",
) -> None:
    """Add the spans of a generation that has ended. ``resumed``: another server prefilled the prompts."""
    operation = _operation_name(request)
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        **_request_attributes(request),
        **_usage_attributes(usage, output_tokens),
        **_latency_attributes(times, resumed),
    }
    if finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = list(finish_reasons)
    if request.stream and times.first_token and not resumed:
        attributes["gen_ai.response.time_to_first_chunk"] = times.first_token - times.arrived
    if error:
        attributes["error.type"] = error
    context = trace.new_context()
    name = f"{operation} {request.model}"
    trace.add_span(name, trace.started_at, times.ended, attributes, context=context, error=error)
    trace.add_span("prepare", trace.started_at, times.submitted, parent=context)
    if not resumed:
        trace.add_span("queue", times.submitted, times.first_step or times.ended, parent=context)
    if times.first_token and not resumed:
        prefill = trace.new_context()
        tokens: Attributes = {
            "parley.prompt.tokens": usage.prompt_tokens,
            "parley.prompt.cached_tokens": usage.cached_tokens,
        }
        trace.add_span("prefill", times.first_step, times.first_token, tokens, context=prefill, parent=context)
        for chunk in times.chunks:
            start = times.submitted + chunk.start_seconds
            chunk_tokens: Attributes = {"parley.chunk.tokens": chunk.tokens}
            trace.add_span("prefill chunk", start, start + chunk.seconds, chunk_tokens, parent=prefill)
    if times.last_token > times.first_token > 0:
        decoded: Attributes = {"gen_ai.usage.output_tokens": output_tokens, "parley.preemptions": preemptions}
        trace.add_span("decode", times.first_token, times.last_token, decoded, parent=context)


def _operation_name(request: Request) -> str:
    if request.pooling is not None:
        return "embeddings"
    return "chat" if isinstance(request.prompts[0], Chat) else "text_completion"


def _request_attributes(request: Request) -> Attributes:
    """Return the attributes of a request: names and numbers, no text of users."""
    sampling = request.sampling
    attributes: Attributes = {
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.request.id": request.id,
        "gen_ai.response.id": request.id,
        "gen_ai.request.stream": request.stream,
        "gen_ai.request.n": request.n,
    }
    if request.n != 1:
        attributes["gen_ai.request.choice.count"] = request.n
    if request.stop_conditions.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = request.stop_conditions.max_tokens
    if request.pooling is None:
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
