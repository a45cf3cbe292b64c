"""The small routes: server information, the list of models, and tokenization of texts and conversations."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from parley.dialects.facts import About, Card
from parley.dialects.fields import decode
from parley.dialects.tgi import messages, shared
from parley.dialects.tgi.shared import SPOKEN, WORDS, Rules
from parley.dialects.wishes import Tokenize, Tokenized
from parley.errors import Invalid
from parley.types import Text

OLD = "0.9.4"


def info(rules: Rules, about: About) -> bytes:
    """Return the body of ``GET /info``; version 0.9.4 has other members."""
    context = about.card.max_model_len
    longest = None if context is None else context - 1
    model: dict[str, Any] = {"model_id": about.card.name, "model_sha": None}
    limits = {
        "max_concurrent_requests": about.places,
        "max_best_of": rules.max_best_of,
        "max_stop_sequences": rules.max_stops,
    }
    if rules.old:
        told = model | {
            "model_dtype": f"torch.{about.dtype}",
            "model_device_type": about.device.partition(":")[0],
            "model_pipeline_tag": "text-generation",
            **limits,
            "max_input_length": longest,
            "max_total_tokens": context,
            "waiting_served_ratio": 0.0,
            "max_batch_total_tokens": about.places * (context or 0),
            "max_waiting_tokens": 0,
            "validation_workers": 1,
            "version": OLD,
        }
    else:
        told = model | {
            "model_pipeline_tag": "text-generation",
            **limits,
            "max_input_tokens": longest,
            "max_total_tokens": context,
            "validation_workers": 1,
            "max_client_batch_size": rules.max_prompts,
            "router": "text-generation-router",
            "version": SPOKEN,
        }
    return shared.encode(told | {"sha": None, "docker_label": f"parley-{about.version}"})


def models(cards: list[Card]) -> bytes:
    """Return the list of models in OpenAI's format."""
    listed = [{"id": card.name, "object": "model", "created": 0, "owned_by": card.name} for card in cards]
    return shared.encode({"object": "list", "data": listed})


def tokenize(body: bytes) -> Tokenize:
    """Read the body of a generation; only its text and ``truncate`` count. Raises BadRequest."""
    fields = decode(body, WORDS)
    inputs = fields.string("inputs", None)
    if inputs is None:
        raise fields.mistyped("inputs", "a string") if fields.null("inputs") else fields.missing("inputs")
    parameters = fields.object("parameters")
    truncate = parameters.integer("truncate", None, 0, shared.U64) if parameters is not None else None
    if truncate == 0:
        raise Invalid("`truncate` must be strictly positive. Given: 0", field="truncate")
    return Tokenize(model="", prompt=Text(inputs), spans=True, truncate=truncate)


def chat_tokenize(body: bytes) -> Tokenize:
    """Read a conversation; if the assistant has the last turn, it is left open. Raises BadRequest."""
    return Tokenize(model="", prompt=messages.talk(decode(body, WORDS)), spans=True)


def tokenized(result: Tokenized) -> bytes:
    """Return the tokens of a text as JSON."""
    return shared.encode(_tokens(result))


def chat_tokenized(result: Tokenized) -> bytes:
    """Return the tokens of a conversation and its rendered text as JSON."""
    return shared.encode({"tokenize_response": _tokens(result), "templated_text": result.text})


def _tokens(result: Tokenized) -> list[dict[str, Any]]:
    """Return each token with its text and the byte offsets of that text in UTF-8."""
    text = result.text
    place: Any = range(len(text) + 1)
    if not text.isascii():
        place = list(accumulate((len(character.encode()) for character in text), initial=0))
    return [
        {"id": id, "text": text[start:stop], "start": place[start], "stop": place[stop]}
        for id, (start, stop) in zip(result.ids, result.spans, strict=True)
    ]
