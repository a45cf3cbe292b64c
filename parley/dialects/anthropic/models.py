"""``GET /v1/models`` in Anthropic's form: the served models by pages, or one of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

import msgspec

from parley.dialects.anthropic.context_management import CLEAR_THINKING, CLEAR_TOOL_USES, COMPACT
from parley.dialects.anthropic.options import EFFORTS, THINKING_TYPES
from parley.dialects.anthropic.refusal_wording import ANTHROPIC_WORDING
from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.json_answer import encode_json, json_answer
from parley.dialects.openapi_bodies import MODEL_REFERENCE
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.route import ModelListMerge, QuerySchemas
from parley.errors import UnknownModel, excerpt
from parley.types import ModelInfo

DEFAULT_PAGE, MAX_PAGE = 20, 1000  # items in a page
PAGE_QUERY: QuerySchemas = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "after_id": MODEL_REFERENCE,
    "before_id": MODEL_REFERENCE,
}


def answer_anthropic_models(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return a page of the models, as ``limit``, ``after_id`` and ``before_id`` of the query ask. Raises
    InvalidValue."""
    return json_answer(_page_of([_model_object(card) for card in facts.cards], context))


def read_anthropic_page(whole_list: bytes, context: RequestContext) -> bytes:
    """Return the same page of a list that has all models. Raises InvalidValue, msgspec.MsgspecError."""
    return encode_json(_page_of(msgspec.json.decode(whole_list, type=_AnthropicModelList).data, context))


class _AnthropicModelList(msgspec.Struct):
    data: list[dict[str, Any]]


MODEL_LIST = ModelListMerge(b"limit=%d" % MAX_PAGE, read_anthropic_page)


def _page_of(models: Sequence[dict[str, Any]], context: RequestContext) -> dict[str, Any]:
    query = {name: values[-1] for name, values in parse_qs(context.query_string.decode("latin-1")).items()}
    limit = read_page_limit(query.get("limit"))
    if (after := query.get("after_id")) is not None:
        models = models[_model_index(models, "after_id", after) + 1 :]
        page, has_more = models[:limit], len(models) > limit
    elif (before := query.get("before_id")) is not None:
        models = models[: _model_index(models, "before_id", before)]
        page, has_more = models[-limit:], len(models) > limit
    else:
        page, has_more = models[:limit], len(models) > limit
    return {
        "data": list(page),
        "has_more": has_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def answer_anthropic_model(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return one model. Raises UnknownModel."""
    name = context.path_parts["model"]
    for card in facts.cards:
        if card.name == name:
            return json_answer(_model_object(card))
    served = [card.name for card in facts.cards]
    raise UnknownModel(f"There is no model {excerpt(name)}.", name=name, served=served)


def _model_object(card: ModelCard) -> dict[str, Any]:
    """Return one model. Its context length and capabilities are null until it is loaded."""
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
        "capabilities": None if card.info is None else _capability_object(card, card.info),
        "lifecycle": "active",
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
    }


def _capability_object(card: ModelCard, info: ModelInfo) -> dict[str, Any]:
    """Return the capabilities of a model, with every member of the original's list. PDF documents and hosted tools are
    never supported. Clients such as Home Assistant offer only the options that are listed."""
    writes = info.generates and "chat" in card.abilities
    thinks = writes and "thinking" in card.abilities
    thinking_types = {name: _support_object(_takes_thinking(name, thinks)) for name in THINKING_TYPES}
    return {
        "batch": _support_object(writes),
        "citations": _support_object(False),
        "code_execution": _support_object(False),
        "context_management": {
            "supported": writes,
            CLEAR_THINKING: _support_object(thinks),
            CLEAR_TOOL_USES: _support_object(writes and "tools" in card.abilities),
            COMPACT: _support_object(writes),
        },
        "effort": _support_object(thinks, *EFFORTS),
        "image_input": _support_object(writes and "image" in info.media_kinds),
        "pdf_input": _support_object(False),
        "server_tools": _support_object(False, "code_execution", "web_search"),
        "structured_outputs": _support_object(writes and "grammar" in info.features),
        "thinking": _support_object(thinks) | {"types": thinking_types},
    }


def _takes_thinking(name: str, thinks: bool) -> bool:
    """Whether the type asks for something that the model does: two types only turn thinking off."""
    return thinks or name in ("disabled", "between_tools")


def _support_object(supported: bool, *parts: str) -> dict[str, Any]:
    """Return whether something is supported, and with it each of its parts."""
    return {"supported": supported} | {part: {"supported": supported} for part in parts}


def read_page_limit(text: str | None) -> int:
    """Return the largest number of items in a page, as the query has it. Raises InvalidValue."""
    if text is None:
        return DEFAULT_PAGE
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= MAX_PAGE):
        sentence = f"Input should be an integer greater than or equal to 1 and less than or equal to {MAX_PAGE}"
        raise ANTHROPIC_WORDING.invalid_error("limit", f"{sentence}, but got {excerpt(text)}")
    return int(text)


def _model_index(models: Sequence[dict[str, Any]], parameter: str, name: str) -> int:
    """Return the index of the model that a parameter of the query names. Raises InvalidValue."""
    for index, model in enumerate(models):
        if model.get("id") == name:
            return index
    raise ANTHROPIC_WORDING.invalid_error(parameter, f"there is no model {excerpt(name)}")
