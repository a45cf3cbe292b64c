"""Models, tokens and version: small routes that do not generate, in the form of vLLM's server."""

from __future__ import annotations

from typing import Any

from parley.dialects.admin_requests import DetokenizeRequest, TokenizeRequest, TokenizeResult
from parley.dialects.error_wording import DEFAULT_WORDING, ErrorWording
from parley.dialects.facts import ModelCard
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.messages import read_conversation
from parley.dialects.openai.reading_rules import OPENAI_RULES, ReadingRules
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_TOKEN_ID
from parley.types import ChatPrompt, Prompt, TextPrompt


def read_openai_tokenize(body: bytes, context: RequestContext | None = None) -> TokenizeRequest:
    """Read a prompt or a conversation to tokenize; without ``context``, only text is accepted. Raises BadRequest."""
    return read_tokenize_members(decode_fields(body), context, OPENAI_RULES)


def read_tokenize_members(fields: Fields, context: RequestContext | None, rules: ReadingRules) -> TokenizeRequest:
    """Read the members of a body to tokenize. Raises BadRequest."""
    prompt = _read_chat_prompt(fields, rules, context) if fields.has_value("messages") else _read_text_prompt(fields)
    return TokenizeRequest(
        model=fields.string("model", "", cap=256),
        prompt=prompt,
        with_pieces=fields.boolean("return_token_strs", False),
    )


def _read_chat_prompt(fields: Fields, rules: ReadingRules, context: RequestContext | None) -> Prompt:
    chat: ChatPrompt
    chat, _ = read_conversation(fields, rules, context)
    return chat


def _read_text_prompt(fields: Fields) -> Prompt:
    text = fields.string("prompt", None)
    if text is None:
        raise fields.missing_member("prompt")
    return TextPrompt(text, fields.boolean("add_special_tokens", True))


def write_openai_tokens(result: TokenizeResult) -> bytes:
    """Return the answer to ``/tokenize``."""
    return encode_json(
        {
            "count": len(result.token_ids),
            "max_model_len": result.max_model_len,
            "tokens": result.token_ids,
            "token_strs": result.pieces,
        }
    )


def read_detokenize(
    body: bytes, wording: ErrorWording = DEFAULT_WORDING, *, ignore_unknown: bool = False
) -> DetokenizeRequest:
    """Read tokens to convert to text. Raises BadRequest."""
    fields = decode_fields(body, wording)
    if not fields.has_value("tokens"):
        raise fields.missing_member("tokens")
    ids = fields.integers("tokens", cap=2**31, low=0, high=MAX_TOKEN_ID)
    return DetokenizeRequest(model=fields.string("model", "", cap=256), token_ids=ids, ignore_unknown=ignore_unknown)


def write_token_text(text: str) -> bytes:
    """Return the answer to ``/detokenize``."""
    return encode_json({"prompt": text})


def model_object(card: ModelCard) -> dict[str, Any]:
    """Return a model as clients get it."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "parley",
        "root": card.adapter_folder or card.name,
        "parent": card.root if card.adapter_folder else None,
        "max_model_len": card.max_model_len,
    }


def write_openai_model(card: ModelCard) -> bytes:
    """Return one model."""
    return encode_json(model_object(card))


def write_openai_models(cards: list[ModelCard]) -> bytes:
    """Return the list of models."""
    return encode_json({"object": "list", "data": [model_object(card) for card in cards]})


def write_openai_version(text: str) -> bytes:
    """Return the server's version."""
    return encode_json({"version": text})


def write_load(requests: int) -> bytes:
    """Return the number of requests being served."""
    return encode_json({"server_load": requests})
