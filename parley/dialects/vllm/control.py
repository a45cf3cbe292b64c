"""The small routes of vLLM's server: models, tokens, versions, the prefix cache, and calls that are not answered."""

from __future__ import annotations

from typing import Any, NoReturn
from urllib.parse import parse_qs

from parley.dialects.dialect import Answer, Card, Detokenize, Facts, Head, Reply, Tokenize
from parley.dialects.fields import decode
from parley.dialects.openai import tokens
from parley.dialects.vllm import chat, completions, embeddings, requests, shared
from parley.dialects.vllm.words import FALSE, TRUE, WORDS


def models(body: bytes, head: Head, facts: Facts) -> Answer:
    """A card per name; times and ids are new in each answer, as there."""
    cards = [_card(card, number, head) for number, card in enumerate(facts.cards)]
    return Answer(body=shared.encode({"object": "list", "data": cards}))


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
        "root": card.root,
        "parent": None,
        "max_model_len": card.max_model_len,
        "permission": [permission],
    }


def invoked(body: bytes, head: Head) -> Reply | Answer:
    """A conversation, a plain prompt or texts to embed, whichever the body is. Raises BadRequest."""
    requests.check_type(head)
    fields = decode(body, WORDS)
    if fields.has("input"):
        return embeddings.read(body, head)
    if fields.has("messages") or not (fields.has("prompt") or fields.has("prompt_embeds")):
        return chat.read(body, head)
    return completions.read(body, head)


def tokenize(body: bytes) -> Tokenize:
    """Raises BadRequest."""
    return tokens.tokenize(body, WORDS, requests.RULES)


def detokenize(body: bytes) -> Detokenize:
    """Raises BadRequest."""
    return tokens.detokenize(body, WORDS, lax=True)


def version(text: str) -> bytes:
    return shared.encode({"version": shared.SPOKEN})


def put_back(head: Head) -> bool:
    """May what runs be put back in the queue, so that the cache can be emptied? Raises BadRequest."""
    given = parse_qs(head.query.decode("latin-1"), max_num_fields=64) if head.query.count(b"&") < 64 else {}
    text = given.get("reset_running_requests", ["false"])[-1].strip().lower()
    if text not in TRUE | FALSE:
        raise WORDS.mistyped("reset_running_requests", "a boolean", text)
    return text in TRUE


def was_reset(done: bool) -> bytes:
    return shared.encode({"success": done})


def unbuilt(what: str, body: bytes, head: Head, facts: Facts) -> NoReturn:
    """Raises Unbuilt."""
    raise shared.Unbuilt(f"{what} not available on this server.")
