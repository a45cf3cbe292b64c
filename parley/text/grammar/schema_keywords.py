"""Rewrite the keywords of one schema into those that llguidance enforces exactly; refuse the ones that have no rewrite.

llguidance reads bounds and constants as doubles, does not know propertyNames, allows duplicate members, and evaluates
the keywords before and after ``allOf`` and similar keywords separately. Nesting is the business of ``json_schema``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from parley.text.grammar.refused import Refused
from parley.text.grammar.regex import CONTROL, Rust, rust
from parley.text.grammar.string_formats import FOLLOWED, FORMATS, PATTERNS
from parley.text.parsing.calls import follow

Schema = dict[str, Any]

DEPTH = 8  # references followed in propertyNames
LENGTH = 2**31 - 1  # characters; llguidance reads no larger maxLength, and no answer is that long
HOSTNAME = 253  # characters, dots included: RFC 1035, section 2.3.4

NOTES = frozenset({
    "$comment", "$dynamicAnchor", "$recursiveAnchor", "$schema", "default", "deprecated", "description", "examples",
    "title",
})  # fmt: skip
FORMER = ("disallow", "divisibleBy", "extends")  # of draft 3; llguidance treats them as annotations
LENGTHS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
BOUNDS = {"minimum": math.inf, "exclusiveMinimum": math.inf, "maximum": -math.inf, "exclusiveMaximum": -math.inf}
BESIDE = {"else": ("if",), "if": ("then", "else"), "maxContains": ("contains",), "minContains": ("contains",),
          "then": ("if",)}  # fmt: skip
"""Keywords that have no effect without any of these next to them."""
NOTHING: dict[str, tuple[Any, ...]] = {
    "dependencies": ({},), "dependentRequired": ({},), "dependentSchemas": ({},), "not": (False,),
    "propertyNames": (True, {}), "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}  # fmt: skip
"""Values for which a keyword has no effect."""
PARTS = frozenset({"$ref", "allOf", "anyOf", "const", "enum", "oneOf"})
"""llguidance evaluates the keywords between two of these as one group."""
ASIDE = frozenset({"$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "contains", "dependentSchemas", "if",
                   "not", "oneOf"})  # fmt: skip
"""Keywords that may evaluate members or items that the schema itself does not mention."""
STRINGS = frozenset({"const", "enum", "format", "maxLength", "minLength", "pattern", "type"})

LARGE = "a number in it is too large"
INEXACT = "an integer in enum or const is too large to be represented exactly"
OFTEN = "minProperties is supported up to the number of required properties plus one"
NAMES = "propertyNames is supported with enum, const, pattern or lengths, without other keywords for the same names"


def plain(node: Schema, root: Schema) -> Schema | bool:
    """Return a rewritten copy whose subschemas are unchanged, or False if no value can match.

    ``root`` is the whole schema, for references. Raises GrammarRefused.
    """
    made = {key: value for key, value in node.items() if key not in NOTES and not _idle(key, value, node)}
    for key in FORMER:
        if key in made:
            raise Refused(f'"{key}" is not supported')
    if (denied := made.get("not")) is True or denied == {}:
        return False
    _round(made)
    for value in _constants(made):
        _check(value)
    _name(made, root)
    _match(made)
    _follow_format(made)
    _tell_apart(made)
    _close(made)
    least, needed = made.get("minProperties"), made.get("required")
    if isinstance(least, int) and least > 1 + len(_texts(needed)):
        raise Refused(OFTEN)
    return _grouped(made)


def controlled(node: Schema) -> bool:
    """Whether a constant contains a character that JSON can write only as a \\u escape."""
    return any(isinstance(value, str) and _numbered(value) for value in _constants(node))


def _idle(key: str, value: Any, node: Schema) -> bool:
    """Whether a keyword has no effect."""
    if key in BESIDE and not any(other in node for other in BESIDE[key]):
        return True
    return any(type(value) is type(each) and value == each for each in NOTHING.get(key, ()))


def _round(made: Schema) -> None:
    """Convert whole floats to integers, and round bounds inwards to doubles."""
    for key in LENGTHS:
        if isinstance(number := made.get(key), float) and number.is_integer():
            made[key] = int(number)
    if isinstance(longest := made.get("maxLength"), int) and longest > LENGTH:
        del made["maxLength"]
    for key, inside in BOUNDS.items():
        limit = made.get(key)
        if isinstance(limit, int | float) and not isinstance(limit, bool):
            near = _double(limit)
            if near != limit:
                made[key] = near if (near > limit) is (inside > 0) else _double(math.nextafter(near, inside))


def _double(number: float) -> float:
    try:
        near = float(number)
    except OverflowError:
        raise Refused(LARGE) from None
    if not math.isfinite(near):
        raise Refused(LARGE)
    return near


def _check(value: Any) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and _double(value) != value:
        raise Refused(INEXACT)


def _constants(node: Schema) -> Iterator[Any]:
    """Yield the scalar values in const and enum."""
    left = [node.get("const"), node.get("enum")]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        else:
            yield value


def _numbered(text: str) -> bool:
    return any(ord(letter) in CONTROL for letter in text)


def _match(made: Schema) -> None:
    """Translate patterns to the syntax that llguidance reads."""
    if isinstance(pattern := made.get("pattern"), str):
        made["pattern"] = rust(pattern, schema=True)
    if isinstance(named := made.get("patternProperties"), dict):
        made["patternProperties"] = {rust(pattern, schema=True): value for pattern, value in named.items()}


def _follow_format(made: Schema) -> None:
    name = made.get("format")
    if not isinstance(name, str):
        return
    if name not in FOLLOWED:
        del made["format"]
    if name in PATTERNS:
        if "pattern" not in made:
            made["pattern"] = PATTERNS[name]
        elif isinstance(made.setdefault("allOf", []), list):
            made["allOf"] = [*made["allOf"], {"pattern": PATTERNS[name]}]
    if name == "hostname":
        longest = made.get("maxLength", HOSTNAME)
        made["maxLength"] = min(longest, HOSTNAME) if isinstance(longest, int) else longest


def _tell_apart(made: Schema) -> None:
    """Turn ``oneOf`` of distinct constants into ``anyOf``; llguidance does so for strings only."""
    listed = made.get("oneOf")
    if not isinstance(listed, list) or "anyOf" in made:
        return
    found: list[Any] = []
    for each in listed:
        values = [each["const"]] if isinstance(each, dict) and "const" in each else _list(each, "enum")
        if not values or any(isinstance(value, dict | list) for value in values):
            return
        found += {(isinstance(value, bool), value) for value in values}
    if len(set(found)) == len(found):
        made["anyOf"] = made.pop("oneOf")


def _list(node: Any, key: str) -> list[Any]:
    value = node.get(key) if isinstance(node, dict) else None
    return value if isinstance(value, list) else []


def _close(made: Schema) -> None:
    """Replace the unevaluated… keywords by additionalProperties and items, where they mean the same."""
    if ASIDE & made.keys():
        return
    for key, known in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if key in made:
            if known not in made:
                made[known] = made[key]
            elif isinstance(made[known], list):
                continue
            del made[key]


def _name(made: Schema, root: Schema) -> None:
    """Replace propertyNames by properties or patternProperties."""
    if "propertyNames" not in made:
        return
    wanted = _wanted(made.pop("propertyNames"), root)
    if wanted is None:
        made["maxProperties"] = 0
        return
    if not wanted or (wanted.keys() == {"format"} and _unknown(wanted["format"])):
        return
    rest = made.get("additionalProperties", True)
    made["additionalProperties"] = False
    known = made.get("properties", {})
    if "patternProperties" in made or not isinstance(known, dict):
        raise Refused(NAMES)
    if len(wanted) == 1 and wanted.keys() <= {"const", "enum"}:
        allowed = _texts([wanted["const"]] if "const" in wanted else wanted["enum"])
        made["properties"] = {name: value if name in allowed else False for name, value in known.items()} | {
            name: rest for name in allowed if name not in known
        }
    elif "properties" in made:
        raise Refused(NAMES)
    else:
        made["patternProperties"] = {_spelled(wanted): rest}


def _wanted(names: Any, root: Schema) -> Schema | None:
    """Return the constraints on names besides being a string; None if no name is allowed."""
    for _ in range(DEPTH):
        if not isinstance(names, dict) or names.keys() - NOTES != {"$ref"} or not isinstance(names["$ref"], str):
            break
        names = follow(names["$ref"], root)
    if names is False:
        return None
    wanted = {key: value for key, value in names.items() if key not in NOTES} if isinstance(names, dict) else None
    if wanted is None or wanted.keys() - STRINGS:
        raise Refused(NAMES)
    kinds = wanted.pop("type", "string")
    return wanted if "string" in ([kinds] if isinstance(kinds, str) else _texts(kinds)) else None


def _spelled(wanted: Schema) -> str:
    """Return the pattern that names with these constraints match."""
    _round(wanted)
    if wanted.keys() == {"pattern"} and isinstance(wanted["pattern"], str):
        return wanted["pattern"]
    if wanted.keys() == {"format"} and isinstance(wanted["format"], str) and wanted["format"] in PATTERNS:
        return PATTERNS[wanted["format"]]
    if wanted.keys() <= {"minLength", "maxLength"} and all(type(each) is int for each in wanted.values()):
        return Rust(f"^(?s:.{{{wanted.get('minLength', 0)},{wanted.get('maxLength', '')}}})$")
    raise Refused(NAMES)


def _unknown(format: Any) -> bool:
    return isinstance(format, str) and format not in FORMATS


def _texts(value: Any) -> list[str]:
    """Return the distinct strings of a list."""
    return list(dict.fromkeys(each for each in value if isinstance(each, str))) if isinstance(value, list) else []


def _grouped(made: Schema) -> Schema:
    """Reorder a schema so that llguidance sees all keywords about the value itself as one group, at ``properties``."""
    own = {key: value for key, value in made.items() if key not in PARTS}
    place = "properties" if "properties" in made else next(iter(own), None)
    ordered: Schema = {}
    for key, value in made.items():
        if key == place:
            ordered |= own
        elif key in PARTS:
            ordered[key] = value
    return ordered
