"""Prompts of MindIE's interfaces: a text, or a list of parts that may include media; and their refusals.

Each interface has its own name for the input and its own sentences for faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parley.dialects.fields import Fields
from parley.dialects.media import check_media_counts, interleave_parts
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.members.media import URL_KINDS, MediaPartReader
from parley.dialects.mindie.members.text_length import utf16_length
from parley.dialects.request_context import RequestContext
from parley.errors import BadRequest
from parley.types import Media, MediaKind, TextPrompt

PART_TYPES = ("text", *URL_KINDS)
MAX_MEDIA = 20  # images, videos and clips of a prompt or message, those in ``input_audio`` not counted
MAX_INPUT_IDS = 1_048_576  # tokens of an input, independent of the model
LENGTH_TEMPLATE = (
    "{} must be necessary and data type must be string and length in (0, {{1}}], but the length of inputs is {{0}}"
)


@dataclass(frozen=True, slots=True)
class PromptInput:
    """The name of a member, and the sentences of its refusals. In ``wrong_length``, {0} is the length and {1} the
    limit; in ``wrong_type``, {} is the request's id. ``no_tokens`` refuses a text that yields no tokens."""

    name: str
    missing: str
    wrong_type: str
    empty: str
    wrong_length: str
    no_tokens: str


TGI_INPUT = PromptInput(
    "inputs",
    "Request should contain 'inputs' and the type should be string.",
    "The type of inputs is abnormal",
    "Inputs arr is empty",
    "Inputs length must be in (0, {1}], but got {0}",
    f"Inputs token length must be in (0, {MAX_INPUT_IDS}], but got 0",
)
NATIVE_INPUT = PromptInput(
    "inputs",
    "Not found inputs.",
    TGI_INPUT.wrong_type,
    TGI_INPUT.empty,
    LENGTH_TEMPLATE.format("Inputs"),
    TGI_INPUT.no_tokens,
)
VLLM_INPUT = PromptInput(
    "prompt",
    "Contains not prompt or prompt null",
    "The type of prompt is abnormal",
    "Prompt arr is empty",
    LENGTH_TEMPLATE.format("Prompt"),
    f"Messages token length must be in (0, {MAX_INPUT_IDS}], but got 0. This could be caused by invalid input "
    "format or empty "
    "content.",
)
TRITON_INPUT = PromptInput(
    "text_input",
    "The text_input not found",
    "The type of text_input is abnormal. The requestId is {}",
    "Parameter text_input arr is empty",
    LENGTH_TEMPLATE.format("text_input"),
    f"text_input token length must be in (0, {MAX_INPUT_IDS}], but got 0",
)


def read_prompt_text(
    body: Fields, prompt_input: PromptInput, rules: MindieRules, context: RequestContext, request_id: str = ""
) -> TextPrompt:
    """Return the text, or the joined texts of a list of parts with the items among them. Raises BadRequest.

    A list with media is a user turn, as in a conversation.
    """
    return join_prompt_parts(read_prompt_parts(body, prompt_input, rules, context, request_id))


def join_prompt_parts(parts: list[str | Media]) -> TextPrompt:
    """Return the prompt of a list of parts."""
    text, placed = interleave_parts(parts)
    return TextPrompt(text, as_user_turn=bool(placed), media=placed)


def read_prompt_parts(
    body: Fields, prompt_input: PromptInput, rules: MindieRules, context: RequestContext, request_id: str = ""
) -> list[str | Media]:
    """Return the text by itself, or the texts and items of a list of parts. Raises BadRequest."""
    value, limit = body.raw_value(prompt_input.name), rules.body_megabytes << 20
    if value is None:
        raise body.member_error(prompt_input.name, prompt_input.missing)
    parts: list[str | Media]
    if isinstance(value, list):
        parts = read_mindie_parts(body, prompt_input, value, context.media_limits, request_id)
    elif isinstance(value, str):
        parts = [value]
    else:
        raise body.member_error(prompt_input.name, prompt_input.wrong_type.format(request_id))
    items = [part for part in parts if isinstance(part, Media)]
    check_media_counts(items, context.media_limits)
    length = sum(utf16_length(part) for part in parts if isinstance(part, str))
    if length > limit or (not length and not items):
        raise body.member_error(prompt_input.name, prompt_input.wrong_length.format(length, limit))
    return parts


def read_mindie_parts(
    body: Fields, prompt_input: PromptInput, value: list[Any], limits: Mapping[MediaKind, int], request_id: str = ""
) -> list[str | Media]:
    """Return the texts and items of a list of parts; ``limits``: as in RequestContext. Raises BadRequest."""
    if not value:
        raise body.member_error(prompt_input.name, prompt_input.empty)
    if sum(_part_kind(part) in URL_KINDS for part in value) > MAX_MEDIA:
        raise body.member_error(prompt_input.name, f"The number of multimodal url should be no more than {MAX_MEDIA}")
    reader = MediaPartReader(body, prompt_input.name, limits)
    wrong_type = body.member_error(prompt_input.name, prompt_input.wrong_type.format(request_id))
    return [_read_part(reader, number, part, wrong_type) for number, part in enumerate(value)]


def _part_kind(part: Any) -> Any:
    """Return the type of a part. ``type`` is optional; without it, the name of the part's member decides."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    return kind if kind is not None else next((name for name in PART_TYPES if name in part), None)


def _read_part(reader: MediaPartReader, number: int, part: Any, wrong_type: BadRequest) -> str | Media:
    kind = _part_kind(part)
    if kind in URL_KINDS or (kind == "input_audio" and reader.limits):
        return reader.read_item(number, part, kind)
    if kind != "text":
        raise wrong_type
    if not isinstance(part.get("text"), str):
        raise reader.body.member_error(reader.member, "Request param text must be string")
    result: str = part["text"]
    return result
