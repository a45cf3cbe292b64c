"""vLLM's server: its table of routes.

``STRICT`` is its OpenAI server in the original form of answers and refusals, with the old demo server's ``/generate``.
``OLD`` is that demo server up to version 0.6.3, whose records had another terminator. ``DIALECT`` is its part of the
universal server: the routes that no other API has. There ``/v1`` is in OpenAI's own form, with all of vLLM's members.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from parley.dialects.dialect import Dialect, PromptMembers, Route, named
from parley.dialects.openai import tokens
from parley.dialects.vllm import (
    batch,
    bench,
    chat,
    cohere,
    completions,
    control,
    embeddings,
    legacy,
    metrics,
    scores,
    shared,
)

UNBUILT = {
    "/v1/responses": "The Responses API is",
    "/v1/responses/{response}/cancel": "The Responses API is",
    "/v1/messages": "The Messages API is",
    "/v1/messages/count_tokens": "The Messages API is",
    "/v1/chat/completions/render": "A prompt without an answer is",
    "/v1/completions/render": "A prompt without an answer is",
    "/generative_scoring": "Scoring of labels is",
    "/inference/v1/generate": "Generation from tokens to tokens is",
    "/inference/v1/abort_requests": "Cancelling by id is",
}
MEMBERS = PromptMembers(conversations=("messages",), prompts=("prompt",), before=("tools",), salts=("cache_salt",))
BATCH = Route("POST", "/v1/chat/completions/batch", "generate", read=batch.read, model=named)
COHERE = Route("POST", "/v2/embed", "embed", read=cohere.read, model=named)
POOLING = Route("POST", "/pooling", "embed", read=embeddings.pool, model=named)
SCORES = (
    *(Route("POST", path, "embed", read=scores.score, model=named) for path in ("/score", "/v1/score")),
    *(
        Route("POST", path, "embed", read=scores.rerank, model=named)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
)
RESET = Route("POST", "/reset_prefix_cache", "reset", read=control.put_back, write=control.was_reset)


def _generate(manner: legacy.Manner) -> Route:
    read = partial(legacy.read, manner)
    return Route("POST", "/generate", "generate", read=read, claims=("prompt",), yields=True)


def _adapters(strict: bool) -> tuple[Route, ...]:
    return (
        Route("POST", "/v1/load_lora_adapter", "adapter", read=partial(control.load_adapter, strict)),
        Route("POST", "/v1/unload_lora_adapter", "adapter", read=partial(control.unload_adapter, strict)),
    )


def _unbuilt() -> tuple[Route, ...]:
    return tuple(Route("POST", path, "ask", read=partial(control.unbuilt, what)) for path, what in UNBUILT.items())


DIALECT = Dialect(
    name="vllm",
    title="vLLM",
    base="",
    error=shared.error,
    members=MEMBERS,
    no_memory=shared.NO_MEMORY,
    routes=(_generate(legacy.LENIENT), POOLING, *SCORES, COHERE, BATCH, RESET, *_adapters(False)),
    series=metrics.told,
)
STRICT = Dialect(
    name="vllm",
    title="vLLM",
    base="/v1",
    bench=bench.APIS,
    error=shared.error,
    members=replace(MEMBERS, prompts=("prompt", "input")),
    no_memory=shared.NO_MEMORY,
    hints=False,
    routes=(
        _generate(legacy.STRICT),
        Route("POST", "/v1/chat/completions", "generate", read=chat.read, model=named),
        Route("POST", "/v1/completions", "generate", read=completions.read, model=named),
        Route("POST", "/v1/embeddings", "embed", read=embeddings.read, model=named),
        POOLING,
        *SCORES,
        COHERE,
        BATCH,
        Route("POST", "/invocations", "generate", read=control.invoked, model=named),
        Route("GET", "/v1/models", "ask", read=control.models),
        Route("POST", "/tokenize", "tokenize", read=control.tokenize, write=tokens.tokenized),
        Route("POST", "/detokenize", "detokenize", read=control.detokenize, write=tokens.detokenized),
        Route("GET", "/tokenizer_info", "tokenizer", write=shared.encode),
        Route("GET", "/version", "version", write=control.version),
        Route("GET", "/load", "load", write=tokens.load),
        Route("GET", "/health", "health"),
        Route("GET", "/ping", "health"),
        Route("POST", "/ping", "health"),
        Route("GET", "/metrics", "metrics"),
        RESET,
        *_adapters(True),
        *_unbuilt(),
    ),
)
OLD = Dialect(
    name="vllm-0.6.3",
    title="vLLM 0.6.3's demo server",
    base="",
    error=shared.error,
    members=MEMBERS,
    no_memory=shared.NO_MEMORY,
    hints=False,
    routes=(_generate(legacy.OLD), Route("GET", "/health", "health")),
)
