"""Members that other servers, mainly vLLM's, added to OpenAI's API, except sampling, stopping and conversations.

All are read and checked in full. A member that asks for an unsupported feature is refused by name rather than ignored;
null, false, empty and -1 ask for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parley.dialects.dialect import Head
from parley.dialects.fields import INT64, Fields
from parley.dialects.openai import constraints, shared
from parley.dialects.openai.shared import MAX_TOKENS
from parley.dialects.parameters import MAX_ID, MAX_WORDS, truncation
from parley.errors import Invalid
from parley.types import Grammar, Keep

MAX_NAME = 256
MAX_NAMED = 128  # tokens
MAX_SECONDS = 1e9
SALT = 128  # characters
PRIORITY, SALTED = b"x-vllm-priority", b"x-cache-salt"  # headers of a gateway, which override the client's members
NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")
CONTROL = set(map(chr, range(32)))

Read = Callable[[Fields, str], Any]  # returns the value of a member; falsy values ask for nothing


def _boolean(body: Fields, name: str) -> bool:
    return body.boolean(name, False)


def _free(body: Fields, name: str) -> dict[str, Any]:
    return body.free(name)


def _raw(body: Fields, name: str) -> Any:
    return body.raw(name)


# Members that have no effect here, or only together with others.
HARMLESS: dict[str, Read] = {
    "return_token_offsets": _boolean,  # for prompts that are only rendered
    "session_id": lambda body, name: body.string(name, None, cap=MAX_NAME),
    "spaces_between_special_tokens": _boolean,
    "vllm_xargs": lambda body, name: _arguments(body, name),
}

# Members that ask for an unsupported feature, and the subject of the refusal.
FEATURES: dict[str, tuple[str, Read]] = {
    "custom_logit_processor": ("Custom logits processors are", _raw),  # this and the next three are SGLang's
    "lora_path": ("Choosing an adapter otherwise than as the 'model' is", _raw),
    "return_hidden_states": ("Hidden states are", _boolean),
    "stop_regex": ("Stopping at a regular expression is", _raw),
    "logits_processors": ("Custom logits processors are", lambda body, name: body.array(name, cap=MAX_WORDS)),
    "prompt_embeds": ("Embeddings as a prompt are", _raw),
    "web_search_options": ("Web search is", _raw),
    "kv_transfer_params": ("Transfer of KV blocks is", _free),
    "ec_transfer_params": ("Transfer of embeddings is", _free),
    "mm_processor_kwargs": ("Media are", _free),
    "media_io_kwargs": ("Media are", _free),
}


@dataclass(frozen=True, slots=True)
class Extras:
    """The extra members of a request. ``name``: the client's id for it. ``truncate``: the maximum prompt length in
    tokens; of a longer prompt ``keep`` says whether its beginning or its end is kept.

    ``priority``: lower values run earlier. ``grammar``: the constraint on the answer's form. ``seconds``: the time
    limit; the partial answer is returned when it expires. ``budget``: the maximum number of reasoning tokens.
    """

    name: str | None
    salt: str
    truncate: int | None
    keep: Keep
    priority: int
    grammar: Grammar | None = None
    seconds: float | None = None
    budget: int | None = None

    @property
    def members(self) -> dict[str, Any]:
        """These values under the member names of ``Request``."""
        return {
            "salt": self.salt,
            "truncate": self.truncate,
            "keep": self.keep,
            "priority": self.priority,
            "timeout": self.seconds,
            "partial": self.seconds is not None,
        }


def read(body: Fields, head: Head, *, max_tokens: int | None) -> Extras:
    """Read the extra members of a request that generates. Raises BadRequest."""
    _check(body)
    grammar = constraints.read(body)
    truncate, keep = truncation(body, head.context - max(1, max_tokens or 1)), _keep(body, "left")
    budget = body.integer("thinking_token_budget", -1, -1, MAX_TOKENS)
    priority = _priority(body, head.headers)
    seconds = body.number("max_time", None, 0, MAX_SECONDS, open=True)
    told = None if budget < 0 else budget
    return Extras(_name(body), _salt(body, head.headers), truncate, keep, priority, grammar, seconds, told)


def pooling(body: Fields, head: Head) -> Extras:
    """Read those of a request for vectors, where by default a longer text keeps its beginning. Raises BadRequest."""
    body.boolean("padding", None)  # has no effect: nothing is ever padded
    if body.free("mm_processor_kwargs"):
        raise shared.unsupported(body, "mm_processor_kwargs", "Media are")
    truncate, keep = truncation(body, head.context), _keep(body, "right")
    return Extras(_name(body), _salt(body, head.headers), truncate, keep, _priority(body, head.headers))


def named(body: Fields, logprobs: int | None, max_tokens: int | None) -> list[int]:
    """Return additional tokens whose log-probabilities are requested at every position. Raises BadRequest."""
    name = "logprob_token_ids"
    ids = body.integers(name, cap=MAX_NAMED, low=0, high=MAX_ID)
    if ids and logprobs is None:
        raise body.fail(name, "needs 'logprobs'.")
    if ids and max_tokens == 0:
        raise body.fail(name, "needs output tokens, but 'max_tokens' is 0.")
    return list(dict.fromkeys(ids))


def _check(body: Fields) -> None:
    """Check the members that have no effect or are not supported. Only present ones are read: most have none."""
    for name in body.among(HARMLESS):
        HARMLESS[name](body, name)
    for name in body.among(FEATURES):
        subject, read = FEATURES[name]
        if read(body, name):
            raise shared.unsupported(body, name, subject)


def _name(body: Fields) -> str | None:
    """Return the client's id for the request."""
    name = body.string("request_id", None, cap=MAX_NAME)
    if name is not None and (not name or not CONTROL.isdisjoint(name)):
        raise body.fail("request_id", "must be text without control characters.")
    return name


def _priority(body: Fields, headers: Mapping[bytes, bytes]) -> int:
    """Return the priority; the header wins over the member."""
    priority = body.integer("priority", 0)
    if (said := headers.get(PRIORITY)) is None:
        return priority
    if not NUMBER.fullmatch(said) or not INT64[0] <= int(said) <= INT64[1]:
        raise Invalid("The header X-Vllm-Priority must be an integer of 64 bits.", field="priority")
    return int(said)


def _arguments(body: Fields, member: str) -> None:
    for name, value in body.free(member).items():
        if not isinstance(value, str | int | float | list):
            raise body.fail(member, f"'{name[:40]}' must be a string, a number or an array.")


def _salt(body: Fields, headers: Mapping[bytes, bytes]) -> str:
    """Return the salt that separates a request's cached prefixes from others; the header wins over the member."""
    if (said := headers.get(SALTED)) is not None:
        body = body.without({"cache_salt"}).over({"cache_salt": said.decode("latin-1")})
    if not body.has("cache_salt"):
        return ""
    salt = body.string("cache_salt", "", cap=SALT)
    if not salt or not set("@/\\\0").isdisjoint(salt):
        raise body.fail("cache_salt", "must be 1 to 128 characters, none of them @, /, \\ or NUL.")
    return salt


def _keep(body: Fields, usual: str) -> Keep:
    """Return the side to keep; ``truncation_side`` names the side to cut."""
    return "head" if body.string("truncation_side", usual, allowed=("left", "right")) == "right" else "tail"
