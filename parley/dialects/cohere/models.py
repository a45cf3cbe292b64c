"""``GET /v1/models`` in Cohere's form: the served models by pages, or one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec

from parley.dialects.cohere.options import DEFAULT_TEMPERATURE, DEFAULT_TOP_P
from parley.dialects.cohere.refusal_wording import COHERE_WORDING
from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.json_answer import encode_json, json_answer
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.route import ModelListMerge, QuerySchemas
from parley.errors import UnknownModel, excerpt
from parley.types import ModelTask

ENDPOINTS = ("chat", "embed", "classify", "summarize", "generate", "rerank", "rate")
DEFAULT_PAGE, MAX_PAGE = 20, 1000  # items in a page
RANKING_TASKS: frozenset[ModelTask] = frozenset({"score", "embed", "token_embed"})
SAMPLING_DEFAULTS = {
    "temperature": DEFAULT_TEMPERATURE,
    "k": 0,
    "p": DEFAULT_TOP_P,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
PAGE_QUERY: QuerySchemas = {
    "page_size": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "page_token": {"type": "string", "pattern": "^[0-9]{1,8}$"},
    "endpoint": {"enum": list(ENDPOINTS)},
    "default_only": {"type": "boolean"},
}


def answer_cohere_models(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return a page of the models, as ``page_size``, ``page_token``, ``endpoint`` and ``default_only`` of the query
    ask. Raises InvalidValue."""
    return json_answer(_page_of(list(map(_model_object, facts.cards)), context))


def read_cohere_page(whole_list: bytes, context: RequestContext) -> bytes:
    """Return the same page of a list that has all models. Raises InvalidValue, msgspec.MsgspecError."""
    return encode_json(_page_of(msgspec.json.decode(whole_list, type=_CohereModelList).models, context))


class _CohereModelList(msgspec.Struct):
    models: list[dict[str, Any]]


MODEL_LIST = ModelListMerge(b"page_size=%d" % MAX_PAGE, read_cohere_page)


def answer_cohere_model(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return one model. Raises UnknownModel."""
    name = context.path_parts["model"]
    for model in _with_defaults(list(map(_model_object, facts.cards))):
        if model["name"] == name:
            return json_answer(model)
    served = [card.name for card in facts.cards]
    raise UnknownModel(f"There is no model {excerpt(name)}.", name=name, served=served)


def _page_of(models: Sequence[dict[str, Any]], context: RequestContext) -> dict[str, Any]:
    query = {name: values[-1] for name, values in parse_qs(context.query_string.decode("latin-1")).items()}
    size = _read_count(query, "page_size", DEFAULT_PAGE, 1, MAX_PAGE)
    start = _read_count(query, "page_token", 0, 0, 10**8 - 1)
    endpoint, default_only = query.get("endpoint"), query.get("default_only", "false")
    if endpoint is not None and endpoint not in ENDPOINTS:
        raise COHERE_WORDING.unlisted_error("endpoint", endpoint, ENDPOINTS)
    if default_only not in ("true", "false"):
        raise COHERE_WORDING.unlisted_error("default_only", default_only, ("true", "false"))
    models = _with_defaults(models)
    if default_only == "true":
        if endpoint is None:
            raise COHERE_WORDING.invalid_error("default_only", "only allowed with an endpoint.")
        models = [model for model in models if endpoint in model["default_endpoints"]]
    elif endpoint is not None:
        models = [model for model in models if endpoint in model["endpoints"]]
    page: dict[str, Any] = {"models": models[start : start + size]}
    return page | ({"next_page_token": str(start + size)} if start + size < len(models) else {})


def _with_defaults(models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the models with their ``default_endpoints``. The default of an endpoint is the first model that has it, or
    the first of those with the fewest others: a model made to rerank comes before one that embeds as well."""
    defaults: dict[str, str] = {}
    for model in sorted(models, key=lambda model: len(model["endpoints"])):
        for endpoint in model["endpoints"]:
            defaults.setdefault(endpoint, model["name"])
    return [
        model | {"default_endpoints": [name for name in model["endpoints"] if defaults[name] == model["name"]]}
        for model in models
    ]


def _list_endpoints(card: ModelCard) -> list[str]:
    """Return the endpoints that a model can answer, as far as it is known before the model is loaded."""
    if card.info is None:
        return {"chat": ["chat"], "text": [], "vectors": ["embed", "rerank"]}[card.purpose]
    tasks = card.info.tasks
    answered = {
        "chat": card.purpose == "chat" and "generate" in tasks,
        "embed": "embed" in tasks,
        "rerank": not tasks.isdisjoint(RANKING_TASKS),
    }
    return [name for name, can_answer in answered.items() if can_answer]


def _model_object(card: ModelCard) -> dict[str, Any]:
    endpoints = _list_endpoints(card)
    return {
        "name": card.name,
        "is_deprecated": False,
        "endpoints": endpoints,
        "finetuned": bool(card.adapter_folder),
        "context_length": card.max_model_len,
        "tokenizer_url": None,
        "default_endpoints": [],
        "features": sorted(card.abilities & {"tools", "thinking"}),
        "sampling_defaults": SAMPLING_DEFAULTS if "chat" in endpoints else None,
    }


def _read_count(query: dict[str, str], name: str, default: int, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 9 and low <= int(text) <= high):
        raise COHERE_WORDING.invalid_error(
            name, f"must be an integer between {low} and {high}, but got {excerpt(text)}."
        )
    return int(text)
