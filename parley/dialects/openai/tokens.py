"""Models, tokens and version: the small routes besides generation, in the form of vLLM's server."""

from __future__ import annotations

from typing import Any

from parley.dialects.facts import Card
from parley.dialects.fields import Fields, decode
from parley.dialects.openai import shared
from parley.dialects.openai.messages import conversation
from parley.dialects.openai.shared import RULES, Rules
from parley.dialects.wishes import Detokenize, Tokenize, Tokenized
from parley.dialects.words import WORDS, Words
from parley.types import Chat, Prompt, Text


def tokenize(body: bytes, words: Words = WORDS, rules: Rules = RULES) -> Tokenize:
    """Read a prompt or a conversation to tokenize. Raises BadRequest."""
    fields = decode(body, words)
    prompt = _chat(fields, rules) if fields.has("messages") else _text(fields)
    return Tokenize(
        model=fields.string("model", "", cap=256),
        prompt=prompt,
        strings=fields.boolean("return_token_strs", False),
    )


def _chat(fields: Fields, rules: Rules) -> Prompt:
    chat: Chat
    chat, _ = conversation(fields, rules)
    return chat


def _text(fields: Fields) -> Prompt:
    text = fields.string("prompt", None)
    if text is None:
        raise fields.missing("prompt")
    return Text(text, fields.boolean("add_special_tokens", True))


def tokenized(result: Tokenized) -> bytes:
    """Return the answer to ``/tokenize``."""
    return shared.encode(
        {
            "count": len(result.ids),
            "max_model_len": result.max_model_len,
            "tokens": result.ids,
            "token_strs": result.strings,
        }
    )


def detokenize(body: bytes, words: Words = WORDS, *, lax: bool = False) -> Detokenize:
    """Read tokens to convert to text. Raises BadRequest."""
    fields = decode(body, words)
    if not fields.has("tokens"):
        raise fields.missing("tokens")
    ids = fields.integers("tokens", cap=2**31, low=0, high=shared.MAX_ID)
    return Detokenize(model=fields.string("model", "", cap=256), ids=ids, lax=lax)


def detokenized(text: str) -> bytes:
    """Return the answer to ``/detokenize``."""
    return shared.encode({"prompt": text})


def _card(card: Card) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "parley",
        "root": card.folder or card.name,
        "parent": card.root if card.folder else None,
        "max_model_len": card.max_model_len,
    }


def model(card: Card) -> bytes:
    """Return one model."""
    return shared.encode(_card(card))


def models(cards: list[Card]) -> bytes:
    """Return the list of models."""
    return shared.encode({"object": "list", "data": [_card(card) for card in cards]})


def version(text: str) -> bytes:
    """Return the server's version."""
    return shared.encode({"version": text})


def load(requests: int) -> bytes:
    """Return the number of requests being served."""
    return shared.encode({"server_load": requests})
