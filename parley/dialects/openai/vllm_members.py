"""Members that other servers, mainly vLLM's, added to OpenAI's API, except sampling, stopping and conversations.

All are read and checked in full. A member that asks for an unsupported feature is refused by name rather than ignored;
null, false, empty and -1 ask for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from parley.dialects.fields import INT64, Fields
from parley.dialects.openai import constraints
from parley.dialects.openai.common_members import MAX_TOKENS, unsupported_member_error
from parley.dialects.openai.reading_rules import OPENAI_RULES, ReadingRules
from parley.dialects.request_context import ApiOptions, RequestContext
from parley.dialects.sampling_members import MAX_BAD_WORDS, MAX_TOKEN_ID, read_truncation
from parley.errors import InvalidValue
from parley.types import ChatPrompt, Grammar, KeptSide

MAX_NAME_CHARACTERS = 256
MAX_LOGPROB_IDS = 128  # tokens
MAX_SECONDS = 1e9
MAX_SALT_CHARACTERS = 128  # characters
# Headers of a gateway, which override the client's members.
PRIORITY_HEADER = b"x-vllm-priority"
SALT_HEADER = b"x-cache-salt"
PADDING_NAMES = ("do_not_pad", "max_length")
INTEGER_TEXT = re.compile(rb"[+-]?[0-9]{1,19}")
CONTROL_CHARACTERS = set(map(chr, range(32)))

MemberReader = Callable[[Fields, str], Any]  # returns the value of a member; falsy values ask for nothing


def _read_flag(body: Fields, name: str) -> bool:
    return body.boolean(name, False)


def _read_free(body: Fields, name: str) -> dict[str, Any]:
    return body.free_object(name)


def _read_raw(body: Fields, name: str) -> Any:
    return body.raw_value(name)


def _read_presence(body: Fields, name: str) -> bool:
    """Whether the member is there: an empty object asks for the feature with its defaults."""
    return body.has_value(name)


# Of a server whose connector moves KV blocks or embeddings of media. Without a connector, vLLM computes all itself.
TRANSFER_MEMBERS = ("kv_transfer_params", "ec_transfer_params")
# Members that have no effect here, or only together with others.
IGNORED_MEMBERS: dict[str, MemberReader] = {
    "mm_payload": lambda body, name: body.string(name, None, allowed=("tensors", "none")),
    "return_mm_kwargs": _read_flag,
    "return_token_offsets": _read_flag,  # for prompts that are only rendered
    "routed_experts_prompt_start": lambda body, name: body.integer(name, 0, 0, MAX_TOKENS),
    "session_id": lambda body, name: body.string(name, None, cap=MAX_NAME_CHARACTERS),
    "spaces_between_special_tokens": _read_flag,
    "vllm_xargs": lambda body, name: _check_xargs(body, name),
    **dict.fromkeys(TRANSFER_MEMBERS, _read_free),
}

# Members that ask for an unsupported feature, and the subject of the refusal.
UNSUPPORTED_MEMBERS: dict[str, tuple[str, MemberReader]] = {
    "custom_logit_processor": ("Custom logits processors are", _read_raw),  # this and the next three are SGLang's
    "lora_path": ("Choosing an adapter otherwise than as the 'model' is", _read_raw),
    "return_hidden_states": ("Hidden states are", _read_flag),
    "return_weight_versions": ("Versions of weights are", _read_flag),
    "stop_regex": ("Stopping at a regular expression is", _read_raw),
    "logits_processors": ("Custom logits processors are", lambda body, name: body.array(name, cap=MAX_BAD_WORDS)),
    "prompt_embeds": ("Embeddings as a prompt are", _read_raw),
    "web_search_options": ("Web search is", _read_presence),
    "mm_processor_kwargs": ("Media are", _read_free),  # this and the next are those of ``MEDIA_MEMBERS``
    "media_io_kwargs": ("Media are", _read_free),
}
MEDIA_MEMBERS = ("mm_processor_kwargs", "media_io_kwargs")
UNTRUSTED_OPTIONS = "Without --trust-request-mm-kwargs, options of media are"


class VllmMembers(msgspec.Struct, frozen=True):
    """The extra members of a request.

    * ``client_id``: the client's id for it.
    * ``max_prompt_tokens``: the maximum prompt length in tokens.
    * ``kept_side``: whether the beginning or the end of a longer prompt is kept.
    * ``priority``: lower values run earlier.
    * ``grammar``: the constraint on the answer's form.
    * ``time_limit``: the time limit; the partial answer is returned when it expires.
    * ``thinking_budget``: the maximum number of reasoning tokens.
    """

    client_id: str | None
    salt: str
    max_prompt_tokens: int | None
    kept_side: KeptSide
    priority: int
    grammar: Grammar | None = None
    time_limit: float | None = None
    thinking_budget: int | None = None

    @property
    def request_members(self) -> dict[str, Any]:
        """The values, by the names that they have in ``Request``."""
        return {
            "cache_salt": self.salt,
            "max_prompt_tokens": self.max_prompt_tokens,
            "kept_side": self.kept_side,
            "priority": self.priority,
            "timeout": self.time_limit,
            "return_partial": self.time_limit is not None,
        }


def with_reused_tokens(body: Fields, chat: ChatPrompt, *, echoes: bool = False) -> ChatPrompt:
    """Return the conversation with its tokens, if the client has them from the server that prefilled it.

    Like vLLM, this ignores them where the messages are needed: with media, and if the answer repeats one (``echoes``).
    Raises BadRequest.
    """
    transfer = body.object("kv_transfer_params")
    if transfer is None or not transfer.has_value("prompt_token_ids"):
        return chat
    if echoes or any(message.media for message in chat.messages):
        return chat
    ids = transfer.raw_value("prompt_token_ids")
    if not isinstance(ids, list) or not ids or any(type(item) is not int or item < 0 for item in ids):
        raise transfer.member_error("prompt_token_ids", "must be a non-empty list of non-negative integers.")
    return msgspec.structs.replace(chat, rendered_ids=ids)


def read_vllm_members(
    body: Fields,
    context: RequestContext,
    *,
    max_tokens: int | None,
    options: ApiOptions | None = None,
    rules: ReadingRules = OPENAI_RULES,
) -> VllmMembers:
    """Read the extra members of a request that generates. Raises BadRequest.

    ``options``: those of the operator, for a request that may have media; None: the request has none.
    """
    _check_other_members(body, options if context.media_limits else None)
    grammar = constraints.read_grammar(body, strict_schemas=rules.strict_schemas)
    truncate = read_truncation(body, context.context_length - max(1, max_tokens or 1))
    keep = _read_kept_side(body, "left")
    budget = body.integer("thinking_token_budget", -1, -1, MAX_TOKENS)
    priority = read_priority(body, context.headers)
    seconds = body.number("max_time", None, 0, MAX_SECONDS, low_excluded=True)
    thinking_budget = None if budget < 0 else budget
    return VllmMembers(
        read_request_id(body),
        read_salt(body, context.headers),
        truncate,
        keep,
        priority,
        grammar,
        seconds,
        thinking_budget,
    )


def read_vllm_pooling_members(body: Fields, context: RequestContext) -> VllmMembers:
    """Read those of a request for vectors, where by default a longer text keeps its beginning. Raises BadRequest."""
    if body.string("padding", None, allowed=PADDING_NAMES) == "max_length":
        raise unsupported_member_error(body, "padding", "Padding to the context length is")
    if body.free_object("mm_processor_kwargs"):
        raise unsupported_member_error(body, "mm_processor_kwargs", "Media are")
    truncate, keep = read_truncation(body, context.context_length), _read_kept_side(body, "right")
    return VllmMembers(
        read_request_id(body), read_salt(body, context.headers), truncate, keep, read_priority(body, context.headers)
    )


def read_logprob_ids(body: Fields, logprobs: int | None, max_tokens: int | None) -> list[int]:
    """Return additional tokens whose log-probabilities are requested at every position. Raises BadRequest."""
    name = "logprob_token_ids"
    ids = body.integers(name, cap=MAX_LOGPROB_IDS, low=0, high=MAX_TOKEN_ID)
    if ids and logprobs is None:
        raise body.member_error(name, "needs 'logprobs'.")
    if ids and max_tokens == 0:
        raise body.member_error(name, "needs output tokens, but 'max_tokens' is 0.")
    return list(dict.fromkeys(ids))


def _check_other_members(body: Fields, options: ApiOptions | None) -> None:
    """Check the members that have no effect or are not supported. Only present ones are read: most have none."""
    for name in body.present_names(IGNORED_MEMBERS):
        IGNORED_MEMBERS[name](body, name)
    for name in body.present_names(UNSUPPORTED_MEMBERS):
        subject, read_member = UNSUPPORTED_MEMBERS[name]
        if name in MEDIA_MEMBERS and options is not None:
            if options.trust_request_mm_kwargs:
                continue
            subject = UNTRUSTED_OPTIONS
        if read_member(body, name):
            raise unsupported_member_error(body, name, subject)


def read_request_id(body: Fields) -> str | None:
    """Return the client's id for the request."""
    name = body.string("request_id", None, cap=MAX_NAME_CHARACTERS)
    if name is not None and (not name or not CONTROL_CHARACTERS.isdisjoint(name)):
        raise body.member_error("request_id", "must be text without control characters.")
    return name


def read_priority(body: Fields, headers: Mapping[bytes, bytes]) -> int:
    """Return the priority; the header wins over the member."""
    priority = body.integer("priority", 0)
    if (header := headers.get(PRIORITY_HEADER)) is None:
        return priority
    if not INTEGER_TEXT.fullmatch(header) or not INT64[0] <= int(header) <= INT64[1]:
        raise InvalidValue("The header X-Vllm-Priority must be an integer of 64 bits.", field="priority")
    return int(header)


def _check_xargs(body: Fields, member: str) -> None:
    for name, value in body.free_object(member).items():
        if not isinstance(value, str | int | float | list):
            raise body.member_error(member, f"'{name[:40]}' must be a string, a number or an array.")


def read_salt(body: Fields, headers: Mapping[bytes, bytes]) -> str:
    """Return the salt that separates a request's cached prefixes from others; the header wins over the member."""
    if (header := headers.get(SALT_HEADER)) is not None:
        body = body.with_members({"cache_salt": header.decode("latin-1")})
    if not body.has_value("cache_salt"):
        return ""
    salt = body.string("cache_salt", "", cap=MAX_SALT_CHARACTERS)
    if not salt or not set("@/\\\0").isdisjoint(salt):
        raise body.member_error("cache_salt", "must be 1 to 128 characters, none of them @, /, \\ or NUL.")
    return salt


def _read_kept_side(body: Fields, default_side: str) -> KeptSide:
    """Return the side to keep; ``truncation_side`` names the side to cut."""
    return "head" if body.string("truncation_side", default_side, allowed=("left", "right")) == "right" else "tail"
