"""Wishes for the form of the output: ``response_format``, ``structured_outputs`` and the older ``guided_*`` members.

Each is read and checked in full. Knows nothing of how output is constrained: that is the engine's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.openai import shared
from parley.errors import Unsupported

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
MEMBERS = dict.fromkeys(  # their order is that of the documentation
    ("structured_outputs", *GUIDED, "guided_decoding_backend", "guided_whitespace_pattern", "response_format")
)
MAX_CHOICES = 4096
MAX_CHARACTERS = 1 << 20  # of a regular expression or grammar, or of all choices together


def refuse(body: Fields) -> None:
    """Check the members in full. A form other than free text is not available yet. Raises BadRequest."""
    if not body.among(MEMBERS):
        return
    wish = body.object("structured_outputs")
    structured = None if wish is None else _structured(wish)
    guided = _guided(body)
    response_format(body)
    if structured is not None or guided is not None:
        raise shared.unsupported(body, "structured_outputs" if guided is None else guided, "Constrained output is")


def _structured(wish: Fields) -> str:
    """Which of the kinds it is: exactly one must be there."""
    given = [kind for kind in KINDS if _constraint(wish, kind, kind)]
    wish.boolean("disable_any_whitespace", False)
    wish.boolean("disable_additional_properties", False)
    wish.string("whitespace_pattern", None, cap=MAX_CHARACTERS)
    if len(given) != 1:
        got = "none is given" if not given else "several are: " + ", ".join(given)
        raise wish.fail(given[0] if given else "json", f"exactly one of {', '.join(KINDS)} is needed, but {got}.")
    return given[0]


def _guided(body: Fields) -> str | None:
    """Which of the older members asks for something."""
    given = [name for name, kind in GUIDED.items() if body.has(name) and _constraint(body, name, kind)]
    body.string("guided_decoding_backend", None, cap=256)
    body.string("guided_whitespace_pattern", None, cap=MAX_CHARACTERS)
    if len(given) > 1:
        raise body.fail(given[1], f"cannot be used together with '{given[0]}'.")
    return given[0] if given else None


def _constraint(fields: Fields, name: str, kind: str) -> bool:
    """Is it given, and does it ask for anything? Its type must be right."""
    match kind:
        case "json":
            return _schema(fields, name)
        case "choice":
            return bool(fields.strings(name, cap=MAX_CHOICES, total=MAX_CHARACTERS))
        case "json_object":
            return fields.boolean(name, False)
        case _:
            return bool(fields.string(name, "", cap=MAX_CHARACTERS))


def _schema(fields: Fields, name: str) -> bool:
    """A schema, or its text; the empty one allows any JSON."""
    value = fields.raw(name)
    if not isinstance(value, str):
        fields.free(name)
        return value is not None
    try:
        schema: Any = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise fields.fail(name, f"the text is not JSON: {error}.") from None
    if not isinstance(schema, dict | bool):
        raise fields.fail(name, "the text is not a JSON schema.")
    return True


def response_format(body: Fields) -> None:
    """Check the wished form of the output; anything but text is refused for now."""
    wish = body.object("response_format")
    if wish is None:
        return
    form = wish.string("type", None, allowed=("text", "json_object", "json_schema", "structural_tag"))
    if form is None:
        raise wish.missing("type")
    if form == "text":
        return
    if form == "json_schema":
        schema = wish.object("json_schema")
        if schema is None:
            raise wish.missing("json_schema")
        shared.name(schema)
        if not schema.has("schema"):
            raise schema.missing("schema")
        schema.free("schema")
        schema.string("description", None)
        schema.boolean("strict", False)
    elif form == "structural_tag":
        _tags(wish)
    raise Unsupported(
        f"response_format of type '{form}' is not available on this server; only 'text' is.",
        field=wish.path("type"),
        code="unsupported_value",
    )


def _tags(wish: Fields) -> None:
    """The newer form has a ``format``, the older one ``structures`` and ``triggers``."""
    if wish.has("format"):
        wish.free("format")
        return
    if not wish.has("structures"):
        raise wish.missing("format")
    for structure in wish.objects("structures", cap=MAX_CHOICES):
        for name in ("begin", "end"):
            if structure.string(name, None, cap=MAX_CHARACTERS) is None:
                raise structure.missing(name)
        structure.free("schema")
    if not wish.strings("triggers", cap=MAX_CHOICES, total=MAX_CHARACTERS):
        raise wish.missing("triggers")
