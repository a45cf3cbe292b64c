"""Prompts of MindIE's interfaces: a text, or a list of parts that may include media; and their refusals.

Each interface has its own name for the input and its own sentences for faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parley.dialects.fields import Fields
from parley.dialects.mindie.rules import MindieRules
from parley.dialects.mindie.shared import utf16_length
from parley.errors import Unsupported

MEDIA_TYPES = ("image_url", "video_url", "audio_url")
PART_TYPES = ("text", *MEDIA_TYPES)
MAX_MEDIA = 20
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


def read_prompt_text(body: Fields, prompt_input: PromptInput, rules: MindieRules, request_id: str = "") -> str:
    """Return the text, or the joined texts of a list of parts. Raises BadRequest; Unsupported for media."""
    return "".join(read_prompt_texts(body, prompt_input, rules, request_id))


def read_prompt_texts(body: Fields, prompt_input: PromptInput, rules: MindieRules, request_id: str = "") -> list[str]:
    """Return the text by itself, or the texts of a list of parts. Raises BadRequest; Unsupported for media."""
    value, limit = body.raw_value(prompt_input.name), rules.limit << 20
    if value is None:
        raise body.member_error(prompt_input.name, prompt_input.missing)
    if isinstance(value, list):
        value = read_text_parts(body, prompt_input, value, request_id)
    elif isinstance(value, str):
        value = [value]
    else:
        raise body.member_error(prompt_input.name, prompt_input.wrong_type.format(request_id))
    length = sum(map(utf16_length, value))
    if not 0 < length <= limit:
        raise body.member_error(prompt_input.name, prompt_input.wrong_length.format(length, limit))
    result: list[str] = value
    return result


def read_text_parts(body: Fields, prompt_input: PromptInput, value: list[Any], request_id: str = "") -> list[str]:
    """Return the texts of a list of parts. Raises BadRequest; Unsupported for media."""
    if not value:
        raise body.member_error(prompt_input.name, prompt_input.empty)
    if sum(_part_kind(part) in MEDIA_TYPES for part in value) > MAX_MEDIA:
        raise body.member_error(prompt_input.name, f"The number of multimodal url should be no more than {MAX_MEDIA}")
    return [_read_text_part(body, prompt_input, part, request_id) for part in value]


def _part_kind(part: Any) -> Any:
    """Return the type of a part. ``type`` is optional: without it, the member that the part has tells."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    return kind if kind is not None else next((name for name in PART_TYPES if name in part), None)


def _read_text_part(body: Fields, prompt_input: PromptInput, part: Any, request_id: str) -> str:
    kind = _part_kind(part)
    if kind in MEDIA_TYPES:
        url = part.get(kind)
        if url is None or (isinstance(url, dict) and url.get("url") is None):
            raise body.member_error(prompt_input.name, f"Request param {kind} null")
        raise Unsupported(f"Request param {kind} is not available on this server", field=prompt_input.name)
    if kind != "text":
        raise body.member_error(prompt_input.name, prompt_input.wrong_type.format(request_id))
    if not isinstance(part.get("text"), str):
        raise body.member_error(prompt_input.name, "Request param text must be string")
    result: str = part["text"]
    return result
