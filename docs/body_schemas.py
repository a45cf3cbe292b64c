"""Learns a JSON schema for the body of every route from its reader, by probing: ``make openapi`` (some minutes).

A reader is asked which values it takes at each place of a body, and ``record_reads`` shows which members it asks for.
So nothing is written down twice: a schema allows what the reader takes. How members go together is not known then. It
comes from bodies drawn at random: each refused one is reduced to the members that the refusal needs, and the schema
gets a condition or becomes narrower, until none is refused. Members that are taken only in company that a schema cannot
express are left out, and listed; schemas allow members that they do not name.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from math import inf, nextafter
from typing import Any

from random_bodies import ANY_VALUES, FORMAT_TEXTS, OPEN_PATTERN_TEXTS, PATTERN_TEXTS, draw_value, is_valid
from survey import COMPLETE_BODIES, SHAPES, VALUES, Member, Members, record_reads

from parley.errors import ParleyError

Schema = dict[str, Any]
Put = Callable[[Any], Any]  # a value for a place -> a body with the value at that place

TEXT_PROBES = ["zebra 12", 'é\n"\\', "{", "(", "1", "x" * 40]
MAX_TEXT_LENGTH = 70_000
MAX_ARRAY_LENGTH = 3000
HUGE = 10**25
WORDS = ["auto", "none", "default", "low", "medium", "high", "text", "json", "user", "assistant", "system", "tool",
         "developer", "function", "true", "false", "float", "base64", "left", "right", "a", "b"]  # fmt: skip
ARRAYS: list[list[Any]] = [["a"], [1], [0.5], [{}], [["a"]], [[1]], [True]]
NUMBERS = [1, 2, 0, 5, 16, 100, 1024, -1]
NICE_BOUNDS = [0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0, 1e3, 1e6, 1e9, 1e30]
UNKNOWN = "zq"  # a member that no reader knows
KIND_NAMES = ("type", "role")  # members that say which kind of object an object is
MAX_DEPTH = 14


@dataclass
class SchemaLearner:
    """Learns what one reader takes. ``read_body`` raises ParleyError if the reader refuses a body.

    ``left_out``: the paths of members and elements that are only taken in certain company.
    """

    read_body: Callable[[Any], object]
    recorded: Members = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    words: set[str] = field(default_factory=set)
    probes: int = 0
    _taken: dict[str, bool] = field(default_factory=dict)

    def takes(self, body: Any) -> bool:
        """True if the reader takes the body. Words that a refusal quotes are noted: they may be allowed values."""
        key = json.dumps(body)
        if (verdict := self._taken.get(key)) is not None:
            return verdict
        self.probes += 1
        try:
            self.read_body(body)
            taken = True
        except ParleyError as error:
            taken = False
            self.words.update(re.findall(r"['\"`]([\w./+-]{1,40})['\"`]", error.message))
        if len(key) < 5000:
            self._taken[key] = taken
        return taken

    def learn_body(self) -> Schema | None:
        """Return the schema of a body, None if no body is taken."""
        bodies = [body for body in COMPLETE_BODIES if self.takes(body)]
        if not bodies:
            return None
        variants = self._learn_objects(lambda body: body, "", bodies, 0)
        if len(variants) > 1:  # what only one kind of body ignores belongs to another
            ignored_names = [
                {name for name, member in variant["properties"].items() if member == {}} for variant in variants
            ]
            ignored_by_all = set.intersection(*ignored_names)
            for variant in variants:
                required = variant.get("required", ())
                variant["properties"] = {
                    name: member
                    for name, member in variant["properties"].items()
                    if member != {} or name in required or name in ignored_by_all
                }
        return combine(variants)

    def _watch(self, body: Any) -> None:
        """Record which members the reader asks for in a body. It is slow, so not every body is watched."""
        with record_reads(self.recorded), suppress(ParleyError):
            self.read_body(body)

    def learn_value(self, put: Put, path: str, examples: list[Any], depth: int) -> Schema | None:
        """Return the schema of the values at a place, None if only null is taken there."""

        def takes(value: Any) -> bool:
            return self.takes(put(value))

        takes_null = takes(None)
        for value in (UNKNOWN, {}, *examples):
            takes(value)  # a refusal may quote words
            self._watch(put(value))
        if takes_null and all(map(takes, [*ANY_VALUES, *examples])):
            return {}
        asked = self.recorded.get(path, Member(path))
        examples = [*examples, *VALUES[asked.method]] if asked.method == "token_weights" else examples
        variants: list[Schema] = []
        booleans = [value for value in (True, False) if takes(value)]
        if booleans:
            variants.append({"type": "boolean"} if len(booleans) == 2 else {"const": booleans[0]})
        variants += self._learn_numbers(takes, asked, examples)
        variants += self._learn_texts(takes, asked, examples)
        if depth < MAX_DEPTH:
            variants += self._learn_arrays(put, path, asked, examples, depth)
            objects = [example for example in (*examples, {}) if isinstance(example, dict)]
            variants += self._learn_objects(put, path, [example for example in objects if takes(example)], depth)
        if not variants:
            return None
        return combine([*variants, {"type": "null"}] if takes_null else variants)

    def _learn_numbers(self, takes: Callable[[Any], bool], asked: Member, examples: list[Any]) -> list[Schema]:
        hints = [bound for bound in (asked.low, asked.high) if bound is not None]
        whole = [*map(int, hints), *NUMBERS]
        integers = [value for value in (*NUMBERS, *whole) if takes(value)]
        if not integers and not takes(0.5):
            return []
        if takes(0.5) or takes(1.5):
            return [self._learn_number_range(takes, hints)]
        start = integers[0]
        low = find_last_taken(takes, start, -HUGE, [int(hint) for hint in hints])
        high = find_last_taken(takes, start, HUGE, [int(hint) for hint in hints])
        for hole in [number for number in NUMBERS if low < number < high and not takes(number)]:
            if hole < start:
                low = max(low, find_last_taken(takes, start, hole))
            else:
                high = min(high, find_last_taken(takes, start, hole))
        source = random.Random(5)
        inside = [source.randint(max(low, start - 999), min(high, start + 999)) for _ in range(4)]
        if not all(map(takes, inside)):
            return [{"type": "integer", "enum": sorted({*integers, *filter(takes, range(-2, 9))})}]
        schema: Schema = {"type": "integer"}
        schema |= {"minimum": low} if low != -HUGE else {}
        schema |= {"maximum": high} if high != HUGE else {}
        outside = sorted({value for value in integers if not low <= value <= high})
        return [schema, *({"type": "integer", "enum": [value]} for value in outside)]

    def _learn_number_range(self, takes: Callable[[Any], bool], hints: list[float]) -> Schema:
        schema: Schema = {"type": "number"}
        if not takes(1e300):
            bounds = sorted({*map(float, hints), *NICE_BOUNDS}, reverse=True)
            high = next((bound for bound in bounds if takes(bound)), None)
            if high is not None:
                above = [bound for bound in bounds if bound > high and takes(nextafter(bound, -inf))]
                schema |= {"exclusiveMaximum": above[-1]} if above else {"maximum": high}
        if not takes(-1e300):
            bounds = sorted({*map(float, hints), 0.0, *(-bound for bound in NICE_BOUNDS), *NICE_BOUNDS})
            low = next((bound for bound in bounds if takes(bound)), None)
            if low is not None:
                below = [bound for bound in bounds if bound < low and takes(nextafter(bound, inf))]
                schema |= {"exclusiveMinimum": below[-1]} if below else {"minimum": low}
        return {name: _plain(bound) for name, bound in schema.items()}

    def _learn_texts(self, takes: Callable[[Any], bool], asked: Member, examples: list[Any]) -> list[Schema]:
        if all(map(takes, TEXT_PROBES)):
            schema: Schema = {"type": "string"} | ({} if takes("") else {"minLength": 1})
            if not takes("x" * MAX_TEXT_LENGTH):
                schema["maxLength"] = find_last_taken(
                    lambda size: takes("x" * size), 40, MAX_TEXT_LENGTH, [asked.cap or 0]
                )
            return [schema]
        for pattern, texts in OPEN_PATTERN_TEXTS.items():
            if all(map(takes, texts)):
                longest = find_last_taken(lambda size: takes("x" * size), 40, MAX_TEXT_LENGTH, [asked.cap or 0])
                return [{"type": "string", "pattern": pattern, "maxLength": longest}]
        for format_name, texts in FORMAT_TEXTS.items():
            if all(map(takes, texts)):
                return [{"type": "string", "format": format_name}]
        for pattern, texts in PATTERN_TEXTS.items():
            if all(map(takes, texts)):
                return [{"type": "string", "pattern": pattern}]
        words = [
            *asked.allowed,
            *(example for example in examples if isinstance(example, str)),
            *WORDS,
            *sorted(self.words),
        ]
        allowed: dict[str, str] = {}  # one for all that differ only in case: generators make one constant of them
        for word in dict.fromkeys(words):
            if word.lower() not in allowed and takes(word):
                allowed[word.lower()] = word
        return [{"type": "string", "enum": list(allowed.values())}] if allowed else []

    def _learn_arrays(self, put: Put, path: str, asked: Member, examples: list[Any], depth: int) -> list[Schema]:
        def put_alone(element: Any) -> Any:
            return put([element])

        arrays = [array for array in examples if isinstance(array, list) and self.takes(put(array))]
        elements = [element for array in arrays for element in array]
        alone = [element for element in elements if self.takes(put_alone(element))]
        first = alone[0] if alone else None
        later = [
            element
            for element in elements
            if element not in alone and isinstance(element, dict) and self.takes(put([first, element, first, element]))
        ]
        if len(alone) + len(later) < len(elements):
            self._leave_out(f"{path}[]")
        variants: list[Schema] = []
        if objects := [element for element in alone if isinstance(element, dict)]:
            kinds = combine(self._learn_objects(put_alone, f"{path}[]", objects, depth + 1))
            array = self._measure_array(put, asked, kinds, objects[0])
            if later:
                more = self._learn_objects(lambda element: put([first, element]), f"{path}[]", later, depth + 1)
                array |= {"prefixItems": [kinds], "items": combine([kinds, *more])}
            variants.append(array)
        others = [element for element in alone if not isinstance(element, dict)]
        for element in (*others, *(array[0] for array in ARRAYS if self.takes(put(array)))):
            if not any(is_valid(variant, [element]) for variant in variants):
                items = self.learn_value(put_alone, f"{path}[]", [element], depth + 1)
                if items is not None:
                    variants.append(self._measure_array(put, asked, items, element))
        mixed = self._mix_arrays(put, variants)
        if objects and variants[0].get("maxItems") == 1:
            mixed += self._learn_turns(put, path, kinds, objects[0], depth)
        return mixed

    def _learn_turns(self, put: Put, path: str, first_kind: Schema, first: Any, depth: int) -> list[Schema]:
        """Return schemas of conversations that begin and end with an object like ``first``, where turns alternate, with
        and without an object that only opens them."""
        role = self.recorded.get(f"{path}[].role", Member(path))
        others = [first | {"role": word} for word in role.allowed]

        def put_between(turn: Any) -> Any:
            return put([first, turn, first])

        def put_before(turn: Any) -> Any:
            return put([turn, first])

        between = [turn for turn in others if self.takes(put_between(turn))]
        openings = [turn for turn in others if self.takes(put_before(turn)) and not self.takes(put([turn]))]
        if not between:
            return []
        reply_kind = combine(self._learn_objects(put_between, f"{path}[]", between, depth + 1))
        opening_kinds = self._learn_objects(put_before, f"{path}[]", openings, depth + 1)
        starts: list[list[Schema]] = [[], *([kind] for kind in opening_kinds)]
        conversations = [
            [*start, first_kind, *[reply_kind, first_kind] * count] for start in starts for count in range(3)
        ]
        longer = {"description": "Longer conversations are read, too, if turns alternate."}
        return [
            {"type": "array", "prefixItems": kinds, "minItems": len(kinds), "maxItems": len(kinds)} | longer
            for kinds in conversations[1:]
        ]

    def _measure_array(self, put: Put, asked: Member, items: Schema, element: Any) -> Schema:
        """Return the schema of arrays with these items: how many there may be, and whether they may be equal."""

        def takes_many(size: int) -> bool:
            return self.takes(put([element] * size))

        array: Schema = {"type": "array", "items": items} | ({} if self.takes(put([])) else {"minItems": 1})
        if not takes_many(2):
            source = random.Random(7)
            pairs = [[element, draw_value(items, source)] for _ in range(9)]
            if any(pair[0] != pair[1] and self.takes(put(pair)) for pair in pairs):
                most = {"maxItems": asked.cap} if asked.cap is not None and asked.cap < 20_000 else {}
                return array | {"uniqueItems": True} | most
            return array | {"maxItems": 1}
        if not takes_many(MAX_ARRAY_LENGTH):
            array["maxItems"] = find_last_taken(takes_many, 2, MAX_ARRAY_LENGTH, [asked.cap or 0])
        elif asked.cap is not None and asked.cap < 20_000 and not takes_many(asked.cap + 1):
            array["maxItems"] = asked.cap
        return array

    def _mix_arrays(self, put: Put, variants: list[Schema]) -> list[Schema]:
        """Merge variants of arrays whose elements may occur in one array."""
        mixed: list[Schema] = []
        for variant in variants:
            for other in mixed:
                source = random.Random(3)
                pairs = [[draw_value(array["items"], source) for array in (other, variant)] for _ in range(6)]
                if all(self.takes(put(pair)) for pair in pairs):
                    other["items"] = combine([other["items"], variant["items"]])
                    break
            else:
                mixed.append(variant)
        return mixed

    def _learn_objects(self, put: Put, path: str, examples: list[dict[str, Any]], depth: int) -> list[Schema]:
        """Return a schema for each kind of object at a place. A ``KIND_NAMES`` member says which kind an object is."""
        prefix = f"{path}." if path else ""
        groups: dict[str, list[dict[str, Any]]] = {}
        for example in examples:
            groups.setdefault(_kind_of(example), []).append(example)
        for example in list(examples):
            for name in [name for name in KIND_NAMES if name in example]:
                self._watch(put({**example, name: UNKNOWN}))
                asked = self.recorded.get(prefix + name, Member(prefix + name))
                for variant in self._learn_texts(lambda value: self.takes(put({**example, name: value})), asked, []):  # noqa: B023
                    for word in variant.get("enum", ()):
                        groups.setdefault(_kind_of({**example, name: word}), [{**example, name: word}])
        variants: list[Schema] = []
        for group in groups.values():
            for example in [small for large in group for small in self._shrink_example(put, large)]:
                if not any(is_valid(variant, example) for variant in variants):
                    variants.append(self._learn_object(put, path, example, group, depth))
        return _merge_kinds(_drop_contained(variants))

    def _shrink_example(self, put: Put, example: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the example without members that it can lack, so that all that are left are required."""
        for names in (list(example), [*reversed(example)]):
            small = example
            for name in names:
                if name not in KIND_NAMES:
                    smaller = {other: value for other, value in small.items() if other != name}
                    small = smaller if self.takes(put(smaller)) else small
            yield small

    def _learn_object(
        self, put: Put, path: str, example: dict[str, Any], group: list[dict[str, Any]], depth: int
    ) -> Schema:
        """Return the schema of objects like an example. ``group``: all examples of its kind."""
        prefix = f"{path}." if path else ""
        properties: dict[str, Schema] = {}
        tried: set[str] = set()
        by_token = next((example for example in group if example and all(map(str.isdigit, example))), None)
        if by_token is not None and not self.takes(put({**example, UNKNOWN: 1})):
            name, value = next(iter(by_token.items()))
            inner = self.learn_value(lambda value: put({name: value}), prefix + name, [value], depth + 1)
            pattern = r"^[0-9]{1,9}$" if self.takes(put({"123456789": value})) else r"^[0-9]{1,3}$"
            return {"type": "object", "propertyNames": {"pattern": pattern}, "additionalProperties": inner or {}}
        self._watch(put(example))
        kind_names = [name for name in KIND_NAMES if isinstance(example.get(name), str)]
        names_in_group = dict.fromkeys(name for example in group for name in example)
        while names := [name for name in (*names_in_group, *self._asked_names(prefix)) if name not in tried]:
            for name in dict.fromkeys(names):
                tried.add(name)
                if name in kind_names:
                    properties[name] = {"type": "string", "enum": [example[name]]}
                    continue
                values = [other[name] for other in (example, *group) if name in other]
                learned = self.learn_value(
                    lambda value, name=name: put({**example, name: value}),  # type: ignore[misc]
                    prefix + name,
                    [*values, *deepcopy(SHAPES.get(name, []))],
                    depth + 1,
                )
                if learned is not None and not _only_false(learned):
                    if learned != {} or name in example or (depth == 0 and name in self._asked_names(prefix)):
                        properties[name] = learned
                elif name not in example:
                    self._leave_out(prefix + name)
        required = [
            name
            for name in example
            if not self.takes(put({other: value for other, value in example.items() if other != name}))
        ]
        schema: Schema = {"type": "object", "properties": properties}
        schema |= (
            {"required": [*required, *(name for name in kind_names if name not in required)]}
            if required or kind_names
            else {}
        )
        schema |= self._learn_additional(put, prefix, example, depth)
        return self._learn_company(put, prefix, example, schema, depth) if depth < 3 else schema

    def _learn_company(self, put: Put, prefix: str, example: dict[str, Any], schema: Schema, depth: int) -> Schema:
        """Add members and words that are taken only beside another member, with the condition that it is there."""
        properties = schema["properties"]
        left_out = [name for name in self._asked_names(prefix) if prefix + name in self.left_out]
        for name in (*left_out, *properties):
            asked = self.recorded.get(prefix + name, Member(prefix + name))
            if name in properties:
                values: list[Any] = [
                    *asked.allowed,
                    *([True] if {"const": False} in _variants(properties[name]) else []),
                ]
            else:
                values = [True, 1, "a", "1", *SHAPES.get(name, [])]
            for value in dict.fromkeys(json.dumps(value) for value in values):
                value = json.loads(value)
                if self.takes(put({**example, name: value})):
                    continue
                company_pair = self._find_company(put, example, properties, name, value)
                if company_pair is None:
                    continue
                company, beside = company_pair
                learned: Schema | None = {"const": value} if name in properties else self.learn_value(
                    lambda value, name=name, beside=beside: put({**beside, name: value}),  # type: ignore[misc]
                    prefix + name, deepcopy(SHAPES.get(name, [])), depth + 1,
                )  # fmt: skip
                if learned is None:
                    continue
                if name in properties:
                    properties[name] = combine(
                        [{"type": "string", "enum": [value]} if isinstance(value, str) else learned, properties[name]]
                    )
                    condition: Schema = {"const": value}
                else:
                    properties[name] = learned
                    self.left_out.remove(prefix + name)
                    condition = {"not": {"type": "null"}}
                then = {"properties": {company: _company_schema(beside[company])}, "required": [company]}
                add_condition(schema, {"properties": {name: condition}, "required": [name]}, then)
        return schema

    def _find_company(
        self, put: Put, example: dict[str, Any], properties: Schema, name: str, value: Any
    ) -> tuple[str, dict[str, Any]] | None:
        """Return a member beside which another is taken with this value, and the object with that member."""
        for company in properties:
            if company in example or company == name:
                continue
            for beside in (True, *SHAPES.get(company, [])[:3]):
                both = {**example, company: beside}
                if self.takes(put({**both, name: value})) and self.takes(put(both)):
                    return company, both
        return None

    def _learn_additional(self, put: Put, prefix: str, example: dict[str, Any], depth: int) -> Schema:
        if all(self.takes(put({**example, UNKNOWN: value})) for value in ANY_VALUES):
            return {}
        learned = self.learn_value(lambda value: put({**example, UNKNOWN: value}), prefix + UNKNOWN, [], depth + 1)
        return {"additionalProperties": False if learned is None else learned}

    def _asked_names(self, prefix: str) -> list[str]:
        """List the members that the reader has asked for in objects at a path."""
        inner = (path.removeprefix(prefix) for path in self.recorded if path.startswith(prefix))
        return [name for name in inner if name and "." not in name and "[" not in name and name != UNKNOWN]

    def _leave_out(self, path: str) -> None:
        if path not in self.left_out:
            self.left_out.append(path)


def _kind_of(example: dict[str, Any]) -> str:
    return json.dumps({name: example[name] for name in KIND_NAMES if name in example})


def _merge_kinds(variants: list[Schema]) -> list[Schema]:
    """Merge schemas of objects that differ only in the word that says which kind they are."""
    merged: dict[str, Schema] = {}
    for variant in variants:
        rest = deepcopy(variant)
        words = [
            (name, member.pop("enum"))
            for name, member in rest.get("properties", {}).items()
            if name in KIND_NAMES and "enum" in member
        ]
        key = json.dumps(rest, sort_keys=True)
        if len(words) == 1 and key in merged:
            name, allowed = words[0]
            merged[key]["properties"][name]["enum"] += allowed
        else:
            merged.setdefault(key if len(words) == 1 else key + str(len(merged)), variant)
    return list(merged.values())


def _variants(schema: Schema) -> list[Schema]:
    return schema.get("anyOf", [schema])


def _drop_contained(variants: list[Schema]) -> list[Schema]:
    """Drop variants all of whose values, as far as drawn, are values of another."""
    kept = list(variants)
    for variant in variants:
        source = random.Random(9)
        values = [draw_value(variant, source) for _ in range(30)]
        if any(other is not variant and all(is_valid(other, value) for value in values) for other in kept):
            kept.remove(variant)
    return kept


def _only_false(schema: Schema) -> bool:
    """True if only values are allowed that ask for nothing: false, 0, "", an empty object or list."""
    variants = _variants(schema)
    return all(
        variant.get("const", variant) is False
        or variant.get("enum") in ([0], [""])
        or variant.get("type") == "null"
        or (variant.get("type") == "integer" and variant.get("maximum") == 0)
        or (variant.get("properties") == {} and variant.get("additionalProperties") is False)
        for variant in variants
    )


def _company_schema(value: Any) -> Schema:
    if isinstance(value, list):
        return {"type": "array", "minItems": 1}
    return {"const": value} if isinstance(value, bool | str) else {"not": {"type": "null"}}


def add_condition(schema: Schema, test: Schema, then: Schema) -> bool:
    """Add a condition to a schema, together with others of the same test. Return False, and add nothing, if one of
    these requires something else of the same member."""
    conditions = schema.setdefault("allOf", [])
    for condition in conditions:
        if condition["if"] == test:
            if then["properties"].keys() & condition["then"]["properties"].keys():
                return False
            condition["then"]["properties"] |= then["properties"]
            required = [*condition["then"].get("required", []), *then.get("required", [])]
            condition["then"] |= {"required": required} if required else {}
            return True
    conditions.append({"if": test, "then": then})
    return True


def _plain(bound: Any) -> Any:
    """Return a bound as an integer if it is one."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() and abs(bound) < 1e15 else bound


def find_last_taken(takes: Callable[[int], bool], start: int, end: int, hints: Sequence[int] = ()) -> int:
    """Return the last taken integer from ``start``, which is taken, towards ``end``; ``hints`` are tried first."""
    if takes(end):
        return end
    step = 1 if end > start else -1
    for hint in hints:
        if 0 <= (hint - start) * step < abs(end - start) and takes(hint) and not takes(hint + step):
            return hint
    taken, refused = start, end
    while abs(refused - taken) > 1:
        middle = (taken + refused) // 2
        taken, refused = (middle, refused) if takes(middle) else (taken, middle)
    return taken


def combine(variants: list[Schema]) -> Schema:
    """Return a schema for values of any of the variants, as one list of types where their keywords allow it."""
    unique = []
    for variant in variants:
        for branch in variant.get("anyOf", [variant]) if variant.keys() <= {"anyOf"} and variant else [variant]:
            if branch == {}:
                return {}
            if branch not in unique:
                unique.append(branch)
    if len(unique) == 1:
        return unique[0]
    kinds = [branch.get("type") for branch in unique]
    if len(unique) == 2 and unique[1] == {"type": "null"} and isinstance(kinds[0], str):
        schema = unique[0] | {"type": [kinds[0], "null"]}
        return schema | ({"enum": [*schema["enum"], None]} if "enum" in schema else {})
    return {"anyOf": unique}
