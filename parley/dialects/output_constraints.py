"""Output constraints as several APIs express them: schemas, grammars, structural tags, vLLM's structured outputs.

Types and size limits are checked here, so that the whole constraint is read; whether a schema or a grammar is supported
is decided where it is compiled. Knows the member names within these objects, but not the members that hold them.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.sampling_members import MAX_TOKEN_ID
from parley.errors import InvalidValue, Unsupported
from parley.types import (
    Grammar,
    SeparatedTags,
    StructuralChoice,
    StructuralPiece,
    StructuralRepeat,
    StructuralSequence,
    StructuralTag,
    StructuralText,
    StructuralToken,
    TriggeredTags,
)

ConstraintKind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)
ANY_OBJECT_SCHEMA = {"type": "object"}  # any object
MAX_LISTED_ITEMS = 4096
MAX_TAG_ENDS = MAX_EXCLUDES = 16
MAX_REPEATS = 4096
MAX_PIECE_DEPTH = 32  # levels of nested pieces
MAX_GRAMMAR_CHARACTERS = 1 << 20  # of a regular expression or grammar, or of all choices together
GBNF_RULE = re.compile(r"^\s*[\w.-]+\s*::=", re.MULTILINE)  # the start of a GBNF rule; Lark's rules have a colon


def only_constraint(*constraints: Grammar | None) -> Grammar | None:
    """Return the only constraint that is not None, or None. Raises InvalidValue if there are two."""
    present = [grammar for grammar in constraints if grammar is not None]
    if len(present) > 1:
        first, second = present[0].field, present[1].field
        raise InvalidValue(f"'{second}' cannot be used together with '{first}': an answer has one form.", field=second)
    return present[0] if present else None


def read_constraint(fields: Fields, name: str, kind: ConstraintKind) -> Grammar | None:
    """Return the constraint in a member of this kind, or None if it asks for nothing. Raises BadRequest."""
    field = fields.member_path(name)
    match kind:
        case "json":
            json_schema = read_json_schema(fields, name)
            return None if json_schema is None else Grammar("json", json_schema, field=field)
        case "choice":
            choices = fields.strings(name, cap=MAX_LISTED_ITEMS, total=MAX_GRAMMAR_CHARACTERS)
            return Grammar("choice", choices, field=field) if choices else None
        case "json_object":
            return Grammar("json", ANY_OBJECT_SCHEMA, field=field) if fields.boolean(name, False) else None
    text = fields.string(name, "", cap=MAX_GRAMMAR_CHARACTERS)
    if not text:
        return None
    if kind == "regex":
        return Grammar("regex", text, field=field)
    if kind == "grammar":
        return text_grammar(text, field)
    tag = fields.with_parsed_text(name, cap=MAX_GRAMMAR_CHARACTERS).object(name)
    if tag is None:
        raise fields.member_error(name, "the text is not an object.")
    return read_structural_tag(tag, field)


def read_structured_outputs(options: Fields) -> Grammar:
    """Read vLLM's object of constraints: exactly one of ``CONSTRAINT_KINDS``, and options such as whitespace between
    JSON tokens.

    Raises BadRequest.

    """
    grammars = {kind: read_constraint(options, kind, kind) for kind in CONSTRAINT_KINDS}
    present = [kind for kind, grammar in grammars.items() if grammar is not None]
    no_whitespace = options.boolean("disable_any_whitespace", False)
    options.boolean("disable_additional_properties", False)  # objects are closed in any case
    pattern = options.string("whitespace_pattern", None, cap=MAX_GRAMMAR_CHARACTERS)
    if len(present) != 1:
        problem = "none is given" if not present else "several are: " + ", ".join(present)
        raise options.member_error(
            present[0] if present else "json",
            f"exactly one of {', '.join(CONSTRAINT_KINDS)} is needed, but {problem}.",
        )
    if no_whitespace and pattern is not None:
        raise options.member_error("whitespace_pattern", "cannot be used together with 'disable_any_whitespace'.")
    grammar = grammars[present[0]]
    assert grammar is not None
    return msgspec.structs.replace(grammar, whitespace="" if no_whitespace else pattern)


def read_json_schema(fields: Fields, name: str) -> dict[str, Any] | bool | None:
    """Return a JSON schema, given as such or as its text; None if absent, null or empty text. Raises BadRequest."""
    value = fields.raw_value(name)
    if value == "":
        return None
    if isinstance(value, str):
        value = fields.with_parsed_text(name, cap=MAX_GRAMMAR_CHARACTERS).raw_value(name)
        if not isinstance(value, dict | bool):
            raise fields.member_error(name, "the text is not a JSON schema.")
        return value
    return None if value is None else fields.free_object(name)


def text_grammar(text: str, field: str) -> Grammar:
    """Return a grammar in GBNF or Lark, whichever notation the text is in."""
    return Grammar("ebnf" if GBNF_RULE.search(text) else "lark", text, field=field)


def read_structural_tag(structural_tag: Fields, field: str) -> Grammar:
    """Read a structural tag: the newer form has a ``format``, the older one ``structures`` and ``triggers``."""
    if structural_tag.has_value("format"):
        shape = structural_tag.object("format")
        assert shape is not None
        return _read_format(shape, field)
    if not structural_tag.has_value("structures"):
        raise structural_tag.missing_member("format")
    tag_list = []
    for structure in structural_tag.objects("structures", cap=MAX_LISTED_ITEMS):
        marks = [_required_text(structure, name) for name in ("begin", "end")]
        inner_schema = read_json_schema(structure, "schema")
        tag_list.append(StructuralTag(marks[0], True if inner_schema is None else inner_schema, marks[1]))
    return Grammar("tags", _triggered_tags(structural_tag, tag_list, "structures"), field=field)


def _read_format(shape: Fields, field: str) -> Grammar:
    """Return the grammar of a format. A format of only one grammar becomes that grammar itself."""
    piece = _read_piece(shape, field, 1)
    return piece if isinstance(piece, Grammar) else Grammar("tags", piece, field=field)


def _read_piece(shape: Fields, field: str, depth: int) -> StructuralPiece:
    kind = shape.string("type", None)
    if depth > MAX_PIECE_DEPTH:
        raise shape.member_error("type", f"is nested deeper than {MAX_PIECE_DEPTH} levels.")
    match kind:
        case None:
            raise shape.missing_member("type")
        case "json_schema":
            if shape.string("style", "json") != "json":
                raise _unsupported_tag(shape, "style", "a style other than 'json'")
            inner_schema = read_json_schema(shape, "json_schema")
            if inner_schema is None:
                raise shape.missing_member("json_schema")
            return Grammar("json", inner_schema, field=field)
        case "regex":
            return Grammar("regex", _required_text(shape, "pattern"), field=field)
        case "grammar":
            return text_grammar(_required_text(shape, "grammar"), field)
        case "const_string":
            return Grammar("choice", [_required_text(shape, "value")], field=field)
        case "any_text":
            return StructuralText(_read_excludes(shape))
        case "sequence" | "or":
            pieces = [
                _read_piece(element, field, depth + 1) for element in shape.objects("elements", cap=MAX_LISTED_ITEMS)
            ]
            if not pieces:
                raise (
                    shape.empty_member("elements", "array")
                    if shape.has_value("elements")
                    else shape.missing_member("elements")
                )
            return StructuralSequence(pieces) if kind == "sequence" else StructuralChoice(pieces)
        case "tag":
            return _read_tag(shape, field, depth)
        case "triggered_tags":
            tags, limits = _read_tag_list(shape, field, depth)
            return _triggered_tags(shape, tags, "tags", excludes=_read_excludes(shape), **limits)
        case "tags_with_separator":
            tags, limits = _read_tag_list(shape, field, depth)
            if not tags:
                raise shape.empty_member("tags", "array")
            return SeparatedTags(tags, _required_text(shape, "separator"), **limits)
        case "optional" | "star" | "plus" | "repeat":
            return _read_repeat(shape, kind, field, depth)
        case "token":
            token = shape.raw_value("token")
            return StructuralToken(
                _required_text(shape, "token")
                if isinstance(token, str)
                else _required_integer(shape, "token", MAX_TOKEN_ID)
            )
    raise _unsupported_tag(shape, "type", f"a format of type '{kind[:60]}'")


def _read_repeat(shape: Fields, kind: str, field: str, depth: int) -> StructuralRepeat:
    content = shape.object("content")
    if content is None:
        raise shape.missing_member("content")
    piece = _read_piece(content, field, depth + 1)
    if kind != "repeat":
        return StructuralRepeat(piece, int(kind == "plus"), 1 if kind == "optional" else None)
    min_count = _required_integer(shape, "min", MAX_REPEATS)
    max_count = _required_integer(shape, "max", MAX_REPEATS, -1)
    if 0 <= max_count < min_count:
        raise shape.member_error("max", f"must be -1 or at least 'min', but got {max_count}.")
    return StructuralRepeat(piece, min_count, None if max_count < 0 else max_count)


def _required_integer(fields: Fields, name: str, high: int, low: int = 0) -> int:
    number = fields.integer(name, None, low, high)
    if number is None:
        raise fields.missing_member(name)
    return number


def _read_tag(tag: Fields, field: str, depth: int) -> StructuralTag:
    content = tag.object("content")
    if content is None:
        raise tag.missing_member("content")
    ends = tag.raw_value("end")
    if isinstance(ends, list):
        ends = tag.strings("end", cap=MAX_TAG_ENDS, total=MAX_GRAMMAR_CHARACTERS)
        if not ends:
            raise tag.empty_member("end", "array")
    else:
        ends = _required_text(tag, "end")
    inner_piece = _read_piece(content, field, depth + 1)
    is_json = isinstance(inner_piece, Grammar) and inner_piece.kind == "json"
    return StructuralTag(
        _required_text(tag, "begin"),
        inner_piece.value if isinstance(inner_piece, Grammar) and is_json else inner_piece,
        ends,
    )


def _read_tag_list(shape: Fields, field: str, depth: int) -> tuple[list[StructuralTag], dict[str, bool]]:
    """Return the tags of a format, and the options that limit their number."""
    tags = [_read_tag(tag, field, depth + 1) for tag in shape.objects("tags", cap=MAX_LISTED_ITEMS)]
    return tags, {
        "at_least_one": shape.boolean("at_least_one", False),
        "stop_after_first": shape.boolean("stop_after_first", False),
    }


def _triggered_tags(options: Fields, tag_list: list[StructuralTag], name: str, **more: Any) -> TriggeredTags:
    triggers = options.strings("triggers", cap=MAX_LISTED_ITEMS, total=MAX_GRAMMAR_CHARACTERS)
    if not triggers:
        raise options.missing_member("triggers")
    if not tag_list:
        raise options.empty_member(name, "array")
    for number, tag in enumerate(tag_list):
        if not tag.begin.startswith(tuple(triggers)):
            raise options.member_error(f"{name}[{number}]", "'begin' must begin with one of the triggers.")
    return TriggeredTags(tag_list, triggers, **more)


def _read_excludes(shape: Fields) -> list[str]:
    return shape.strings("excludes", cap=MAX_EXCLUDES, total=MAX_GRAMMAR_CHARACTERS)


def _required_text(fields: Fields, name: str) -> str:
    text = fields.string(name, None, cap=MAX_GRAMMAR_CHARACTERS)
    if text is None:
        raise fields.missing_member(name)
    return text


def _unsupported_tag(fields: Fields, name: str, subject: str) -> Unsupported:
    return Unsupported(
        f"Unsupported value: '{fields.member_path(name)}'. In a structural tag, {subject} is not available on "
        "this server.",
        field=fields.member_path(name),
        code="unsupported_value",
    )
