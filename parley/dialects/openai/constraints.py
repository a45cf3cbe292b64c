"""Constraints on the form of the answer: ``response_format``, vLLM's ``structured_outputs`` and its older members.

Each is read and checked in full, and a request may have only one. Knows nothing of how output is constrained.
"""

from __future__ import annotations

import msgspec

from parley.dialects import output_constraints
from parley.dialects.fields import Fields
from parley.dialects.openai import strict_mode
from parley.dialects.openai.common_members import read_identifier
from parley.dialects.output_constraints import MAX_GRAMMAR_CHARACTERS, ConstraintKind
from parley.types import Grammar

GUIDED_MEMBERS: dict[str, ConstraintKind] = {
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
CONSTRAINT_MEMBERS = dict.fromkeys(  # in the order of the documentation
    ("structured_outputs", *GUIDED_MEMBERS, "guided_decoding_backend", "guided_whitespace_pattern", "response_format")
)
FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")
TGI_FORMAT_TYPES = ("json", "json_object", "json_schema", "regex")  # TGI's; its clients send them to every server


def read_grammar(body: Fields, *, strict_schemas: bool) -> Grammar | None:
    """Return the constraint on the answer's form, or None. ``strict_schemas``: as in ``ReadingRules``.

    Raises BadRequest.
    """
    if not body.present_names(CONSTRAINT_MEMBERS):
        return None
    options = body.object("structured_outputs")
    structured = None if options is None else output_constraints.read_structured_outputs(options)
    body.string("guided_decoding_backend", None, cap=256)
    guided = _read_guided_members(body)
    if structured is not None:  # guidance sends one grammar in the members of old and new versions of vLLM
        guided = [other for other in guided if msgspec.structs.replace(other, field=structured.field) != structured]
    return output_constraints.only_constraint(structured, *guided, read_response_format(body, strict_schemas))


def _read_guided_members(body: Fields) -> list[Grammar]:
    whitespace = body.string("guided_whitespace_pattern", None, cap=MAX_GRAMMAR_CHARACTERS)
    grammars = (
        output_constraints.read_constraint(body, name, kind)
        for name, kind in GUIDED_MEMBERS.items()
        if body.has_value(name)
    )
    return [msgspec.structs.replace(grammar, whitespace=whitespace) for grammar in grammars if grammar is not None]


def read_response_format(body: Fields, strict_schemas: bool) -> Grammar | None:
    """Return the constraint of ``response_format``; None for text. ``strict_schemas``: as in ``ReadingRules``.

    Raises BadRequest.
    """
    format_object = body.object("response_format")
    if format_object is None:
        return None
    if format_object.has_value("value"):
        return _read_tgi_format(format_object)
    format_type = format_object.string("type", None, allowed=FORMAT_TYPES)
    match format_type:
        case None:
            raise format_object.missing_member("type")
        case "text":
            return None
        case "json_object":
            # An extension of llama.cpp and others
            bare_schema = output_constraints.read_json_schema(format_object, "schema")
            return Grammar("json", output_constraints.ANY_OBJECT_SCHEMA if bare_schema is None else bare_schema)
        case "structural_tag":
            return output_constraints.read_structural_tag(format_object, "response_format")
    schema_object = format_object.object("json_schema")
    if schema_object is None:
        if (bare_schema := output_constraints.read_json_schema(format_object, "schema")) is None:
            raise format_object.missing_member("json_schema")
        return Grammar("json", bare_schema)
    name = read_identifier(schema_object)
    schema_object.string("description", None)
    schema = schema_object.free_object("schema")
    if not schema_object.has_value("schema"):
        raise schema_object.missing_member("schema")
    if schema_object.boolean("strict", False) and strict_schemas:
        strict_mode.check_strict_schema(schema, f"response_format '{name}'", "response_format")
    return Grammar("json", schema)


def _read_tgi_format(format_object: Fields) -> Grammar:
    """Read TGI's form."""
    format_type, member = format_object.string("type", None, allowed=TGI_FORMAT_TYPES), "value"
    if format_type is None:
        raise format_object.missing_member("type")
    if format_type == "json_schema":
        schema_object = format_object.object(member)
        assert schema_object is not None
        schema_object.string("name", None, cap=256)
        format_object, member = schema_object, "schema"
    grammar = output_constraints.read_constraint(format_object, member, "regex" if format_type == "regex" else "json")
    if grammar is None:
        raise (
            format_object.empty_member(member, "string")
            if format_object.has_value(member)
            else format_object.missing_member(member)
        )
    if format_type == "regex" or not isinstance(grammar.value, dict):
        return msgspec.structs.replace(grammar, field="response_format")
    return Grammar("json", output_constraints.ANY_OBJECT_SCHEMA | grammar.value)
