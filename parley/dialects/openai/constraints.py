"""Constraints on the form of the answer: ``response_format``, vLLM's ``structured_outputs`` and its older members.

Each is read and checked in full, and a request may have only one. Knows nothing of how output is constrained.
"""

from __future__ import annotations

import msgspec

from parley.dialects import forms
from parley.dialects.fields import Fields
from parley.dialects.forms import MAX_CHARACTERS, Kind
from parley.dialects.openai import shared, strict
from parley.types import Grammar

GUIDED: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "regex": "regex",  # this and the next two are SGLang's
    "ebnf": "grammar",
    "json_schema": "json",
    "grammar": "grammar",  # llama.cpp's
}
MEMBERS = dict.fromkeys(  # in the order of the documentation
    ("structured_outputs", *GUIDED, "guided_decoding_backend", "guided_whitespace_pattern", "response_format")
)
TYPES = ("text", "json_object", "json_schema", "structural_tag")
VALUED = ("json", "json_object", "json_schema", "regex")  # TGI's; its clients send them to every server


def read(body: Fields) -> Grammar | None:
    """Return the constraint on the answer's form, or None. Raises BadRequest."""
    if not body.among(MEMBERS):
        return None
    wish = body.object("structured_outputs")
    structured = None if wish is None else forms.structured(wish)
    body.string("guided_decoding_backend", None, cap=256)
    return forms.one(structured, *_guided(body), response_format(body))


def _guided(body: Fields) -> list[Grammar]:
    blanks = body.string("guided_whitespace_pattern", None, cap=MAX_CHARACTERS)
    wishes = (forms.constraint(body, name, kind) for name, kind in GUIDED.items() if body.has(name))
    return [msgspec.structs.replace(wish, whitespace=blanks) for wish in wishes if wish is not None]


def response_format(body: Fields) -> Grammar | None:
    """Return the constraint of ``response_format``; None for text. Raises BadRequest."""
    wish = body.object("response_format")
    if wish is None:
        return None
    if wish.has("value"):
        return _valued(wish)
    form = wish.string("type", None, allowed=TYPES)
    match form:
        case None:
            raise wish.missing("type")
        case "text":
            return None
        case "json_object":
            wanted = forms.schema(wish, "schema")  # an extension of llama.cpp and others
            return Grammar("json", forms.OBJECT if wanted is None else wanted)
        case "structural_tag":
            return forms.tags(wish, "response_format")
    described = wish.object("json_schema")
    if described is None:
        if (wanted := forms.schema(wish, "schema")) is None:
            raise wish.missing("json_schema")
        return Grammar("json", wanted)
    name = shared.name(described)
    described.string("description", None)
    schema = described.free("schema")
    if not described.has("schema"):
        raise described.missing("schema")
    if described.boolean("strict", False):
        strict.check(schema, f"response_format '{name}'", "response_format")
    return Grammar("json", schema)


def _valued(wish: Fields) -> Grammar:
    """Read TGI's form. Objects are closed: members that the schema does not name are never expected."""
    kind, member = wish.string("type", None, allowed=VALUED), "value"
    if kind is None:
        raise wish.missing("type")
    if kind == "json_schema":
        described = wish.object(member)
        assert described is not None
        described.string("name", None, cap=256)
        wish, member = described, "schema"
    grammar = forms.constraint(wish, member, "regex" if kind == "regex" else "json")
    if grammar is None:
        raise wish.empty(member, "string") if wish.has(member) else wish.missing(member)
    if kind == "regex" or not isinstance(grammar.value, dict):
        return msgspec.structs.replace(grammar, field="response_format")
    return Grammar("json", forms.OBJECT | grammar.value, closed=True)
