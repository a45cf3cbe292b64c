"""Prompts of MindIE's interfaces: a text, or a list of parts that may include media; and their refusals.

Each interface has its own name for the input and its own sentences for faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parley.dialects.fields import Fields
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import size
from parley.errors import Unsupported

MEDIA = ("image_url", "video_url", "audio_url")
MAX_MEDIA = 20
IDS = 1_048_576  # tokens of an input, independent of the model
LONG = "{} must be necessary and data type must be string and length in (0, {{1}}], but the length of inputs is {{0}}"


@dataclass(frozen=True, slots=True)
class Input:
    """The name of a member, and the sentences of its refusals. In ``wrong_length``, {0} is the length and {1} the
    limit; in ``wrong_type``, {} is the request's id. ``no_tokens`` refuses a text that yields no tokens."""

    name: str
    missing: str
    type: str
    empty: str
    length: str
    tokens: str


TGI = Input(
    "inputs",
    "Request should contain 'inputs' and the type should be string.",
    "The type of inputs is abnormal",
    "Inputs arr is empty",
    "Inputs length must be in (0, {1}], but got {0}",
    f"Inputs token length must be in (0, {IDS}], but got 0",
)
NATIVE = Input("inputs", "Not found inputs.", TGI.type, TGI.empty, LONG.format("Inputs"), TGI.tokens)
VLLM = Input(
    "prompt",
    "Contains not prompt or prompt null",
    "The type of prompt is abnormal",
    "Prompt arr is empty",
    LONG.format("Prompt"),
    f"Messages token length must be in (0, {IDS}], but got 0. This could be caused by invalid input format or empty "
    "content.",
)
TRITON = Input(
    "text_input",
    "The text_input not found",
    "The type of text_input is abnormal. The requestId is {}",
    "Parameter text_input arr is empty",
    LONG.format("text_input"),
    f"text_input token length must be in (0, {IDS}], but got 0",
)


def text(body: Fields, known: Input, rules: Rules, id: str = "") -> str:
    """Return the text, or the joined texts of a list of parts. Raises BadRequest; Unsupported for media."""
    return "".join(texts(body, known, rules, id))


def texts(body: Fields, known: Input, rules: Rules, id: str = "") -> list[str]:
    """Return the text by itself, or the texts of a list of parts. Raises BadRequest; Unsupported for media."""
    value, most = body.raw(known.name), rules.limit << 20
    if value is None:
        raise body.fail(known.name, known.missing)
    if isinstance(value, list):
        value = parts(body, known, value, id)
    elif isinstance(value, str):
        value = [value]
    else:
        raise body.fail(known.name, known.type.format(id))
    length = sum(map(size, value))
    if not 0 < length <= most:
        raise body.fail(known.name, known.length.format(length, most))
    return value


def parts(body: Fields, known: Input, value: list[Any], id: str = "") -> list[str]:
    """Return the texts of a list of parts. Raises BadRequest; Unsupported for media."""
    if not value:
        raise body.fail(known.name, known.empty)
    media = sum(isinstance(part, dict) and part.get("type") in MEDIA for part in value)
    if media > MAX_MEDIA:
        raise body.fail(known.name, f"The number of multimodal url should be no more than {MAX_MEDIA}")
    return [_part(body, known, part, id) for part in value]


def _part(body: Fields, known: Input, part: Any, id: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA:
        url = part.get(kind)
        if url is None or (isinstance(url, dict) and url.get("url") is None):
            raise body.fail(known.name, f"Request param {kind} null")
        raise Unsupported(f"Request param {kind} is not available on this server", field=known.name)
    if kind != "text":
        raise body.fail(known.name, known.type.format(id))
    if not isinstance(part.get("text"), str):
        raise body.fail(known.name, "Request param text must be string")
    return part["text"]
