"""The small routes of vLLM's server: models, tokens, versions, the prefix cache, and calls that are not supported."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NoReturn
from urllib.parse import parse_qs

from parley.dialects.dialect import Answer, Head, Reply
from parley.dialects.facts import Card, Facts
from parley.dialects.fields import decode
from parley.dialects.openai import tokens
from parley.dialects.vllm import chat, completions, embeddings, requests, scores, shared
from parley.dialects.vllm.shared import UNUSABLE
from parley.dialects.vllm.words import FALSE, TRUE, WORDS
from parley.dialects.wishes import Adapt, Detokenize, Tokenize
from parley.errors import Invalid, NotFound, ParleyError

NAME = re.compile(r"[\w.:/@-]{1,256}", re.ASCII)
TEXT = b"text/plain; charset=utf-8"


def models(body: bytes, head: Head, facts: Facts) -> Answer:
    """Return one card per name. As in the original, times and ids are new in each answer."""
    cards = [_card(card, number, head) for number, card in enumerate(facts.cards)]
    return Answer(body=shared.encode({"object": "list", "data": cards}))


def load_adapter(strict: bool, body: bytes, head: Head) -> Adapt:
    """Read a request to load an adapter. Raises BadRequest."""
    fields = decode(body, WORDS)
    name, path = fields.string("lora_name", ""), fields.string("lora_path", "")
    if not name or not path:
        raise _unusable("Both 'lora_name' and 'lora_path' must be provided.")
    if not NAME.fullmatch(name):
        raise _unusable("'lora_name' must be 1 to 256 letters, digits and signs of ._:/@- without blanks.")
    replace = fields.boolean("load_inplace", False)
    fields.boolean("is_3d_lora_weight", False)
    told = f"Success: LoRA adapter '{name}' added successfully."
    return Adapt(name, path, Answer(body=told.encode(), type=TEXT), replace, failed=partial(_refused, strict))


def unload_adapter(strict: bool, body: bytes, head: Head) -> Adapt:
    """Read a request to unload an adapter. Raises BadRequest."""
    fields = decode(body, WORDS)
    name = fields.string("lora_name", "")
    fields.integer("lora_int_id", None)
    if not name:
        raise _unusable("'lora_name' needs to be provided to unload a LoRA adapter.")
    told = f"Success: LoRA adapter '{name[:256]}' removed successfully."
    return Adapt(name, None, Answer(body=told.encode(), type=TEXT), failed=partial(_refused, strict))


def _unusable(message: str) -> Invalid:
    return Invalid(message, code=UNUSABLE)


def _refused(strict: bool, error: ParleyError) -> Answer:
    """Return the answer to a failed adapter request, whose error types differ from other routes'. The original has no
    such path unless it may load adapters."""
    if not isinstance(error, NotFound) or (strict and error.field is None):
        return shared.error(error)
    told = {"message": error.message, "type": "NotFoundError", "param": error.field, "code": 404}
    return Answer(404, shared.encode({"error": told}))


def _card(card: Card, number: int, head: Head) -> dict[str, Any]:
    id = f"{int(head.id[:16], 16) + number & (1 << 64) - 1:016x}"
    permission = {
        "id": f"modelperm-{id}",
        "object": "model_permission",
        "created": head.created,
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
        "created": head.created,
        "owned_by": "vllm",
        "root": card.folder or card.root,
        "parent": card.root if card.folder else None,
        "max_model_len": None if card.folder else card.max_model_len,
        "permission": [permission],
    }


def invoked(body: bytes, head: Head) -> Reply | Answer:
    """Read a conversation, a plain prompt, or texts to embed or compare, depending on the body. Raises BadRequest."""
    requests.check_type(head)
    fields = decode(body, WORDS)
    if fields.has("input") or fields.has("encoding_format"):
        return embeddings.read(body, head)
    if not fields.has("messages"):
        if fields.has("prompt") or fields.has("prompt_embeds"):
            return completions.read(body, head)
        if scores.fits_score(fields):
            return scores.score(body, head)
        if scores.fits_rerank(fields):
            return scores.rerank(body, head)
    return chat.read(body, head)


def tokenize(body: bytes) -> Tokenize:
    """Read a prompt or a conversation to tokenize. Raises BadRequest."""
    return tokens.tokenize(body, WORDS, requests.RULES)


def detokenize(body: bytes) -> Detokenize:
    """Read tokens to convert to text. Raises BadRequest."""
    return tokens.detokenize(body, WORDS, lax=True)


def version(text: str) -> bytes:
    """Return the version of the original whose API this is."""
    return shared.encode({"version": shared.SPOKEN})


def put_back(head: Head) -> bool:
    """Return whether running requests may be preempted so that the cache can be cleared. Raises BadRequest."""
    given = parse_qs(head.query.decode("latin-1"), max_num_fields=64) if head.query.count(b"&") < 64 else {}
    text = given.get("reset_running_requests", ["false"])[-1].strip().lower()
    if text not in TRUE | FALSE:
        raise WORDS.mistyped("reset_running_requests", "a boolean", text)
    return text in TRUE


def was_reset(done: bool) -> bytes:
    """Return whether the cache was cleared."""
    return shared.encode({"success": done})


def unbuilt(what: str, body: bytes, head: Head, facts: Facts) -> NoReturn:
    """Raise Unbuilt, for a call that is not supported."""
    raise shared.Unbuilt(f"{what} not available on this server.")
