"""The API of Hugging Face's Text Embeddings Inference (TEI): its table of routes.

``STRICT`` keeps the original's limits; ``DIALECT`` lifts those that only get in a client's way. At a root of several
APIs, the paths that TEI shares with TGI are TEI's if the main model is an encoder, which is useless to TGI;
``/rerank`` is TEI's if a body has its member ``texts``. ``/v1`` belongs to OpenAI there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from parley.dialects.dialect import Dialect, PromptMembers
from parley.dialects.fields import decode_fields
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.route import KIND_TASKS, Route, model_in_body
from parley.dialects.tei import embed, info, metrics, predict, tokens
from parley.dialects.tei.api_rules import EXTENDED_TEI_RULES, STRICT_TEI_RULES, TeiRules
from parley.dialects.tei.error_answers import NO_MEMORY_BODY, refuse_other_content_if_strict, tei_error_answer
from parley.types import ModelTask

TEI_PROMPT_MEMBERS = PromptMembers(prompts=("inputs", "input", "query", "texts"), scored=("texts",))
TEI_TASKS = KIND_TASKS["embed"]  # those of the original's models
BodyReader = Callable[[TeiRules, bytes, RequestContext], Reply | Answer]


def read_main_task(rules: TeiRules, body: bytes, context: RequestContext) -> Reply | Answer:
    """Read a request for the model's own task: vectors, also sparse ones, ranks, or classes. Raises BadRequest."""
    fields = decode_fields(body, rules.wording)
    if not context.labels:
        return embed.read_feature_extraction(rules, fields, context)
    if len(context.labels) == 1 and (rules.strict or not fields.has_value("inputs")):
        return predict.TeiRerankReply(rules, fields, context)
    return (predict.PredictReply if rules.strict else predict.TextClassificationReply)(rules, fields, context)


def _embed_route(
    path: str,
    read_body: BodyReader,
    rules: TeiRules,
    *tasks: ModelTask,
    claims: tuple[str, ...] = (),
) -> Route:
    """Return a route that answers with numbers. Like the original, it checks the content type before anything else.

    The original serves one model, so its clients name none: among several, the first that suits the path answers.
    """

    def read_json_body(body: bytes, context: RequestContext) -> Reply | Answer:
        return refuse_other_content_if_strict(rules, context.headers) or read_body(rules, body, context)

    model_reader = None if rules.strict else model_in_body
    return Route(
        "POST",
        path,
        "embed",
        reader=read_json_body,
        model_reader=model_reader,
        claiming_members=claims,
        tasks=frozenset(tasks) or None,
    )


def _encoder_route(path: str, read_body: BodyReader, rules: TeiRules) -> Route:
    """Return such a route for a path that another API has for models that generate."""
    return replace(_embed_route(path, read_body, rules, claims=("inputs", "texts")), for_encoders=True)


def _tei_dialect(rules: TeiRules) -> Dialect:
    return Dialect(
        name="tei",
        body_schemas="tei-strict" if rules.strict else "tei",
        title="TEI",
        base_path="",
        render_error=tei_error_answer,
        prompt_members=TEI_PROMPT_MEMBERS,
        body_limit=rules.max_body,
        retry_hints=not rules.strict,
        no_memory_body=NO_MEMORY_BODY,
        routes=(
            _embed_route("/embed", embed.read_tei_embed, rules, "embed"),
            _embed_route("/embed_all", embed.read_embed_all, rules, "token_embed"),
            _embed_route("/embed_sparse", embed.read_embed_sparse, rules, "embed_sparse"),
            _embed_route("/similarity", embed.read_similarity, rules, "embed", "embed_sparse"),
            _embed_route("/predict", predict.read_predict, rules, "classify"),
            _embed_route("/rerank", predict.read_tei_rerank, rules, "score", claims=("texts",)),
            _encoder_route("/", read_main_task, rules),
            _encoder_route("/invocations", read_main_task, rules),
            *_openai_routes(rules),
            Route(
                "POST",
                "/tokenize",
                "tokenize",
                reader=partial(tokens.read_tei_tokenize, rules),
                writer=tokens.write_tei_tokens,
                claiming_members=("inputs",),
                yields_unclaimed=True,
                for_encoders=True,
                refuse_headers=partial(refuse_other_content_if_strict, rules),
                tasks=TEI_TASKS,
            ),
            Route(
                "POST",
                "/decode",
                "detokenize",
                reader=partial(tokens.read_decode, rules),
                writer=tokens.write_texts,
                tasks=TEI_TASKS,
            ),
            Route("GET", "/info", "info", reader=partial(info.answer_info, rules), for_encoders=True, tasks=TEI_TASKS),
            Route("GET", "/", "health"),
            Route("GET", "/health", "health"),
            Route("GET", "/ping", "health"),
            Route("GET", "/metrics", "metrics"),
        ),
        shared_metrics=None if rules.strict else metrics.write_tei_metrics,
        own_metrics=metrics.write_tei_metrics if rules.strict else None,
        add_buckets=metrics.add_tei_buckets,
    )


def _openai_routes(rules: TeiRules) -> tuple[Route, ...]:
    return tuple(
        _embed_route(path, embed.read_openai_embedding, rules, "embed") for path in ("/v1/embeddings", "/embeddings")
    )


DIALECT = _tei_dialect(EXTENDED_TEI_RULES)
STRICT = _tei_dialect(STRICT_TEI_RULES)
