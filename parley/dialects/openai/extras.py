"""Members that other servers, vLLM's above all, added to OpenAI's API, but for sampling, stopping and conversations.

All are read and checked in full. What asks for a feature that is not there is refused by name, rather than answered
as if it had been done; null, false, empty and -1 ask for nothing.
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
PRIORITY, SALTED = b"x-vllm-priority", b"x-cache-salt"  # headers, by which a gateway may know better than the client
NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")
CONTROL = set(map(chr, range(32)))

Read = Callable[[Fields, str], Any]  # what a member asks for; nothing, if it is empty or 0


def _boolean(body: Fields, name: str) -> bool:
    return body.boolean(name, False)


def _free(body: Fields, name: str) -> dict[str, Any]:
    return body.free(name)


def _raw(body: Fields, name: str) -> Any:
    return body.raw(name)


# Members that change nothing here, or only together with others.
HARMLESS: dict[str, Read] = {
    "return_token_offsets": _boolean,  # of prompts that are only rendered
    "session_id": lambda body, name: body.string(name, None, cap=MAX_NAME),
    "spaces_between_special_tokens": _boolean,
    "vllm_xargs": lambda body, name: _arguments(body, name),
}

# Members that ask for a feature which is not there, and what to call it.
FEATURES: dict[str, tuple[str, Read]] = {
    "custom_logit_processor": ("Custom logits processors are", _raw),  # this one and the next three are SGLang's
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
    """``name``: what the client calls the request. ``truncate``: of a longer prompt only so many tokens, of its
    beginning or its end as ``keep`` says.

    ``priority``: lower is sooner, here as there. ``grammar``: the form that the answer is to have. ``seconds``: after
    so many the answer ends with what there is. ``budget``: how many tokens of reasoning there may be.
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
        """What any request says of these, under its own names."""
        return {
            "salt": self.salt,
            "truncate": self.truncate,
            "keep": self.keep,
            "priority": self.priority,
            "timeout": self.seconds,
            "partial": self.seconds is not None,
        }


def read(body: Fields, head: Head, *, max_tokens: int | None) -> Extras:
    """Raises BadRequest."""
    _check(body)
    grammar = constraints.read(body)
    truncate, keep = truncation(body, head.context - max(1, max_tokens or 1)), _keep(body, "left")
    budget = body.integer("thinking_token_budget", -1, -1, MAX_TOKENS)
    priority = _priority(body, head.headers)
    seconds = body.number("max_time", None, 0, MAX_SECONDS, open=True)
    told = None if budget < 0 else budget
    return Extras(_name(body), _salt(body, head.headers), truncate, keep, priority, grammar, seconds, told)


def pooling(body: Fields, head: Head) -> Extras:
    """The same for a request of vectors: of a longer text the beginning, unless told otherwise. Raises BadRequest."""
    body.boolean("padding", None)  # nothing is ever padded
    if body.free("mm_processor_kwargs"):
        raise shared.unsupported(body, "mm_processor_kwargs", "Media are")
    truncate, keep = truncation(body, head.context), _keep(body, "right")
    return Extras(_name(body), _salt(body, head.headers), truncate, keep, _priority(body, head.headers))


def named(body: Fields, logprobs: int | None, max_tokens: int | None) -> list[int]:
    """Tokens whose log-probabilities are wanted at every place of the output, beside those of its own."""
    name = "logprob_token_ids"
    ids = body.integers(name, cap=MAX_NAMED, low=0, high=MAX_ID)
    if ids and logprobs is None:
        raise body.fail(name, "needs 'logprobs'.")
    if ids and max_tokens == 0:
        raise body.fail(name, "is of tokens that are written, but 'max_tokens' is 0.")
    return list(dict.fromkeys(ids))


def _check(body: Fields) -> None:
    """Most bodies have none of these: only those that are there are read."""
    for name in body.among(HARMLESS):
        HARMLESS[name](body, name)
    for name in body.among(FEATURES):
        subject, read = FEATURES[name]
        if read(body, name):
            raise shared.unsupported(body, name, subject)


def _name(body: Fields) -> str | None:
    """What the client calls the request."""
    name = body.string("request_id", None, cap=MAX_NAME)
    if name is not None and (not name or not CONTROL.isdisjoint(name)):
        raise body.fail("request_id", "must be text without control characters.")
    return name


def _priority(body: Fields, headers: Mapping[bytes, bytes]) -> int:
    """That of the header, if there is one."""
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
    """What keeps a request's cached prefixes apart from those of others; that of the header, if there is one."""
    if (said := headers.get(SALTED)) is not None:
        body = body.without({"cache_salt"}).over({"cache_salt": said.decode("latin-1")})
    if not body.has("cache_salt"):
        return ""
    salt = body.string("cache_salt", "", cap=SALT)
    if not salt or not set("@/\\\0").isdisjoint(salt):
        raise body.fail("cache_salt", "must be 1 to 128 characters, none of them @, /, \\ or NUL.")
    return salt


def _keep(body: Fields, usual: str) -> Keep:
    """``truncation_side`` is the side that is left out."""
    return "head" if body.string("truncation_side", usual, allowed=("left", "right")) == "right" else "tail"
