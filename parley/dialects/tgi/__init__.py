"""The API of Hugging Face's Text Generation Inference (TGI), version 3: its table of routes.

``STRICT`` keeps the original's limits and refusals. ``DIALECT`` lifts those that only get in a client's way. ``OLD`` is
version 0.9.4, whose framing and defaults many servers copied. If several APIs share a root, ``/v1`` belongs to OpenAI;
TGI's variant of ``/v1`` is served only where TGI is alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from parley.dialects.dialect import Dialect, PromptMembers
from parley.dialects.openapi_document import OpenApiDocument
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.route import KIND_TASKS, Route, model_in_body
from parley.dialects.tgi import bench, chat, completions, document, generate, metrics, tokens, vertex
from parley.dialects.tgi.api_rules import EXTENDED_TGI_RULES, OLD_TGI_RULES, STRICT_TGI_RULES, TGI_VERSION, TgiRules
from parley.dialects.tgi.error_answers import NO_MEMORY_BODY, refuse_other_content, tgi_error_answer

INPUTS_MEMBER = ("inputs",)
TGI_PROMPT_MEMBERS = PromptMembers(
    conversations=("messages",),
    prompts=("prompt", *INPUTS_MEMBER, "instances"),
    preceding=("tools",),
    salts=("adapter_id",),
)
BodyReader = Callable[[TgiRules, bytes, RequestContext], Reply | Answer]
ModelNameReader = Callable[[bytes], str]

# Clients of Hugging Face's servers, which serve one model each, send these where a model's name is required.
TGI_TASKS = KIND_TASKS["generate"]  # those of the original's models
ANY_MODEL_NAMES = r"tgi|dummy|https?://.*"


def _tgi_dialect(rules: TgiRules) -> Dialect:
    dialect = Dialect(
        name="tgi",
        body_schemas="tgi-strict" if rules.strict else "tgi",
        title="TGI",
        base_path="",
        render_error=partial(tgi_error_answer, rules),
        prompt_members=TGI_PROMPT_MEMBERS,
        body_limit=rules.max_body,
        retry_hints=not rules.strict,
        no_memory_body=NO_MEMORY_BODY,
        routes=(
            *_routes_of_every_version(rules),
            _generate_route("/vertex", vertex.read_vertex, rules),
            Route(
                "POST",
                "/tokenize",
                "tokenize",
                reader=tokens.read_tgi_tokenize,
                writer=tokens.write_tgi_tokens,
                claiming_members=INPUTS_MEMBER,
                refuse_headers=refuse_other_content if rules.strict else None,
                tasks=TGI_TASKS,
            ),
            Route(
                "POST",
                "/chat_tokenize",
                "tokenize",
                reader=tokens.read_chat_tokenize,
                writer=tokens.write_chat_tokens,
                refuse_headers=refuse_other_content if rules.strict else None,
                tasks=TGI_TASKS,
            ),
            _generate_route("/v1/chat/completions", chat.read_tgi_chat, rules, model=model_in_body),
            _generate_route("/v1/completions", completions.read_tgi_completion, rules, model=model_in_body),
            Route("GET", "/v1/models", "models", writer=tokens.write_tgi_models),
        ),
        shared_metrics=metrics.write_tgi_metrics,
        add_buckets=metrics.add_tgi_buckets,
        any_model=ANY_MODEL_NAMES,
        bench_apis=bench.APIS,
    )
    return _with_document(dialect, TGI_VERSION)


def _with_document(dialect: Dialect, version: str) -> Dialect:
    """Return the dialect with the routes of its OpenAPI document, which describes the other routes."""
    places = {(route.method, route.path): [(route, dialect)] for route in dialect.routes}
    described = OpenApiDocument("Text Generation Inference", "..", places, version)
    return replace(
        dialect,
        routes=(
            *dialect.routes,
            Route("GET", "/api-doc/openapi.json", "info", reader=described),
            Route(
                "GET",
                "/docs",
                "info",
                reader=partial(document.answer_docs_page, described, ""),
                content_types=("text/html",),
            ),
            Route(
                "GET",
                "/docs/",
                "info",
                reader=partial(document.answer_docs_page, described, "../"),
                content_types=("text/html",),
            ),
        ),
    )


def _generate_route(
    path: str,
    read_body: BodyReader,
    rules: TgiRules,
    claims: tuple[str, ...] = (),
    model: ModelNameReader | None = None,
) -> Route:
    """Return a route that generates. Like the original, it checks the content type before anything else."""

    def read_json_body(body: bytes, context: RequestContext) -> Reply | Answer:
        refusal = refuse_other_content(context.headers) if rules.strict else None
        return refusal or read_body(rules, body, context)

    return Route("POST", path, "generate", reader=read_json_body, model_reader=model, claiming_members=claims)


def _routes_of_every_version(rules: TgiRules) -> tuple[Route, ...]:
    """Return the routes that every version of TGI has."""
    return (
        _generate_route("/", generate.read_generate_any, rules, INPUTS_MEMBER),
        _generate_route("/generate", generate.read_generate, rules, INPUTS_MEMBER),
        _generate_route("/generate_stream", generate.read_generate_stream, rules, INPUTS_MEMBER),
        _generate_route("/invocations", generate.read_sagemaker, rules, INPUTS_MEMBER, model_in_body),
        Route("GET", "/info", "server_info", writer=partial(tokens.write_tgi_info, rules), tasks=TGI_TASKS),
        Route("GET", "/", "health"),
        Route("GET", "/health", "health"),
        Route("GET", "/ping", "health"),
        Route("GET", "/metrics", "metrics"),
    )


DIALECT = _tgi_dialect(EXTENDED_TGI_RULES)
STRICT = _tgi_dialect(STRICT_TGI_RULES)
OLD = _with_document(
    Dialect(
        name=f"tgi-{tokens.OLD_VERSION}",
        body_schemas=f"tgi-{tokens.OLD_VERSION}",
        title=f"TGI {tokens.OLD_VERSION}",
        base_path="",
        render_error=partial(tgi_error_answer, OLD_TGI_RULES),
        prompt_members=TGI_PROMPT_MEMBERS,
        body_limit=OLD_TGI_RULES.max_body,
        retry_hints=False,
        no_memory_body=NO_MEMORY_BODY,
        routes=_routes_of_every_version(OLD_TGI_RULES),
    ),
    tokens.OLD_VERSION,
)
