"""Makes a schema narrower until its values are taken: conditions between members, learned from refused values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

from body_schemas import KIND_NAMES, Schema, add_condition, find_last_taken
from random_bodies import draw_value, forget_schemas, is_valid

Takes = Callable[[Any], bool]
DRAWS = 200  # bodies at random in a round
THOROUGH_DRAWS = 2000  # in the round that looks for rare clashes
MAX_ROUNDS = 24
MAX_REFUSALS = 30  # reasons for which one body may be refused
SPLITS = (16, 4, 1, 0)


class CannotRefine(Exception):
    """A refused body has nothing that could be taken from it."""


def refine_schema(schema: Schema, takes: Takes) -> list[str]:
    """Change ``schema`` until bodies drawn from it are taken. Return the members that were left out for it."""
    refinement = _Refinement(schema, takes)
    refinement.repeat_rounds()
    if refinement.run_round(THOROUGH_DRAWS):
        refinement.repeat_rounds()
    return refinement.left_out


class _Refinement:
    """The work on one schema. ``left_out``: the members that it no longer has."""

    def __init__(self, schema: Schema, takes: Takes):
        self._schema = schema
        self._takes = takes
        self._source = random.Random(11)
        self.left_out: list[str] = []

    def repeat_rounds(self) -> None:
        """Run rounds until one leaves the schema as it is. Raises CannotRefine."""
        for _ in range(MAX_ROUNDS):
            if not self.run_round(DRAWS):
                return
        raise CannotRefine(f"bodies are still refused after {MAX_ROUNDS} rounds")

    def run_round(self, draws: int) -> bool:
        """Narrow the schema by the refused ones of many bodies. Return whether it changed. Raises CannotRefine."""
        changed = False
        for body in _bodies(self._schema, self._source, draws):
            changed |= self._exclude_body(body)
        return changed

    def _exclude_body(self, body: Any) -> bool:
        """Narrow the schema until a body is taken or not valid. Return whether it changed. Raises CannotRefine."""
        schema, takes = self._schema, self._takes
        for tries in range(MAX_REFUSALS):
            if takes(body) or not is_valid(schema, body):
                return tries > 0
            excluded = _exclude(schema, smaller := _reduce(schema, body, takes), takes)
            if excluded is None:
                if not tries:
                    raise CannotRefine(f"refused: {smaller}")
                break  # it is valid only because it has members that another variant of the body does not name
            self.left_out += excluded
            forget_schemas()
        return True


def _bodies(schema: Schema, source: random.Random, draws: int) -> Iterator[Any]:
    """Yield bodies with each pair of members, then bodies at random."""
    for variant in schema.get("anyOf", [schema]):
        properties, required = variant.get("properties", {}), variant.get("required", [])
        for pair in combinations([name for name in properties if name not in required], 2):
            for body in _bodies_with(variant, pair, source):
                if set(pair) <= properties.keys():  # neither was left out because of an earlier body
                    yield body
    for _ in range(draws):
        yield draw_value(schema, source)


def _bodies_with(variant: Schema, pair: Sequence[str], source: random.Random) -> list[Any]:
    """Return bodies with two members: one at random, and those with extreme values."""
    properties = variant["properties"]
    names = [name for name in (*variant.get("required", ()), *pair) if name in properties]
    if not set(pair) <= set(names):
        return []
    some = {"type": "object", "properties": {name: properties[name] for name in names}, "required": names}
    drawn = draw_value(some | {"additionalProperties": False}, source)
    values = product(*([(name, extreme) for extreme in _extremes(properties[name])] for name in pair))
    return [drawn, *(drawn | dict(members) for members in values)]


def _extremes(member: Schema) -> list[Any]:
    """Return values that are the likeliest to clash with other members."""
    for variant in member.get("anyOf", [member]):
        if variant.get("type") in ("boolean", ["boolean", "null"]):
            return [True]
        if "minimum" in variant and "maximum" in variant:
            return [variant["minimum"], variant["maximum"]]
    return []


def _reduce(schema: Schema, body: Any, takes: Takes) -> Any:
    """Return the refused body without what the refusal does not need."""
    for smaller in _smaller(body):
        if is_valid(schema, smaller) and not takes(smaller):
            return _reduce(schema, smaller, takes)
    return body


def _smaller(value: Any) -> Iterator[Any]:
    """Yield the value without each of its members and elements, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            rest = {other: kept for other, kept in value.items() if other != name}
            yield rest
            yield from (value | {name: smaller} for smaller in _smaller(inner))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield [*value[:number], *value[number + 1 :]]
            yield from ([*value[:number], smaller, *value[number + 1 :]] for smaller in _smaller(inner))


def _objects(schema: Schema, value: Any, path: str, put: Callable[[Any], Any]) -> Iterator[tuple[Any, ...]]:
    """Yield schema, value, path and ``put`` of each object in a value, the outer ones first."""
    fitting = [branch for branch in schema.get("anyOf", [schema]) if is_valid(branch, value)]
    if isinstance(value, dict):
        fitting.sort(key=lambda branch: -len(branch.get("properties", {}).keys() & value.keys()))
    schema = fitting[0] if fitting else schema
    if isinstance(value, dict) and schema.get("properties"):
        yield schema, value, path, put
        for name, inner in value.items():
            if name in schema["properties"]:
                yield from _objects(
                    schema["properties"][name],
                    inner,
                    f"{path}.{name}" if path else name,
                    lambda new, name=name: put(value | {name: new}),
                )
    elif isinstance(value, list):
        kinds = [*schema.get("prefixItems", ()), *[schema.get("items", {})] * len(value)]
        for number, inner in enumerate(value):
            yield from _objects(
                kinds[number],
                inner,
                f"{path}[]",
                lambda new, number=number: put([*value[:number], new, *value[number + 1 :]]),
            )


def _exclude(schema: Schema, body: Any, takes: Takes) -> list[str] | None:
    """Narrow the schema so that a reduced refused body is not valid. Return the members that are left out for it, None
    if nothing can be done."""
    places = []
    for node, value, path, put in _objects(schema, body, "", lambda new: new):
        optional = [name for name in value if name in node["properties"] and name not in node.get("required", ())]
        if len(optional) >= 2:
            _exclude_pair(node, value, optional, lambda new, put=put: takes(put(new)))
            return []
        places.append((node, value, path, put, optional))
    if _exclude_greater(places, takes):
        return []
    candidates = [(*place[:4], name, True) for place in reversed(places) for name in place[4]]
    candidates += [
        (*place[:4], name, False)
        for place in reversed(places)
        for name in place[0].get("required", ())
        if name in place[0]["properties"]
    ]
    for node, value, path, put, name, is_optional in candidates:
        if _narrow(node["properties"][name], value[name], lambda new: takes(put(value | {name: new}))):  # noqa: B023
            return []
        if is_optional:
            del node["properties"][name]
            return [f"{path}.{name}" if path else name]
    return None


def _exclude_greater(places: Sequence[tuple[Any, ...]], takes: Takes) -> bool:
    """Add a condition if a number inside a member of the body must be less than a number of the body itself. Return
    whether it is so."""
    if not places or places[0][2]:
        return False
    root, body = places[0][:2]
    for node, value, path, put, _ in places[1:]:
        member, _, deeper = path.partition(".")
        for name, outer in ((name, outer) for name in value for outer in body):
            bounds = node["properties"].get(name, {})
            if (
                not isinstance(value[name], int)
                or not isinstance(body[outer], int)
                or deeper
                or "minimum" not in bounds
            ):
                continue
            split = 4 * max(bounds["minimum"], 1)
            limited = [put(value | {name: new}) | {outer: split + 1} for new in (bounds["minimum"], split)]
            if all(map(takes, limited)):
                kind = {kind_name: {"const": value[kind_name]} for kind_name in KIND_NAMES if kind_name in value}
                test = {member: {"properties": kind, "required": [*kind, name]}}
                then = {"properties": {outer: {"minimum": split + 1}}}
                if add_condition(root, {"properties": test, "required": [member]}, then):
                    bounds["maximum"] = split
                    return True
    return False


def _narrow(member: Schema, value: Any, takes: Takes) -> bool:
    """Narrow the schema of one member so that a value is not valid. Return False if that cannot be done."""
    for variant in member.get("anyOf", ()):
        if is_valid(variant, value):
            if _narrow(variant, value, takes):
                return True
            if len(member["anyOf"]) > 1:
                member["anyOf"].remove(variant)
                return True
            return False
    kinds = member.get("type")
    if isinstance(kinds, list) and value is None:
        member["type"] = kinds[0]
        return True
    if len(member.get("enum", ())) > 1 and value in member["enum"]:
        member["enum"] = [choice for choice in member["enum"] if choice != value]
        return True
    if kinds == "boolean":
        del member["type"]
        member["const"] = not value
        return takes(not value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        for start in (1, 5, 0, 16, 0.5):
            if is_valid(member, start) and takes(start):
                if isinstance(value, int):
                    last: float = find_last_taken(takes, int(start), value)
                else:
                    last = start
                member["maximum" if value > start else "minimum"] = last
                return True
    if value == "" and "minLength" not in member:
        member["minLength"] = 1
        return True
    if value == [] and "minItems" not in member:
        member["minItems"] = 1
        return True
    if isinstance(value, list) and len(value) > 1 and not any(isinstance(item, dict) for item in value):
        member["maxItems"] = len(value) - 1
        return True
    return False


def _exclude_pair(node: Schema, value: dict[str, Any], names: list[str], takes: Takes) -> None:
    """Add the condition that two members do not have these values together."""
    precise = sorted(
        names, key=lambda name: not isinstance(value[name], bool | str) or "enum" not in str(node["properties"][name])
    )
    first, second = precise[:2]
    others = {name: member for name, member in value.items() if name not in names[2:]} if len(names) > 2 else value
    spellings = [_flag_spellings(node["properties"][name]) for name in (first, second)]
    numbers = [
        isinstance(value[name], int | float) and not isinstance(value[name], bool) and not spelled
        for name, spelled in zip((first, second), spellings, strict=True)
    ]
    refused = [
        [spelling for spelling in spelled if not takes(others | {name: spelling})]
        for name, spelled in zip((first, second), spellings, strict=True)
    ]
    not_null: Schema = {"not": {"type": "null"}}
    if all(numbers):
        less, more = sorted((first, second), key=lambda name: -value[name])
        for split in SPLITS if _bound(node, more, "maximum", 0) > 1024 else SPLITS[::-1][1:]:
            if all(
                takes(others | {less: low, more: high})
                for low in (split, _bound(node, less, "minimum", split))
                for high in (split, _bound(node, more, "maximum", split))
            ):
                test = {"properties": {less: not_null, more: not_null}, "required": [less, more]}
                if add_condition(node, test, {"properties": {less: {"maximum": split}, more: {"minimum": split}}}):
                    return
    test = {"properties": {first: _class_of(node["properties"][first], value[first], refused[0])}, "required": [first]}
    then = _without_class(node["properties"][second], value[second], refused[1])
    if numbers[1]:
        for start in (1, 0, 2, 0.5, 5):
            if is_valid(node["properties"][second], start) and takes(others | {second: start}):
                last: float = start
                if isinstance(value[second], int):
                    last = find_last_taken(lambda new: takes(others | {second: new}), int(start), value[second])
                then = {"maximum" if value[second] > start else "minimum": last}
                break
    if not add_condition(node, test, {"properties": {second: then}}):
        member = node["properties"][first]
        if not _narrow(member, value[first], lambda new: takes(others | {first: new})):
            del node["properties"][first]


def _bound(node: Schema, name: str, keyword: str, default: float) -> float:
    variants = node["properties"][name].get("anyOf", [node["properties"][name]])
    return next((variant[keyword] for variant in variants if keyword in variant), default)


def _flag_spellings(member: Schema) -> list[Any]:
    """Return all spellings of true and false in a member that has several, such as true, 1 and "true"; else none."""
    spellings: list[Any] = []
    kinds = set()
    for variant in member.get("anyOf", ()):
        match variant:
            case {"type": "boolean" | ["boolean", "null"]}:
                spellings += [True, False]
            case {"const": bool(truth)}:
                spellings.append(truth)
            case {"type": "integer", "minimum": 0, "maximum": 1}:
                spellings += [0, 1]
            case {"enum": [*words]} if spellings:
                spellings += words
            case {"type": "null"}:
                continue
            case _:
                return []
        kinds.add(type(spellings[-1]))
    return spellings if bool in kinds and len(kinds) > 1 else []


def _class_of(member: Schema, value: Any, refused: Sequence[Any]) -> Schema:
    """Return a schema of the values that are like a value: the ``refused`` spellings of it, the same word, or any."""
    if len(refused) > 1:
        return {"enum": [*refused]}
    if isinstance(value, bool | None) or ("enum" in str(member) and isinstance(value, str)):
        return {"const": value}
    return {"not": {"type": "null"}}


def _without_class(member: Schema, value: Any, refused: Sequence[Any]) -> Schema:
    """Return a schema of values that are not like a value."""
    taken = _class_of(member, value, refused)
    return {"type": "null"} if "not" in taken else {"not": taken}
