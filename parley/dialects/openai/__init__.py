"""The OpenAI API with the extras that vLLM's server made common: its table of routes.

The published API is the reference for every member, default, range and error. Unknown members are ignored; known
members that are not supported are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from parley.dialects.dialect import Dialect, PromptMembers
from parley.dialects.form_data import model_in_form, peek_model_in_form
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import (
    azure,
    batches,
    bench,
    chat,
    completions,
    embeddings,
    mistral,
    moderations,
    realtime,
    responses,
    stored_chat_routes,
    stored_chats,
    tokens,
    transcriptions,
)
from parley.dialects.openai.answer_headers import openai_headers, openai_limit_headers
from parley.dialects.openai.error_answers import NO_MEMORY_BODY, openai_error_answer
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route, model_in_body

PROMPT_MEMBERS = PromptMembers(
    conversations=("messages",),
    prompts=("prompt", "input"),
    preceding=("tools", "instructions"),
    salts=("cache_salt",),
    read_non_json=peek_model_in_form,
)


def speech_route(path: str, reader: Callable[[bytes, RequestContext], Reply]) -> Route:
    """Return a route whose body is a form with a clip."""
    return Route(
        "POST",
        path,
        "generate",
        reader=reader,
        model_reader=model_in_form,
        tasks=frozenset({"transcribe"}),
        resolve_model_first=True,
        reads_form=True,
    )


CHAT_ROUTE = Route(
    "POST",
    "/v1/chat/completions",
    "generate",
    reader=chat.read_chat_request,
    model_reader=model_in_body,
    inliner=stored_chats.inline_chat,
    inliner_pattern=stored_chats.RECORD_PATTERN,
)
COMPLETION_ROUTE = Route(
    "POST", "/v1/completions", "generate", reader=completions.read_completion_request, model_reader=model_in_body
)
EMBEDDING_ROUTE = Route(
    "POST",
    "/v1/embeddings",
    "embed",
    reader=mistral.read_mistral_embedding,
    model_reader=model_in_body,
    tasks=frozenset({"embed"}),
)
MODEL_ROUTES = (
    Route("GET", "/v1/models", "models", writer=mistral.write_mistral_models),
    Route("GET", "/v1/models/{model:path}", "model", writer=mistral.write_mistral_model),
)
DIALECT = Dialect(
    name="openai",
    body_schemas="openai",
    title="OpenAI",
    base_path="/v1",
    render_error=openai_error_answer,
    prompt_members=PROMPT_MEMBERS,
    common_headers=openai_headers,
    limit_headers=openai_limit_headers,
    bench_apis=bench.BENCH_APIS,
    no_memory_body=NO_MEMORY_BODY,
    routes=(
        CHAT_ROUTE,
        COMPLETION_ROUTE,
        EMBEDDING_ROUTE,
        Route("POST", "/v1/fim/completions", "generate", reader=mistral.read_fim_request, model_reader=model_in_body),
        speech_route("/v1/audio/transcriptions", transcriptions.read_transcription),
        speech_route("/v1/audio/translations", transcriptions.read_translation),
        Route("POST", "/v1/audio/speech", "info", reader=transcriptions.refuse_speech),
        Route("POST", "/v1/moderations", "info", reader=moderations.refuse_moderation),
        *MODEL_ROUTES,
        Route(
            "POST",
            "/tokenize",
            "tokenize",
            reader=tokens.read_openai_tokenize,
            writer=tokens.write_openai_tokens,
            claiming_members=("prompt", "messages"),
        ),
        Route("POST", "/detokenize", "detokenize", reader=tokens.read_detokenize, writer=tokens.write_token_text),
        Route("GET", "/tokenizer_info", "tokenizer", writer=encode_json),
        Route("GET", "/version", "version", writer=tokens.write_openai_version),
        Route("GET", "/load", "load", writer=tokens.write_load),
        Route("GET", "/ping", "health"),
        Route("POST", "/ping", "health"),
        *responses.ROUTES,
        *stored_chat_routes.ROUTES,
        *batches.ROUTES,
        *realtime.ROUTES,
    ),
)
STRICT_CHAT_ROUTE = replace(CHAT_ROUTE, reader=chat.read_strict_chat_request)
LENIENT_PATHS = ("/v1/fim/completions",)
LENIENT_ROUTES = (CHAT_ROUTE, COMPLETION_ROUTE, EMBEDDING_ROUTE, *MODEL_ROUTES, *responses.ROUTES)
STRICT_ROUTES = (
    *(route for route in DIALECT.routes if route not in LENIENT_ROUTES and route.path not in LENIENT_PATHS),
    STRICT_CHAT_ROUTE,
    replace(COMPLETION_ROUTE, reader=completions.read_strict_completion_request),
    replace(EMBEDDING_ROUTE, reader=embeddings.read_embedding_request),
    replace(MODEL_ROUTES[0], writer=tokens.write_openai_models),
    replace(MODEL_ROUTES[1], writer=tokens.write_openai_model),
    *responses.STRICT_ROUTES,
)
# Below its prefix chat, completions and the Responses API have the limits of OpenAI's own, and no route has anything of
# Mistral's. The others are the same, and all are also at Azure's paths, which begin with that prefix.
STRICT = replace(DIALECT, body_schemas="openai-strict", routes=(*STRICT_ROUTES, *azure.azure_routes(STRICT_ROUTES)))
