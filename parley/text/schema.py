"""JSON schemas made ready for llguidance: what would only annotate is left out, what cannot be enforced is refused.

llguidance itself refuses most keywords that it does not enforce. Knows how schemas stand in one another, and nothing
but schemas; what a single one asks for is ``keywords``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .keywords import Schema, controlled, plain
from .refused import Refused

DEPTH = 64  # levels of nesting; llguidance reads 128 levels of JSON, and puts the schema into more of it

MEMBERS = 1000  # properties of one object: what llguidance takes for them grows with their square

# Keywords whose value is a schema, a list of them, or an object of them. What stands elsewhere is plain JSON.
ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
       "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

DATA = ("enum", "const")  # keywords whose values are no schemas

ESCAPES = 'nrbtf\\"'  # that JSON may be written with: \\u would let names that are taken come once more
OPEN = "a constant in it holds a control character, and objects in it have members besides those that are named"


def too_deep(value: Any, limit: int = DEPTH) -> bool:
    """Whether JSON is nested deeper than that. Does not recurse."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def too_wide(value: Any, limit: int = MEMBERS) -> bool:
    """Whether an object in the JSON has more properties than that."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            named = each.get("properties")
            if isinstance(named, dict) and len(named) > limit:
                return True
            left += each.values()
        elif isinstance(each, list):
            left += each
    return False


def ready(schema: Schema, closed: bool) -> Schema:
    """A copy of the schema for llguidance. ``closed``: objects have only the members that are named, as far as one
    schema alone speaks of an object; where several do, each would forbid the members of the others.

    The schema must not be ``too_deep``. Raises Refused.
    """
    shared = set(_shared(schema, True)) if closed else set()

    def copy(node: Schema, path: str, alone: bool) -> Schema | bool:
        made = plain(node, schema)
        if isinstance(made, bool):
            return made
        alone = alone and path not in shared
        for key, at, inner, single in _inside(made, alone):
            value = copy(inner, f"{path}/{key}" if at is None else f"{path}/{key}/{_escaped(at)}", single)
            if at is None:
                made[key] = value
            else:
                if made[key] is node.get(key):
                    made[key] = made[key].copy()
                made[key][at] = value
        if closed and alone and "properties" in node and not _joins(node):
            made.setdefault("additionalProperties", False)
        return made

    made = copy(schema, "#", True)
    if isinstance(made, bool):
        raise Refused("no text has this form")
    return made


def escapes(schema: Schema) -> str:
    """The letters that may follow a backslash where JSON has this form. Raises Refused."""
    parts = list(_parts(schema))
    if not any(map(controlled, parts)):
        return ESCAPES
    if any({"patternProperties", "properties", "required"} & part.keys() and part.get("additionalProperties", True)
           is not False for part in parts):  # fmt: skip
        raise Refused(OPEN)
    return ESCAPES + "u"


def rerooted(value: Any, root: str) -> Any:
    """A schema whose references to its own parts hold where it stands below ``root``."""
    if isinstance(value, list):
        return [rerooted(each, root) for each in value]
    if not isinstance(value, dict):
        return value
    made: dict[str, Any] = {}
    for key, each in value.items():
        if key in MAPS and isinstance(each, dict):
            made[key] = {name: rerooted(inner, root) for name, inner in each.items()}
        else:
            made[key] = each if key in DATA else rerooted(each, root)
    reference = made.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        made["$ref"] = root + reference[1:]
    return made


def references(schema: Schema) -> Iterator[str]:
    """What a schema refers to, wherever in it."""
    return (each["$ref"] for each in _parts(schema) if isinstance(each.get("$ref"), str))


def _parts(schema: Schema) -> Iterator[Schema]:
    """A schema and all inside of it."""
    left = [schema]
    while left:
        node = left.pop()
        yield node
        left += (inner for _, _, inner, _ in _inside(node, True))


def _inside(node: Schema, alone: bool) -> Iterator[tuple[str, str | int | None, Schema, bool]]:
    """The schemas directly inside of one: keyword, place under it, schema, and whether it alone speaks of a value."""
    for key in ONE:
        if isinstance(inner := node.get(key), dict):
            yield key, None, inner, True
    for key in LISTS:
        if isinstance(listed := node.get(key), list):
            single = alone and not _joins(node) if key in ("allOf", "anyOf", "oneOf") else True
            yield from ((key, at, each, single) for at, each in enumerate(listed) if isinstance(each, dict))
    for key in MAPS:
        if isinstance(named := node.get(key), dict):
            yield from ((key, name, each, True) for name, each in named.items() if isinstance(each, dict))


def _joins(node: Schema) -> bool:
    """Whether several schemas speak of its value, for it has members as well as parts, or several parts."""
    several = isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1
    return several or ("properties" in node and any(key in node for key in ("$ref", "allOf", "anyOf", "oneOf")))


def _shared(node: Schema, alone: bool) -> Iterator[str]:
    """The references that are joined with something else."""
    if isinstance(node.get("$ref"), str) and (_joins(node) or not alone):
        yield node["$ref"]
    for _, _, inner, single in _inside(node, alone):
        yield from _shared(inner, single)


def _escaped(name: str | int) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")
