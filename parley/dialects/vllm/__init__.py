"""vLLM's server: its table of routes.

``STRICT_DIALECT`` is its OpenAI server in the original form of answers and refusals, with the old demo server's
``/generate``. ``DEMO_DIALECT`` is that demo server up to version 0.6.3, whose records had another terminator.
``DIALECT`` is its part of the universal server: the routes that no other API has. There ``/v1`` is in OpenAI's own
form, with all of vLLM's members.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from parley.dialects import anthropic
from parley.dialects.anthropic import file_sources
from parley.dialects.anthropic.messages import write_managed_count
from parley.dialects.dialect import Dialect, PromptMembers
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import speech_route, tokens
from parley.dialects.openai.responses import REPLAY_QUERY, stored_routes
from parley.dialects.openai.responses.inlined_request import inline_response
from parley.dialects.route import ModelListMerge, Route, model_in_body
from parley.dialects.vllm import (
    batch,
    bench,
    chat,
    completions,
    control,
    generative_scoring,
    legacy,
    messages,
    metrics,
    realtime,
    responses,
    transcriptions,
)
from parley.dialects.vllm.error_answers import NO_MEMORY_BODY, vllm_error_answer
from parley.dialects.vllm.pooling import classify, cohere, embeddings, scores
from parley.dialects.vllm.token_routes import derender_readers, render, token_generation
from parley.types import ALL_MODEL_TASKS, ModelTask

UNSUPPORTED_PATHS = {
    "/v1/decisions": "Answering of questions by the probabilities of labels is",
    "/v1/systemone": "Answering of questions by the probabilities of labels is",
    "/reset_encoder_cache": "Clearing the cache of the encoders of media is",
}
PROMPT_MEMBERS = PromptMembers(
    conversations=("messages",),
    prompts=("prompt", "token_ids", "query", "queries", "items"),
    preceding=("tools",),
    scored=("items", "documents"),
    salts=("cache_salt",),
)
STRICT_PROMPT_MEMBERS = replace(
    PROMPT_MEMBERS,
    prompts=(*PROMPT_MEMBERS.prompts, "input"),
    preceding=("tools", "instructions", "system"),
    dropped_texts=anthropic.PROMPT_MEMBERS.dropped_texts,
)
BATCH_ROUTE = Route(
    "POST", "/v1/chat/completions/batch", "generate", reader=batch.read_batch_request, model_reader=model_in_body
)
COHERE_ROUTE = Route(
    "POST",
    "/v2/embed",
    "embed",
    reader=cohere.read_cohere_request,
    model_reader=model_in_body,
    tasks=frozenset({"embed"}),
)
POOLING_ROUTE = Route("POST", "/pooling", "embed", reader=embeddings.read_pooling_request, model_reader=model_in_body)
CLASSIFY_ROUTE = Route(
    "POST",
    "/classify",
    "embed",
    reader=classify.read_classification,
    model_reader=model_in_body,
    tasks=frozenset({"classify", "score"}),
)
SCORE_TASKS: frozenset[ModelTask] = frozenset(
    {"score"}
)  # of the models made for it; those that make vectors do it, too
SCORE_ROUTES = (
    *(
        Route("POST", path, "embed", reader=scores.read_score_request, model_reader=model_in_body, tasks=SCORE_TASKS)
        for path in ("/score", "/v1/score")
    ),
    *(
        Route("POST", path, "embed", reader=scores.read_rerank_request, model_reader=model_in_body, tasks=SCORE_TASKS)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
)
SCORING_ROUTE = Route(
    "POST",
    "/generative_scoring",
    "generate",
    reader=generative_scoring.read_scoring_request,
    model_reader=model_in_body,
)
TOKEN_ROUTES = (  # of servers that tokenize elsewhere than where they generate
    Route(
        "POST",
        "/inference/v1/generate",
        "generate",
        reader=token_generation.read_token_request,
        model_reader=model_in_body,
    ),
    *(
        Route("POST", path, "abort_list", reader=token_generation.read_abort_requests)
        for path in ("/inference/v1/abort_requests", "/abort_requests")
    ),
    Route(
        "POST",
        "/v1/chat/completions/render",
        "render",
        reader=render.read_chat_rendering,
        model_reader=model_in_body,
    ),
    Route(
        "POST",
        "/v1/completions/render",
        "render",
        reader=render.read_completion_rendering,
        model_reader=model_in_body,
    ),
    Route(
        "POST",
        "/v1/chat/completions/derender",
        "render",
        reader=derender_readers.read_chat_derendering,
        model_reader=model_in_body,
    ),
    Route(
        "POST",
        "/v1/completions/derender",
        "render",
        reader=derender_readers.read_completion_derendering,
        model_reader=model_in_body,
    ),
)
RESPONSES_ROUTES = (
    Route(
        "POST",
        "/v1/responses",
        "generate",
        reader=responses.read_vllm_response,
        model_reader=model_in_body,
        inliner=partial(inline_response, decode=responses.decode_response_body, event_stream=responses.VllmEventStream),
    ),
    Route("POST", "/v1/responses/render", "render", reader=render.read_response_rendering, model_reader=model_in_body),
    Route("GET", "/v1/responses/{id}", "stored", reader=stored_routes.read_response, query=REPLAY_QUERY),
    Route("POST", "/v1/responses/{id}/cancel", "stored", reader=responses.cancel_vllm_response),
)
MESSAGES_ROUTES = (
    Route(
        "POST",
        "/v1/messages",
        "generate",
        reader=messages.read_vllm_messages,
        model_reader=model_in_body,
        render_error=messages.messages_error,
        inliner=file_sources.inline_files,
        inliner_pattern=file_sources.FILE_PATTERN,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        "tokenize",
        reader=messages.read_vllm_count,
        writer=write_managed_count,
        render_error=messages.messages_error,
        inliner=file_sources.inline_files,
        inliner_pattern=file_sources.FILE_PATTERN,
    ),
    Route("POST", "/v1/messages/render", "render", reader=render.read_message_rendering, model_reader=model_in_body),
)
RESET_ROUTE = Route(
    "POST",
    "/reset_prefix_cache",
    "reset",
    reader=control.read_cache_reset,
    writer=control.write_reset_done,
    query={"reset_running_requests": {"type": "boolean"}},
)

MEDIA_RESET_ROUTE = Route("POST", "/reset_mm_cache", "reset_media")


def _generate_route(version: legacy.DemoVersion) -> Route:
    read = partial(legacy.read_demo_request, version)
    return Route(
        "POST",
        "/generate",
        "generate",
        reader=read,
        claiming_members=("prompt",),
        yields_unclaimed=True,
        render_error=legacy.render_plain_error if version.strict else None,
    )


def _adapter_routes(strict: bool) -> tuple[Route, ...]:
    return (
        Route("POST", "/v1/load_lora_adapter", "adapter", reader=partial(control.read_load_adapter, strict)),
        Route("POST", "/v1/unload_lora_adapter", "adapter", reader=partial(control.read_unload_adapter, strict)),
    )


def _unsupported_routes() -> tuple[Route, ...]:
    return tuple(
        Route("POST", path, "info", reader=partial(control.refuse_unsupported, subject))
        for path, subject in UNSUPPORTED_PATHS.items()
    )


DIALECT = Dialect(
    name="vllm",
    body_schemas="vllm",
    title="vLLM",
    base_path="",
    render_error=vllm_error_answer,
    chunk_per_event=True,
    prompt_members=PROMPT_MEMBERS,
    no_memory_body=NO_MEMORY_BODY,
    routes=(
        _generate_route(legacy.LENIENT_VERSION),
        POOLING_ROUTE,
        CLASSIFY_ROUTE,
        *SCORE_ROUTES,
        replace(COHERE_ROUTE, reader=cohere.read_universal_request),
        BATCH_ROUTE,
        SCORING_ROUTE,
        *TOKEN_ROUTES,
        RESET_ROUTE,
        MEDIA_RESET_ROUTE,
        *_adapter_routes(False),
    ),
    shared_metrics=metrics.write_vllm_metrics,
    add_buckets=metrics.add_vllm_buckets,
)
STRICT_DIALECT = Dialect(
    name="vllm",
    body_schemas="vllm-strict",
    title="vLLM",
    base_path="/v1",
    bench_apis=bench.BENCH_APIS,
    render_error=vllm_error_answer,
    chunk_per_event=True,
    prompt_members=STRICT_PROMPT_MEMBERS,
    no_memory_body=NO_MEMORY_BODY,
    retry_hints=False,
    routes=(
        _generate_route(legacy.STRICT_VERSION),
        Route("POST", "/v1/chat/completions", "generate", reader=chat.read_vllm_chat, model_reader=model_in_body),
        Route(
            "POST", "/v1/completions", "generate", reader=completions.read_vllm_completion, model_reader=model_in_body
        ),
        *RESPONSES_ROUTES,
        *MESSAGES_ROUTES,
        Route(
            "POST",
            "/v1/embeddings",
            "embed",
            reader=embeddings.read_vllm_embedding,
            model_reader=model_in_body,
            tasks=frozenset({"embed"}),
        ),
        POOLING_ROUTE,
        CLASSIFY_ROUTE,
        *SCORE_ROUTES,
        COHERE_ROUTE,
        BATCH_ROUTE,
        SCORING_ROUTE,
        *TOKEN_ROUTES,
        Route(
            "POST",
            "/invocations",
            "generate",
            reader=control.read_vllm_invocation,
            model_reader=model_in_body,
            tasks=ALL_MODEL_TASKS,
            body_paths=("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/score", "/rerank"),
        ),
        speech_route("/v1/audio/transcriptions", transcriptions.read_vllm_transcription),
        speech_route("/v1/audio/translations", transcriptions.read_vllm_translation),
        Route("GET", "/v1/realtime", "socket", reader=realtime.VllmRealtimeSession),
        Route("GET", "/v1/models", "info", reader=control.answer_vllm_models, model_list=ModelListMerge()),
        Route("POST", "/tokenize", "tokenize", reader=control.read_vllm_tokenize, writer=tokens.write_openai_tokens),
        Route("POST", "/detokenize", "detokenize", reader=control.read_vllm_detokenize, writer=tokens.write_token_text),
        Route("GET", "/tokenizer_info", "tokenizer", writer=encode_json),
        Route("GET", "/version", "version", writer=control.write_vllm_version),
        Route("GET", "/load", "load", writer=tokens.write_load),
        Route("GET", "/kv_event_sources", "info", reader=control.answer_event_sources),
        Route("GET", "/health", "health"),
        Route("GET", "/ping", "health"),
        Route("POST", "/ping", "health"),
        Route("GET", "/metrics", "metrics"),
        RESET_ROUTE,
        MEDIA_RESET_ROUTE,
        *_adapter_routes(True),
        *_unsupported_routes(),
    ),
)
DEMO_DIALECT = Dialect(
    name="vllm-0.6.3",
    body_schemas="vllm-0.6.3",
    title="vLLM 0.6.3's demo server",
    base_path="",
    render_error=vllm_error_answer,
    chunk_per_event=True,
    prompt_members=PROMPT_MEMBERS,
    no_memory_body=NO_MEMORY_BODY,
    retry_hints=False,
    routes=(_generate_route(legacy.OLD_VERSION), Route("GET", "/health", "health")),
)
