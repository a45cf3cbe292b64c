"""The small routes of vLLM's server: models, tokens, versions, the prefix cache, and calls that are not supported."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NoReturn
from urllib.parse import parse_qs

from parley.dialects.admin_requests import AdapterChange, DetokenizeRequest, TokenizeRequest
from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.fields import decode_fields
from parley.dialects.json_answer import encode_json, json_answer
from parley.dialects.openai import tokens
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import chat, completions, requests
from parley.dialects.vllm.error_answers import ADAPTER_ERROR_TYPE, UnsupportedCall, vllm_error_answer
from parley.dialects.vllm.pooling import classify, embeddings, scores
from parley.dialects.vllm.refusal_wording import FALSE_TEXTS, TRUE_TEXTS, VLLM_WORDING
from parley.errors import InvalidValue, NotFound, ParleyError

VLLM_VERSION = "0.33.0"  # the version of the original whose API this is; clients use it to detect features
ADAPTER_NAME = re.compile(r"[\w.:/@-]{1,256}", re.ASCII)
PLAIN_TEXT = b"text/plain; charset=utf-8"


def answer_vllm_models(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return one card per name. As in the original, times and ids are new in each answer."""
    cards = [_vllm_model_object(card, number, context) for number, card in enumerate(facts.cards)]
    return json_answer({"object": "list", "data": cards})


def read_load_adapter(strict: bool, body: bytes, context: RequestContext) -> AdapterChange:
    """Read a request to load an adapter. Raises BadRequest."""
    fields = decode_fields(body, VLLM_WORDING)
    name, path = fields.string("lora_name", ""), fields.string("lora_path", "")
    if not name or not path:
        raise _adapter_error("Both 'lora_name' and 'lora_path' must be provided.")
    if not ADAPTER_NAME.fullmatch(name):
        raise _adapter_error("'lora_name' must be 1 to 256 letters, digits and signs of ._:/@- without blanks.")
    replace = fields.boolean("load_inplace", False)
    fields.boolean("is_3d_lora_weight", False)
    sentence = f"Success: LoRA adapter '{name}' added successfully."
    return AdapterChange(
        name,
        path,
        Answer(body=sentence.encode(), content_type=PLAIN_TEXT),
        replace,
        render_failure=partial(_adapter_refusal, strict),
    )


def read_unload_adapter(strict: bool, body: bytes, context: RequestContext) -> AdapterChange:
    """Read a request to unload an adapter. Raises BadRequest."""
    fields = decode_fields(body, VLLM_WORDING)
    name = fields.string("lora_name", "")
    fields.integer("lora_int_id", None)
    if not name:
        raise _adapter_error("'lora_name' needs to be provided to unload a LoRA adapter.")
    sentence = f"Success: LoRA adapter '{name[:256]}' removed successfully."
    return AdapterChange(
        name,
        None,
        Answer(body=sentence.encode(), content_type=PLAIN_TEXT),
        render_failure=partial(_adapter_refusal, strict),
    )


def _adapter_error(message: str) -> InvalidValue:
    return InvalidValue(message, code=ADAPTER_ERROR_TYPE)


def _adapter_refusal(strict: bool, error: ParleyError) -> Answer:
    """Return the answer to a failed adapter request, whose error types differ from other routes'. The original has no
    such path unless it may load adapters."""
    if not isinstance(error, NotFound) or (strict and error.field is None):
        return vllm_error_answer(error)
    error_object = {"message": error.message, "type": "NotFoundError", "param": error.field, "code": 404}
    return Answer(404, encode_json({"error": error_object}))


def _vllm_model_object(card: ModelCard, number: int, context: RequestContext) -> dict[str, Any]:
    permission_id = f"{int(context.unique_id[:16], 16) + number & (1 << 64) - 1:016x}"
    permission = {
        "id": f"modelperm-{permission_id}",
        "object": "model_permission",
        "created": context.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": card.name,
        "object": "model",
        "created": context.created,
        "owned_by": "vllm",
        "root": card.adapter_folder or card.root,
        "parent": card.root if card.adapter_folder else None,
        "max_model_len": None if card.adapter_folder else card.max_model_len,
        "permission": [permission],
    }


def read_vllm_invocation(body: bytes, context: RequestContext) -> Reply | Answer:
    """Read a conversation, a plain prompt, or texts to embed, classify or compare, depending on the body and the model.

    Raises BadRequest.
    """
    requests.check_content_type(context)
    fields = decode_fields(body, VLLM_WORDING)
    messages = fields.raw_value("messages")
    has_conversations = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)  # to embed
    computes_numbers = messages is not None and (has_conversations or not context.generates)
    if computes_numbers or fields.has_value("input") or fields.has_value("encoding_format"):
        return (classify.read_classification if context.labels else embeddings.read_vllm_embedding)(body, context)
    if not fields.has_value("messages"):
        if fields.has_value("prompt") or fields.has_value("prompt_embeds"):
            return completions.read_vllm_completion(body, context)
        if scores.fits_score(fields):
            return scores.read_score_request(body, context)
        if scores.fits_rerank(fields):
            return scores.read_rerank_request(body, context)
    return chat.read_vllm_chat(body, context)


def read_vllm_tokenize(body: bytes, context: RequestContext | None = None) -> TokenizeRequest:
    """Read a prompt or a conversation to tokenize. Raises BadRequest."""
    fields = decode_fields(body, VLLM_WORDING)
    if fields.has_value("messages"):
        requests.check_template(fields)
    return tokens.read_tokenize_members(fields, context, requests.VLLM_RULES)


def read_vllm_detokenize(body: bytes) -> DetokenizeRequest:
    """Read tokens to convert to text. Raises BadRequest."""
    return tokens.read_detokenize(body, VLLM_WORDING, ignore_unknown=True)


def write_vllm_version(text: str) -> bytes:
    """Return the version of the original whose API this is."""
    return encode_json({"version": VLLM_VERSION})


def answer_event_sources(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return where events of the prefix cache are published, as the original's ``KVEventsConfig`` for its only rank."""
    events = facts.cache_events
    if events is None:
        return json_answer({})
    source = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events.endpoint,
        "replay_endpoint": events.replay_endpoint or None,
        "buffer_steps": events.buffer_steps,
        "hwm": events.high_water_mark,
        "max_queue_size": 100_000,  # the original's; here the queue has no limit
        "topic": events.topic,
    }
    return json_answer({"0": source})


def read_cache_reset(context: RequestContext) -> bool:
    """Return whether running requests may be preempted so that the cache can be cleared. Raises BadRequest."""
    query = (
        parse_qs(context.query_string.decode("latin-1"), max_num_fields=64)
        if context.query_string.count(b"&") < 64
        else {}
    )
    text = query.get("reset_running_requests", ["false"])[-1].strip().lower()
    if text not in TRUE_TEXTS | FALSE_TEXTS:
        raise VLLM_WORDING.type_error("reset_running_requests", "a boolean", text)
    return text in TRUE_TEXTS


def write_reset_done(done: bool) -> bytes:
    """Return whether the cache was cleared."""
    return encode_json({"success": done})


def refuse_unsupported(subject: str, body: bytes, context: RequestContext, facts: ServerFacts) -> NoReturn:
    """Raise UnsupportedCall, for a call that is not supported."""
    raise UnsupportedCall(f"{subject} not available on this server.")
