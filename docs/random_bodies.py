"""Values drawn at random from JSON schemas of the kind that ``body_schemas.py`` writes."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import jsonschema

ANY_VALUES: list[Any] = [True, 7, -3.5, "q", ["q", 1], {"q": 1}, [], {}]
TEXTS = [
    "a",
    "zebra",
    "Hello, world!",
    "1",
    "-7",
    "x y",
    "é ü",
    "日本",
    'quote " and \\',
    "line\nbreak",
    "<b>",
    "{}",
    "%s",
]
# Texts of formats and patterns that schemas of bodies have.
FORMAT_TEXTS: dict[str, list[str]] = {
    "regex": ["a+", "[0-9]{2,4}", "(yes|no)", "a"],
    "grammar": ['root ::= "a"', 'start: "a"'],
    "json": ["{}", '{"a": 1}', '{"type": "object"}'],
    "byte": ["", "aGk=", "QUJD", "AAAAAAAA"],
}
# Patterns of nearly any text, whose texts are no regular expressions.
OPEN_PATTERN_TEXTS = {
    r"^[^@/\\\u0000]+$": ["a", "(", "*", "é", "line\nbreak"],
    r"^[^\u0000-\u001f\u007f-\u009f]+$": ["a", "(", "*", "é", "@/"],
    r"^[ -~]+$": ["a", "(", "*", "@/", "x y"],
}
PATTERN_TEXTS = OPEN_PATTERN_TEXTS | {
    r"^[a-zA-Z0-9_-]{1,64}$": ["a", "get_weather", "A-1", "x" * 64],
    r"^-?[0-9]{1,9}$": ["0", "17", "-3", "123456789"],
    r"^[0-9]{1,9}$": ["0", "17", "123456789"],
    r"^[0-9]{1,3}$": ["0", "5", "127"],
    r"^\S+$": ["a", "zebra", "x.y", "é"],
    r"^[a-z]{2}$": ["en", "de"],
}


def draw_value(schema: Any, source: random.Random, depth: int = 0) -> Any:
    """Return a value that is valid under the schema, drawn with ``source``. Raises LookupError if none is found."""
    if schema is True or schema == {}:
        return draw_anything(source, depth)
    conditions = {name: schema[name] for name in ("allOf", "dependentSchemas") if name in schema}
    for _ in range(200):
        value = _draw_unconditioned(schema, source, depth)
        if not conditions or is_valid(conditions, value):
            return value
    raise LookupError("no value meets all conditions")


def is_valid(schema: Any, value: Any) -> bool:
    """True if the value is valid under the schema."""
    return _validator(_Key(schema)).is_valid(value)


def forget_schemas() -> None:
    """Forget the validators of schemas, which have changed."""
    _validator.cache_clear()


class _Key:
    """A schema by its identity, which keeps it alive."""

    def __init__(self, schema: Any):
        self.schema = schema

    def __hash__(self) -> int:
        return id(self.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.schema is other.schema


@lru_cache(maxsize=256)
def _validator(key: _Key) -> Any:
    return jsonschema.Draft202012Validator(key.schema)


def draw_anything(source: random.Random, depth: int = 0) -> Any:
    """Return any JSON value."""
    kind = source.randrange(6 if depth < 3 else 4)
    match kind:
        case 0:
            return source.choice([None, True, False])
        case 1:
            return source.randint(-1000, 1000)
        case 2:
            return source.choice(TEXTS)
        case 3:
            return source.uniform(-10, 10)
        case 4:
            return [draw_anything(source, depth + 1) for _ in range(source.randrange(3))]
    return {source.choice("qwxyz"): draw_anything(source, depth + 1) for _ in range(source.randrange(3))}


def _draw_unconditioned(schema: dict[str, Any], source: random.Random, depth: int) -> Any:
    if "anyOf" in schema:
        return draw_value(source.choice(schema["anyOf"]), source, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return source.choice(schema["enum"])
    kinds = schema.get("type")
    if kinds is None:
        return draw_anything(source, depth)
    kind = kinds
    if isinstance(kinds, list):  # null is drawn rarely, because it means absence
        kind = "null" if "null" in kinds and source.random() < 0.1 else source.choice([k for k in kinds if k != "null"])
    match kind:
        case "null":
            return None
        case "boolean":
            return source.random() < 0.5
        case "integer":
            return _draw_integer(schema, source)
        case "number":
            return _draw_number(schema, source)
        case "string":
            return _draw_text(schema, source)
        case "array":
            return _draw_array(schema, source, depth)
    return _draw_object(schema, source, depth)


def _draw_integer(schema: dict[str, Any], source: random.Random) -> int:
    low, high = schema.get("minimum", -(10**25)), schema.get("maximum", 10**25)
    near = [low, high, *(number for number in (0, 1, 2, 3, 5, 17, 64) if low <= number <= high)]
    return source.choice(near) if source.random() < 0.7 else source.randint(low, min(high, low + 1000))


def _draw_number(schema: dict[str, Any], source: random.Random) -> float:
    least, most = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    low = schema.get("minimum", -1e6 if least is None else least)
    high = schema.get("maximum", max(1e6, low) if most is None else most)
    near = [number for number in (low, high, 0, 1, 0.5, 2) if low <= number <= high and number not in (least, most)]
    if near and source.random() < 0.5:
        return float(source.choice(near))
    drawn = source.uniform(low, min(high, max(low + 4, 4)))
    return drawn if drawn not in (least, most) else (low + high) / 2


def _draw_text(schema: dict[str, Any], source: random.Random) -> str:
    texts = FORMAT_TEXTS.get(schema.get("format", "")) or PATTERN_TEXTS.get(schema.get("pattern", "")) or TEXTS
    longest, shortest = schema.get("maxLength", 1000), schema.get("minLength", 0)
    if texts is TEXTS:
        if source.random() < 0.1:
            return "x" * source.choice([shortest, min(longest, 300)])
        if source.random() < 0.3:
            letters = (chr(source.choice([source.randint(32, 126), source.randint(160, 0xD7FF)])) for _ in range(9))
            texts = ["".join(letters)]
    fitting = [text for text in texts if shortest <= len(text) <= longest]
    return source.choice(fitting or ["x" * max(shortest, 1)])


def _draw_array(schema: dict[str, Any], source: random.Random, depth: int) -> list[Any]:
    least, most = schema.get("minItems", 0), schema.get("maxItems", 1 << 20)
    length = min(max(least, source.choice([0, 1, 1, 2, 3])), most)
    kinds = [*schema.get("prefixItems", ()), *[schema.get("items", {})] * length][:length]
    if (
        "prefixItems" in schema and "items" in schema and kinds
    ):  # a conversation that begins with a user's message also ends with one
        kinds[-1] = kinds[0]
    items = [draw_value(kind, source, depth + 1) for kind in kinds]
    if schema.get("uniqueItems"):
        items = [item for number, item in enumerate(items) if _name_of(item) not in map(_name_of, items[:number])]
    return items


def _name_of(item: Any) -> Any:
    """Return the name of an item, which no other item may have, or the item itself."""
    if not isinstance(item, dict):
        return item
    inner = next((item[kind] for kind in ("function", "custom") if kind in item), item)
    return item.get("name") or item.get("custom_id") or (item if inner is item else _name_of(inner))


def _draw_object(schema: dict[str, Any], source: random.Random, depth: int) -> dict[str, Any]:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    optional = [name for name in properties if name not in required]
    share = source.choice([0, 1, 2, 3, 5, 8])
    chosen = {*required, *source.sample(optional, min(share, len(optional)))}
    value = {name: draw_value(properties[name], source, depth + 1) for name in properties if name in chosen}
    others = schema.get("additionalProperties", True)
    names = PATTERN_TEXTS[schema["propertyNames"]["pattern"]] if "propertyNames" in schema else ["zq", "x_other"]
    if others is not False and source.random() < (0.7 if not properties else 0.1):
        value |= {name: draw_value(others, source, depth + 1) for name in source.sample(names, source.randint(1, 2))}
    return value
