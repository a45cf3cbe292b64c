"""Output constraints as several APIs express them: schemas, grammars, structural tags, vLLM's structured outputs.

Types and size limits are checked here, so that the whole constraint is read; whether a schema or a grammar is supported
is decided where it is compiled. Knows the member names within these objects, but not the members that hold them.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.parameters import MAX_ID
from parley.errors import Invalid, Unsupported
from parley.types import AnyText, Either, Exactly, Grammar, Piece, Repeat, Sequence, Tag, TagList, Tags

Kind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OBJECT = {"type": "object"}  # any object
MAX_CHOICES = 4096
MAX_ENDS = MAX_EXCLUDES = 16
MAX_TIMES = 4096
MAX_DEPTH = 32  # levels of nested pieces
MAX_CHARACTERS = 1 << 20  # of a regular expression or grammar, or of all choices together
GBNF = re.compile(r"^\s*[\w.-]+\s*::=", re.MULTILINE)  # the start of a GBNF rule; Lark's rules have a colon


def one(*wishes: Grammar | None) -> Grammar | None:
    """Return the only constraint that is not None, or None. Raises Invalid if there are two."""
    given = [wish for wish in wishes if wish is not None]
    if len(given) > 1:
        first, second = given[0].field, given[1].field
        raise Invalid(f"'{second}' cannot be used together with '{first}': an answer has one form.", field=second)
    return given[0] if given else None


def constraint(fields: Fields, name: str, kind: Kind) -> Grammar | None:
    """Return the constraint in a member of this kind, or None if it asks for nothing. Raises BadRequest."""
    field = fields.path(name)
    match kind:
        case "json":
            wanted = schema(fields, name)
            return None if wanted is None else Grammar("json", wanted, field=field)
        case "choice":
            choices = fields.strings(name, cap=MAX_CHOICES, total=MAX_CHARACTERS)
            return Grammar("choice", choices, field=field) if choices else None
        case "json_object":
            return Grammar("json", OBJECT, field=field) if fields.boolean(name, False) else None
    text = fields.string(name, "", cap=MAX_CHARACTERS)
    if not text:
        return None
    if kind == "regex":
        return Grammar("regex", text, field=field)
    if kind == "grammar":
        return rules(text, field)
    tag = fields.spelled(name, cap=MAX_CHARACTERS).object(name)
    if tag is None:
        raise fields.fail(name, "the text is not an object.")
    return tags(tag, field)


def structured(wish: Fields) -> Grammar:
    """Read vLLM's object of constraints: exactly one of ``KINDS``, and options such as whitespace between JSON tokens.

    Raises BadRequest.
    """
    found = {kind: constraint(wish, kind, kind) for kind in KINDS}
    given = [kind for kind, grammar in found.items() if grammar is not None]
    bare = wish.boolean("disable_any_whitespace", False)
    closed = wish.boolean("disable_additional_properties", False)
    pattern = wish.string("whitespace_pattern", None, cap=MAX_CHARACTERS)
    if len(given) != 1:
        got = "none is given" if not given else "several are: " + ", ".join(given)
        raise wish.fail(given[0] if given else "json", f"exactly one of {', '.join(KINDS)} is needed, but {got}.")
    if bare and pattern is not None:
        raise wish.fail("whitespace_pattern", "cannot be used together with 'disable_any_whitespace'.")
    grammar = found[given[0]]
    assert grammar is not None
    return msgspec.structs.replace(grammar, whitespace="" if bare else pattern, closed=closed)


def schema(fields: Fields, name: str) -> dict[str, Any] | bool | None:
    """Return a JSON schema, given as such or as its text; None if absent, null or empty text. Raises BadRequest."""
    value = fields.raw(name)
    if value == "":
        return None
    if isinstance(value, str):
        value = fields.spelled(name, cap=MAX_CHARACTERS).raw(name)
        if not isinstance(value, dict | bool):
            raise fields.fail(name, "the text is not a JSON schema.")
        return value
    return None if value is None else fields.free(name)


def rules(text: str, field: str) -> Grammar:
    """Return a grammar in GBNF or Lark, whichever notation the text is in."""
    return Grammar("ebnf" if GBNF.search(text) else "lark", text, field=field)


def tags(wish: Fields, field: str) -> Grammar:
    """Read a structural tag: the newer form has a ``format``, the older one ``structures`` and ``triggers``."""
    if wish.has("format"):
        shape = wish.object("format")
        assert shape is not None
        return _format(shape, field)
    if not wish.has("structures"):
        raise wish.missing("format")
    found = []
    for structure in wish.objects("structures", cap=MAX_CHOICES):
        marks = [_text(structure, name) for name in ("begin", "end")]
        inside = schema(structure, "schema")
        found.append(Tag(marks[0], True if inside is None else inside, marks[1]))
    return Grammar("tags", _triggered(wish, found, "structures"), field=field)


def _format(shape: Fields, field: str) -> Grammar:
    """Return the grammar of a format. A format of only one grammar becomes that grammar itself."""
    piece = _piece(shape, field, 1)
    return piece if isinstance(piece, Grammar) else Grammar("tags", piece, field=field)


def _piece(shape: Fields, field: str, depth: int) -> Piece:
    kind = shape.string("type", None)
    if depth > MAX_DEPTH:
        raise shape.fail("type", f"is nested deeper than {MAX_DEPTH} levels.")
    match kind:
        case None:
            raise shape.missing("type")
        case "json_schema":
            if shape.string("style", "json") != "json":
                raise _unavailable(shape, "style", "a style other than 'json'")
            inside = schema(shape, "json_schema")
            if inside is None:
                raise shape.missing("json_schema")
            return Grammar("json", inside, field=field)
        case "regex":
            return Grammar("regex", _text(shape, "pattern"), field=field)
        case "grammar":
            return rules(_text(shape, "grammar"), field)
        case "const_string":
            return Grammar("choice", [_text(shape, "value")], field=field)
        case "any_text":
            return AnyText(_excludes(shape))
        case "sequence" | "or":
            pieces = [_piece(each, field, depth + 1) for each in shape.objects("elements", cap=MAX_CHOICES)]
            if not pieces:
                raise shape.empty("elements", "array") if shape.has("elements") else shape.missing("elements")
            return Sequence(pieces) if kind == "sequence" else Either(pieces)
        case "tag":
            return _tag(shape, field, depth)
        case "triggered_tags":
            tags, more = _listed(shape, field, depth)
            return _triggered(shape, tags, "tags", excludes=_excludes(shape), **more)
        case "tags_with_separator":
            tags, more = _listed(shape, field, depth)
            if not tags:
                raise shape.empty("tags", "array")
            return TagList(tags, _text(shape, "separator"), **more)
        case "optional" | "star" | "plus" | "repeat":
            return _repeat(shape, kind, field, depth)
        case "token":
            token = shape.raw("token")
            return Exactly(_text(shape, "token") if isinstance(token, str) else _number(shape, "token", MAX_ID))
    raise _unavailable(shape, "type", f"a format of type '{kind[:60]}'")


def _repeat(shape: Fields, kind: str, field: str, depth: int) -> Repeat:
    content = shape.object("content")
    if content is None:
        raise shape.missing("content")
    piece = _piece(content, field, depth + 1)
    if kind != "repeat":
        return Repeat(piece, int(kind == "plus"), 1 if kind == "optional" else None)
    least, most = _number(shape, "min", MAX_TIMES), _number(shape, "max", MAX_TIMES, -1)
    if 0 <= most < least:
        raise shape.fail("max", f"must be -1 or at least 'min', but got {most}.")
    return Repeat(piece, least, None if most < 0 else most)


def _number(fields: Fields, name: str, high: int, low: int = 0) -> int:
    number = fields.integer(name, None, low, high)
    if number is None:
        raise fields.missing(name)
    return number


def _tag(tag: Fields, field: str, depth: int) -> Tag:
    content = tag.object("content")
    if content is None:
        raise tag.missing("content")
    ends = tag.raw("end")
    if isinstance(ends, list):
        ends = tag.strings("end", cap=MAX_ENDS, total=MAX_CHARACTERS)
        if not ends:
            raise tag.empty("end", "array")
    else:
        ends = _text(tag, "end")
    inside = _piece(content, field, depth + 1)
    whole = isinstance(inside, Grammar) and inside.kind == "json"
    return Tag(_text(tag, "begin"), inside.value if isinstance(inside, Grammar) and whole else inside, ends)


def _listed(shape: Fields, field: str, depth: int) -> tuple[list[Tag], dict[str, bool]]:
    """Return the tags of a format, and the options that limit their number."""
    tags = [_tag(tag, field, depth + 1) for tag in shape.objects("tags", cap=MAX_CHOICES)]
    return tags, {
        "some": shape.boolean("at_least_one", False),
        "single": shape.boolean("stop_after_first", False),
    }


def _triggered(wish: Fields, found: list[Tag], name: str, **more: Any) -> Tags:
    triggers = wish.strings("triggers", cap=MAX_CHOICES, total=MAX_CHARACTERS)
    if not triggers:
        raise wish.missing("triggers")
    if not found:
        raise wish.empty(name, "array")
    for number, tag in enumerate(found):
        if not tag.begin.startswith(tuple(triggers)):
            raise wish.fail(f"{name}[{number}]", "'begin' must begin with one of the triggers.")
    return Tags(found, triggers, **more)


def _excludes(shape: Fields) -> list[str]:
    return shape.strings("excludes", cap=MAX_EXCLUDES, total=MAX_CHARACTERS)


def _text(fields: Fields, name: str) -> str:
    text = fields.string(name, None, cap=MAX_CHARACTERS)
    if text is None:
        raise fields.missing(name)
    return text


def _unavailable(fields: Fields, name: str, subject: str) -> Unsupported:
    return Unsupported(f"Unsupported value: '{fields.path(name)}'. In a structural tag, {subject} is not available on "
                       "this server.", field=fields.path(name), code="unsupported_value")  # fmt: skip
