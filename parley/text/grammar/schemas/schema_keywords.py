"""Rewrite the keywords of one schema into those that llguidance enforces exactly; refuse the ones that have no rewrite.

llguidance reads bounds and constants as doubles, does not know propertyNames, allows duplicate members, and evaluates
the keywords before and after ``allOf`` and similar keywords separately. Nesting is the business of ``json_schema``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.regex import ESCAPED_CODES, RustRegex, to_rust_regex
from parley.text.grammar.schemas.string_formats import FORMAT_PATTERNS, KNOWN_FORMATS, NATIVE_FORMATS
from parley.text.parsing.calls import resolve_pointer

Schema = dict[str, Any]

MAX_NAME_REFERENCES = 8  # references followed in propertyNames
MAX_STRING_LENGTH = 2**31 - 1  # characters; llguidance reads no larger maxLength, and no answer is that long
MAX_HOSTNAME_LENGTH = 253  # characters, dots included: RFC 1035, section 2.3.4

ANNOTATIONS = frozenset({
    "$comment", "$dynamicAnchor", "$recursiveAnchor", "$schema", "default", "deprecated", "description", "examples",
    "title",
})  # fmt: skip
DRAFT_3_KEYWORDS = ("disallow", "divisibleBy", "extends")  # of draft 3; llguidance treats them as annotations
COUNT_KEYWORDS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
BOUND_DIRECTIONS = {
    "minimum": math.inf,
    "exclusiveMinimum": math.inf,
    "maximum": -math.inf,
    "exclusiveMaximum": -math.inf,
}
PARTNER_KEYWORDS = {"else": ("if",), "if": ("then", "else"), "maxContains": ("contains",), "minContains": ("contains",),
          "then": ("if",)}  # fmt: skip
"""Keywords that have no effect without any of these next to them."""
NO_EFFECT_VALUES: dict[str, tuple[Any, ...]] = {
    "dependencies": ({},), "dependentRequired": ({},), "dependentSchemas": ({},), "not": (False,),
    "propertyNames": (True, {}), "unevaluatedItems": (True, {}), "uniqueItems": (False,),
}  # fmt: skip
"""Values for which a keyword has no effect."""
GROUP_SEPARATORS = frozenset({"$ref", "allOf", "anyOf", "const", "enum", "oneOf"})
"""llguidance evaluates the keywords between two of these as one group."""
EVALUATING_KEYWORDS = frozenset(
    {"$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "contains", "dependentSchemas", "if", "not", "oneOf"}
)
"""Keywords that may evaluate members or items that the schema itself does not mention."""
STRING_KEYWORDS = frozenset({"const", "enum", "format", "maxLength", "minLength", "pattern", "type"})

NUMBER_TOO_LARGE = "a number in it is too large"
INEXACT_INTEGER = "an integer in enum or const is too large to be represented exactly"
MIN_PROPERTIES_LIMIT = "minProperties is supported up to the number of required properties plus one"
PROPERTY_NAMES_LIMIT = (
    "propertyNames is supported with enum, const, pattern or lengths, without other keywords for the same names"
)


def rewrite_keywords(node: Schema, root: Schema) -> Schema | bool:
    """Return a rewritten copy whose subschemas are unchanged, or False if no value can match.

    ``root`` is the whole schema, for references. Raises GrammarRefused.
    """
    rewritten = {
        key: value for key, value in node.items() if key not in ANNOTATIONS and not _has_no_effect(key, value, node)
    }
    for key in DRAFT_3_KEYWORDS:
        if key in rewritten:
            raise GrammarRefused(f'"{key}" is not supported')
    if (denied := rewritten.get("not")) is True or denied == {}:
        return False
    _normalize_numbers(rewritten)
    for value in _scalar_constants(rewritten):
        _check_constant(value)
    _replace_property_names(rewritten, root)
    _translate_patterns(rewritten)
    _enforce_format(rewritten)
    _relax_one_of(rewritten)
    _replace_unevaluated(rewritten)
    min_members, required = rewritten.get("minProperties"), rewritten.get("required")
    if isinstance(min_members, int) and min_members > 1 + len(_distinct_strings(required)):
        raise GrammarRefused(MIN_PROPERTIES_LIMIT)
    return _group_keywords(rewritten)


def has_control_constants(node: Schema) -> bool:
    """Whether a constant contains a character that JSON can write only as a \\u escape."""
    return any(isinstance(value, str) and _has_control_character(value) for value in _scalar_constants(node))


def _has_no_effect(key: str, value: Any, node: Schema) -> bool:
    """Whether a keyword has no effect."""
    if key in PARTNER_KEYWORDS and not any(other in node for other in PARTNER_KEYWORDS[key]):
        return True
    return any(type(value) is type(no_effect) and value == no_effect for no_effect in NO_EFFECT_VALUES.get(key, ()))


def _normalize_numbers(schema: Schema) -> None:
    """Convert whole floats to integers, and round bounds inwards to doubles."""
    for key in COUNT_KEYWORDS:
        if isinstance(number := schema.get(key), float) and number.is_integer():
            schema[key] = int(number)
    if isinstance(longest := schema.get("maxLength"), int) and longest > MAX_STRING_LENGTH:
        del schema["maxLength"]
    for key, direction in BOUND_DIRECTIONS.items():
        limit = schema.get(key)
        if isinstance(limit, int | float) and not isinstance(limit, bool):
            near = _to_double(limit)
            if near != limit:
                schema[key] = near if (near > limit) is (direction > 0) else _to_double(math.nextafter(near, direction))


def _to_double(number: float) -> float:
    try:
        near = float(number)
    except OverflowError:
        raise GrammarRefused(NUMBER_TOO_LARGE) from None
    if not math.isfinite(near):
        raise GrammarRefused(NUMBER_TOO_LARGE)
    return near


def _check_constant(value: Any) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and _to_double(value) != value:
        raise GrammarRefused(INEXACT_INTEGER)


def _scalar_constants(node: Schema) -> Iterator[Any]:
    """Yield the scalar values in const and enum."""
    unvisited = [node.get("const"), node.get("enum")]
    while unvisited:
        value = unvisited.pop()
        if isinstance(value, dict | list):
            unvisited += value.values() if isinstance(value, dict) else value
        else:
            yield value


def _has_control_character(text: str) -> bool:
    return any(ord(letter) in ESCAPED_CODES for letter in text)


def _translate_patterns(schema: Schema) -> None:
    """Translate patterns to the syntax that llguidance reads."""
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = to_rust_regex(pattern, schema=True)
    if isinstance(by_pattern := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {
            to_rust_regex(pattern, schema=True): value for pattern, value in by_pattern.items()
        }


def _enforce_format(schema: Schema) -> None:
    name = schema.get("format")
    if not isinstance(name, str):
        return
    if name not in NATIVE_FORMATS:
        del schema["format"]
    if name in FORMAT_PATTERNS:
        if "pattern" not in schema:
            schema["pattern"] = FORMAT_PATTERNS[name]
        elif isinstance(schema.setdefault("allOf", []), list):
            schema["allOf"] = [*schema["allOf"], {"pattern": FORMAT_PATTERNS[name]}]
    if name == "hostname":
        longest = schema.get("maxLength", MAX_HOSTNAME_LENGTH)
        schema["maxLength"] = min(longest, MAX_HOSTNAME_LENGTH) if isinstance(longest, int) else longest


def _relax_one_of(schema: Schema) -> None:
    """Turn ``oneOf`` of distinct constants into ``anyOf``; llguidance does so for strings only."""
    alternatives = schema.get("oneOf")
    if not isinstance(alternatives, list) or "anyOf" in schema:
        return
    constants: list[Any] = []
    for alternative in alternatives:
        values = (
            [alternative["const"]]
            if isinstance(alternative, dict) and "const" in alternative
            else _list_member(alternative, "enum")
        )
        if not values or any(isinstance(value, dict | list) for value in values):
            return
        constants += {(isinstance(value, bool), value) for value in values}
    if len(set(constants)) == len(constants):
        schema["anyOf"] = schema.pop("oneOf")


def _list_member(node: Any, key: str) -> list[Any]:
    value = node.get(key) if isinstance(node, dict) else None
    return value if isinstance(value, list) else []


def _replace_unevaluated(schema: Schema) -> None:
    """Replace the unevaluated… keywords by additionalProperties and items, where they mean the same."""
    if (unevaluated := schema.get("unevaluatedProperties")) is True or unevaluated == {}:
        del schema["unevaluatedProperties"]
        schema.setdefault("additionalProperties", True)
    if EVALUATING_KEYWORDS & schema.keys():
        return
    for key, replacement in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if key in schema:
            if replacement not in schema:
                schema[replacement] = schema[key]
            elif isinstance(schema[replacement], list):
                continue
            del schema[key]


def _replace_property_names(schema: Schema, root: Schema) -> None:
    """Replace propertyNames by properties or patternProperties."""
    if "propertyNames" not in schema:
        return
    constraints = _name_constraints(schema.pop("propertyNames"), root)
    if constraints is None:
        schema["maxProperties"] = 0
        return
    if not constraints or (constraints.keys() == {"format"} and _is_unknown_format(constraints["format"])):
        return
    additional = schema.get("additionalProperties", True)
    schema["additionalProperties"] = False
    properties = schema.get("properties", {})
    if "patternProperties" in schema or not isinstance(properties, dict):
        raise GrammarRefused(PROPERTY_NAMES_LIMIT)
    if len(constraints) == 1 and constraints.keys() <= {"const", "enum"}:
        allowed = _distinct_strings([constraints["const"]] if "const" in constraints else constraints["enum"])
        schema["properties"] = {name: value if name in allowed else False for name, value in properties.items()} | {
            name: additional for name in allowed if name not in properties
        }
    elif "properties" in schema:
        raise GrammarRefused(PROPERTY_NAMES_LIMIT)
    else:
        schema["patternProperties"] = {_name_pattern(constraints): additional}


def _name_constraints(name_schema: Any, root: Schema) -> Schema | None:
    """Return the constraints on names besides being a string; None if no name is allowed."""
    for _ in range(MAX_NAME_REFERENCES):
        if (
            not isinstance(name_schema, dict)
            or name_schema.keys() - ANNOTATIONS != {"$ref"}
            or not isinstance(name_schema["$ref"], str)
        ):
            break
        name_schema = resolve_pointer(name_schema["$ref"], root)
    if name_schema is False:
        return None
    constraints = (
        {key: value for key, value in name_schema.items() if key not in ANNOTATIONS}
        if isinstance(name_schema, dict)
        else None
    )
    if constraints is None or constraints.keys() - STRING_KEYWORDS:
        raise GrammarRefused(PROPERTY_NAMES_LIMIT)
    kinds = constraints.pop("type", "string")
    return constraints if "string" in ([kinds] if isinstance(kinds, str) else _distinct_strings(kinds)) else None


def _name_pattern(constraints: Schema) -> str:
    """Return the pattern that names with these constraints match."""
    _normalize_numbers(constraints)
    if constraints.keys() == {"pattern"} and isinstance(constraints["pattern"], str):
        return constraints["pattern"]
    if (
        constraints.keys() == {"format"}
        and isinstance(constraints["format"], str)
        and constraints["format"] in FORMAT_PATTERNS
    ):
        return FORMAT_PATTERNS[constraints["format"]]
    if constraints.keys() <= {"minLength", "maxLength"} and all(type(length) is int for length in constraints.values()):
        return RustRegex(f"^(?s:.{{{constraints.get('minLength', 0)},{constraints.get('maxLength', '')}}})$")
    raise GrammarRefused(PROPERTY_NAMES_LIMIT)


def _is_unknown_format(format_name: Any) -> bool:
    return isinstance(format_name, str) and format_name not in KNOWN_FORMATS


def _distinct_strings(value: Any) -> list[str]:
    """Return the distinct strings of a list."""
    return (
        list(dict.fromkeys(element for element in value if isinstance(element, str))) if isinstance(value, list) else []
    )


def _group_keywords(schema: Schema) -> Schema:
    """Reorder a schema so that llguidance sees all keywords about the value itself as one group, at ``properties``."""
    ungrouped = {key: value for key, value in schema.items() if key not in GROUP_SEPARATORS}
    group_key = "properties" if "properties" in schema else next(iter(ungrouped), None)
    ordered: Schema = {}
    for key, value in schema.items():
        if key == group_key:
            ordered |= ungrouped
        elif key in GROUP_SEPARATORS:
            ordered[key] = value
    return ordered
