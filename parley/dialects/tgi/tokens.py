"""The small routes: server information, the list of models, and tokenization of texts and conversations."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from parley.dialects.admin_requests import TokenizeRequest, TokenizeResult
from parley.dialects.facts import ModelCard, ServerInfo
from parley.dialects.fields import MAX_U64, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.request_context import RequestContext
from parley.dialects.tgi import images, messages
from parley.dialects.tgi.api_rules import TGI_VERSION, TgiRules
from parley.dialects.tgi.refusal_wording import TGI_WORDING
from parley.types import TextPrompt

OLD_VERSION = "0.9.4"


def write_tgi_info(rules: TgiRules, server_info: ServerInfo) -> bytes:
    """Return the body of ``GET /info``; version 0.9.4 has other members."""
    context = server_info.card.max_model_len
    max_input = None if context is None else context - 1
    model: dict[str, Any] = {"model_id": server_info.card.name, "model_sha": None}
    limits = {
        "max_concurrent_requests": server_info.slots,
        "max_best_of": rules.max_best_of,
        "max_stop_sequences": rules.max_stops,
    }
    if rules.old:
        info_object = model | {
            "model_dtype": f"torch.{server_info.dtype}",
            "model_device_type": server_info.device.partition(":")[0],
            "model_pipeline_tag": "text-generation",
            **limits,
            "max_input_length": max_input,
            "max_total_tokens": context,
            "waiting_served_ratio": 0.0,
            "max_batch_total_tokens": server_info.slots * (context or 0),
            "max_waiting_tokens": 0,
            "validation_workers": 1,
            "version": OLD_VERSION,
        }
    else:
        info_object = model | {
            "model_pipeline_tag": "text-generation",
            **limits,
            "max_input_tokens": max_input,
            "max_total_tokens": context,
            "validation_workers": 1,
            "max_client_batch_size": rules.max_prompts,
            "router": "text-generation-router",
            "version": TGI_VERSION,
        }
    return encode_json(info_object | {"sha": None, "docker_label": f"parley-{server_info.version}"})


def write_tgi_models(cards: list[ModelCard]) -> bytes:
    """Return the list of models in OpenAI's format."""
    models = [{"id": card.name, "object": "model", "created": 0, "owned_by": card.name} for card in cards]
    return encode_json({"object": "list", "data": models})


def read_tgi_tokenize(body: bytes, context: RequestContext | None = None) -> TokenizeRequest:
    """Read the body of a generation; only its text and ``truncate`` count. Raises BadRequest."""
    fields = decode_fields(body, TGI_WORDING)
    inputs = fields.string("inputs", None)
    if inputs is None:
        raise (
            fields.mistyped_member("inputs", "a string")
            if fields.is_null("inputs")
            else fields.missing_member("inputs")
        )
    parameters = fields.object("parameters")
    truncate = parameters.integer("truncate", None, 0, MAX_U64) if parameters is not None else None
    prompt = TextPrompt(inputs) if context is None else images.read_text_with_images(inputs, "inputs", context)
    return TokenizeRequest(model="", prompt=prompt, with_spans=True, last_tokens=truncate)


def read_chat_tokenize(body: bytes, context: RequestContext | None = None) -> TokenizeRequest:
    """Read a conversation; if the assistant has the last turn, it is left open. Raises BadRequest."""
    prompt = messages.read_tgi_conversation(decode_fields(body, TGI_WORDING), context)
    return TokenizeRequest(model="", prompt=prompt, with_spans=True)


def write_tgi_tokens(result: TokenizeResult) -> bytes:
    """Return the tokens of a text as JSON."""
    return encode_json(_token_spans(result))


def write_chat_tokens(result: TokenizeResult) -> bytes:
    """Return the tokens of a conversation and its rendered text as JSON."""
    return encode_json({"tokenize_response": _token_spans(result), "templated_text": result.text})


def _token_spans(result: TokenizeResult) -> list[dict[str, Any]]:
    """Return each token with its text and the byte offsets of that text in UTF-8."""
    text = result.text
    byte_offsets: Any = range(len(text) + 1)
    if not text.isascii():
        byte_offsets = list(accumulate((len(character.encode()) for character in text), initial=0))
    return [
        {"id": token_id, "text": text[start:stop], "start": byte_offsets[start], "stop": byte_offsets[stop]}
        for token_id, (start, stop) in zip(result.token_ids, result.spans, strict=True)
    ]
