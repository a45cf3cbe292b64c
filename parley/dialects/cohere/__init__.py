"""Cohere's API, versions 2 and 1: its table of routes.

``STRICT`` has the original's limits and refusals, its lists of models, its rerank and embed, and vLLM's rendered chats.
``DIALECT`` is its part of the universal server: chat, without refusals that only get in a client's way, and the first
version's chat and embed. There rerank and embed of version 2 are vLLM's, which has them on the same paths.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from parley.dialects.cohere import bench, chat, embed, first_chat, first_version, models, render, rerank
from parley.dialects.cohere.api_rules import LENIENT_COHERE_RULES, STRICT_COHERE_RULES, CohereRules
from parley.dialects.cohere.error_answers import NO_MEMORY_BODY, cohere_error_answer
from parley.dialects.dialect import Dialect, PromptMembers
from parley.dialects.route import Route, model_in_body
from parley.dialects.vllm import COHERE_ROUTE, SCORE_TASKS

PROMPT_MEMBERS = PromptMembers(
    conversations=("messages", "chat_history"), prompts=("message",), preceding=("preamble", "tools", "documents")
)
FIRST_EMBED_ROUTE = replace(COHERE_ROUTE, path="/v1/embed", reader=first_version.read_first_embed)
STRICT_ROUTES = (
    replace(COHERE_ROUTE, reader=embed.read_cohere_embed),
    Route(
        "POST", "/v2/rerank", "embed", reader=rerank.read_cohere_rerank, model_reader=model_in_body, tasks=SCORE_TASKS
    ),
    Route(
        "POST",
        "/v1/rerank",
        "embed",
        reader=first_version.read_first_rerank,
        model_reader=model_in_body,
        tasks=SCORE_TASKS,
    ),
    Route(
        "GET",
        "/v1/models",
        "info",
        reader=models.answer_cohere_models,
        query=models.PAGE_QUERY,
        model_list=models.MODEL_LIST,
    ),
    Route("GET", "/v1/models/{model:path}", "info", reader=models.answer_cohere_model),
)


def _render_route(rules: CohereRules) -> Route:
    reader = partial(render.read_cohere_rendering, rules)
    return Route("POST", "/v2/chat/render", "render", reader=reader, model_reader=model_in_body)


def _first_chat_route(rules: CohereRules) -> Route:
    reader = partial(first_chat.read_first_chat, rules)
    return Route("POST", "/v1/chat", "generate", reader=reader, model_reader=model_in_body)


def _cohere_dialect(rules: CohereRules) -> Dialect:
    return Dialect(
        name="cohere",
        body_schemas="cohere-strict" if rules.strict else "cohere",
        title="Cohere",
        base_path="",
        other_bases=("/v2/chat",),  # not /v1/chat: OpenAI has paths below it
        render_error=cohere_error_answer,
        prompt_members=PROMPT_MEMBERS,
        bench_apis=bench.BENCH_APIS,
        no_memory_body=NO_MEMORY_BODY,
        routes=(
            Route(
                "POST", "/v2/chat", "generate", reader=partial(chat.read_cohere_chat, rules), model_reader=model_in_body
            ),
            _first_chat_route(rules),
            FIRST_EMBED_ROUTE,
            *((_render_route(rules), *STRICT_ROUTES) if rules.strict else ()),
        ),
    )


DIALECT = _cohere_dialect(LENIENT_COHERE_RULES)
STRICT = _cohere_dialect(STRICT_COHERE_RULES)
