"""``GET /v1/models`` in Cohere's form: the served models by pages, or one of them."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from parley.dialects.cohere.shared import WORDING
from parley.dialects.dialect import Answer, QuerySchemas, RequestContext
from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.json_answer import json_answer
from parley.errors import UnknownModel, excerpt

ENDPOINTS = ("chat", "embed", "classify", "summarize", "generate", "rerank", "rate")
DEFAULT_PAGE, MAX_PAGE = 20, 1000  # items in a page
PAGE_QUERY: QuerySchemas = {
    "page_size": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "page_token": {"type": "string", "pattern": "^[0-9]{1,8}$"},
    "endpoint": {"enum": list(ENDPOINTS)},
    "default_only": {"type": "boolean"},
}


def answer_models(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return a page of the models, with ``page_size`` and ``page_token`` as the query has them. Raises Invalid."""
    query = {name: values[-1] for name, values in parse_qs(context.query_string.decode("latin-1")).items()}
    size = _read_count(query, "page_size", DEFAULT_PAGE, 1, MAX_PAGE)
    start = _read_count(query, "page_token", 0, 0, 10**8 - 1)
    endpoint = query.get("endpoint")
    if endpoint is not None and endpoint not in ENDPOINTS:
        raise WORDING.unlisted_error("endpoint", endpoint, ENDPOINTS)
    cards = [card for card in facts.cards if endpoint is None or endpoint in _endpoints(card)]
    answer: dict[str, Any] = {"models": [_model_object(card) for card in cards[start : start + size]]}
    if start + size < len(cards):
        answer["next_page_token"] = str(start + size)
    return json_answer(answer)


def answer_model(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return one model. Raises UnknownModel."""
    name = context.path_parts["model"]
    for card in facts.cards:
        if card.name == name:
            return json_answer(_model_object(card))
    served = [card.name for card in facts.cards]
    raise UnknownModel(f"There is no model {excerpt(name)}.", name=name, served=served)


def _endpoints(card: ModelCard) -> list[str]:
    return {"chat": ["chat"], "text": [], "vectors": ["embed", "rerank"]}[card.purpose]


def _model_object(card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name,
        "is_deprecated": False,
        "endpoints": _endpoints(card),
        "finetuned": bool(card.adapter_folder),
        "context_length": card.max_model_len or 0,
        "tokenizer_url": None,
        "default_endpoints": [],
        "features": sorted(card.abilities & {"tools", "thinking"}),
    }


def _read_count(query: dict[str, str], name: str, default: int, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 9 and low <= int(text) <= high):
        raise WORDING.invalid_error(name, f"must be an integer between {low} and {high}, but got {excerpt(text)}.")
    return int(text)
