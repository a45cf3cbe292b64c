"""Members that vLLM's server added to OpenAI's API and that have no place in sampling, stopping or the conversation.

All are read and checked in full. What asks for a feature that is not there is refused by name, rather than answered
as if it had been done; null, false, empty and -1 ask for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from parley.dialects.fields import Fields
from parley.dialects.openai import constraints, shared
from parley.dialects.openai.shared import MAX_ID, MAX_STOP_CHARACTERS, MAX_TOKENS

MAX_LIST = 1 << 20  # token ids in a list
MAX_WORDS = 1024
MAX_NAME = 256
SALT = 128  # characters
CONTROL = set(map(chr, range(32)))


@dataclass(frozen=True, slots=True)
class Extras:
    """``name``: what the client calls the request. ``truncate``: of a longer prompt only the last so many tokens."""

    name: str | None
    salt: str
    truncate: int | None


def read(body: Fields, *, context: int, max_tokens: int | None) -> Extras:
    """``context``: of the model, in tokens. Raises BadRequest."""
    _check(body)
    _refuse(body)
    constraints.refuse(body)
    name = body.string("request_id", None, cap=MAX_NAME)
    if name is not None and (not name or not CONTROL.isdisjoint(name)):
        raise body.fail("request_id", "must be text without control characters.")
    return Extras(name, _salt(body), _truncate(body, context, max_tokens))


def _check(body: Fields) -> None:
    """Members that change nothing here, or only together with others: their types."""
    body.integer("priority", 0)  # requests are served in the order of their arrival
    body.string("session_id", None, cap=MAX_NAME)
    body.boolean("spaces_between_special_tokens", True)
    body.number("length_penalty", 1.0)
    early = body.raw("early_stopping")
    if early != "never":
        body.boolean("early_stopping", False)
    for name, value in body.free("vllm_xargs").items():
        if not isinstance(value, str | int | float | list):
            raise body.fail("vllm_xargs", f"'{name[:40]}' must be a string, a number or an array.")


def _refuse(body: Fields) -> None:
    detection = body.object("repetition_detection")
    sizes = 0
    if detection is not None:
        sizes = detection.integer("max_pattern_size", 0, 0, MAX_TOKENS)
        detection.integer("min_pattern_size", 0, 0, MAX_TOKENS)
        detection.integer("min_count", 0, 0, MAX_TOKENS)
    ids = {"cap": MAX_LIST, "low": 0, "high": MAX_ID}
    wishes = {
        "use_beam_search": ("Beam search is", body.boolean("use_beam_search", False)),
        "logits_processors": ("Custom logits processors are", body.array("logits_processors", cap=MAX_WORDS)),
        "bad_words": (
            "Banned words are",
            body.strings("bad_words", cap=MAX_WORDS, total=MAX_STOP_CHARACTERS),
        ),
        "allowed_token_ids": ("Restricting the vocabulary is", body.integers("allowed_token_ids", **ids)),
        "logprob_token_ids": ("Log-probabilities of chosen tokens are", body.integers("logprob_token_ids", **ids)),
        "thinking_token_budget": (
            "A budget for thinking is",
            body.integer("thinking_token_budget", -1, -1, MAX_TOKENS) >= 0,
        ),
        "repetition_detection": ("Detection of repetition is", sizes),
        "stream_interval": (
            "Several tokens in one chunk are",
            body.integer("stream_interval", 1, 1, MAX_TOKENS) > 1,
        ),
        "return_token_offsets": ("Places of tokens in the text are", body.boolean("return_token_offsets", False)),
        "return_prompt_text": ("The prompt's text in the answer is", body.boolean("return_prompt_text", False)),
        "prompt_embeds": ("Embeddings as a prompt are", body.raw("prompt_embeds")),
        "web_search_options": ("Web search is", body.raw("web_search_options")),
        "kv_transfer_params": ("Transfer of KV blocks is", body.free("kv_transfer_params")),
        "ec_transfer_params": ("Transfer of embeddings is", body.free("ec_transfer_params")),
        "mm_processor_kwargs": ("Media are", body.free("mm_processor_kwargs")),
        "media_io_kwargs": ("Media are", body.free("media_io_kwargs")),
    }
    for name, (subject, wished) in wishes.items():
        if wished:
            raise shared.unsupported(body, name, subject)


def _salt(body: Fields) -> str:
    """What keeps a request's cached prefixes apart from those of others."""
    salt = body.string("cache_salt", "", cap=SALT)
    if body.has("cache_salt") and (not salt or not set("@/\\\0").isdisjoint(salt)):
        raise body.fail("cache_salt", "must be 1 to 128 characters, none of them @, /, \\ or NUL.")
    return salt


def _truncate(body: Fields, context: int, max_tokens: int | None) -> int | None:
    """-1: as many as leave room for the output."""
    count = body.integer("truncate_prompt_tokens", None, -1, MAX_TOKENS)
    side = body.string("truncation_side", "left", allowed=("left", "right"))
    if count is None:
        return None
    if count == 0:
        raise body.fail("truncate_prompt_tokens", "must be -1 or at least 1, but got 0.")
    if side == "right":
        raise shared.unsupported(body, "truncation_side", "Leaving out the end of the prompt is")
    return count if count > 0 else max(1, context - max(1, max_tokens or 1))
