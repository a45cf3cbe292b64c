"""Grammar rules for the arguments of one tool call, in every notation that model families use.

JSON is left to llguidance as a whole. In notations with one argument after another, the rules enforce which arguments
there are, which are required, and the value of each; conditions of a schema on several arguments together are not
enforced. Depends on schemas and call formats; ``tool_grammar`` writes everything around a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from parley.errors import Invalid
from parley.text.grammar import value_rules
from parley.text.grammar.json_schema import escapes, references, rerooted
from parley.text.grammar.lark import Lark, quoted
from parley.text.grammar.limits import SIZE
from parley.text.grammar.value_rules import Schema
from parley.text.parsing.calls import ITEM, Form, follow, kinds

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as chat templates write JSON
DEPTH = 8  # levels of a schema that are enforced where the notation is not JSON
SHARED = ("$defs", "definitions")  # where referenced parts of schemas usually are
TYPES = ("string", "number", "boolean", "object", "array", "null")
KEY = "KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/"
ANY = """any: anytext | anyplain | "[" (any ("," any)*)? "]" | "{" (KEY ":" any ("," KEY ":" any)*)? "}\""""


class Rules:
    """Collects the rules for one model's tool calls, each written when it is first needed.

    Raises Invalid when the rules exceed MAX_GRAMMAR_CHARS: a small schema can stand for any number of rules.
    """

    def __init__(self, form: Form, lark: Lark):
        self.lines: list[str] = []
        self._size = 0  # characters written
        self._names: dict[tuple[str, str], str] = {}  # of rules and terminals, by the rest of their lines
        self.form = form
        self.text = lark.text
        self.mark = lark.mark
        self._root: Schema = {}
        self._known: dict[tuple[str, int, int], tuple[Any, str]] = {}  # rules by id(schema), which is kept alive here

    def until(self, mark: str, schema: Schema, before: str = "") -> str:
        """Return a rule for text up to a mark that it does not contain. ``before``: stands right before the mark."""
        form = f"/(?s:.{value_rules.limits(schema)})/{value_rules.pattern(schema)}"
        if self.mark(mark):
            return self.rule(f"{self.terminal(form)} {self.text(before + mark)}")
        inner = re.escape(mark).replace("/", r"\/")
        text = self.terminal(f"{form} & ~/(?s:.*){inner}(?s:.*)/")
        return self.rule(f"{text} {quoted(before + mark)}", "[lazy]")

    def rule(self, body: str, option: str = "") -> str:
        """Return the name of a rule; equal rules are written once."""
        return self._name("r", f"{option}: {body}")

    def terminal(self, body: str) -> str:
        """Return the name of a terminal; equal terminals are written once."""
        return self._name("T", f": {body}")

    def _name(self, letter: str, rest: str) -> str:
        if (letter, rest) not in self._names:
            self._names[letter, rest] = f"{letter}{len(self.lines)}"
            self._define(self._names[letter, rest] + rest)
        return self._names[letter, rest]

    def arguments(self, schema: Schema, bound: bool) -> str:
        """Return a rule for arguments that follow the schema, or for any object if not ``follow_schema``."""
        self._root, self._known = schema, {}
        shape = self.form.shape
        if shape in ("object", "named", "keyed"):
            return self.json(schema)
        found = value_rules.resolved(schema, schema)
        schema = found if isinstance(found, dict) else {}
        properties, needed = value_rules.properties(schema) if bound else {}, value_rules.needed(schema)
        rest = not properties and schema.get("additionalProperties") is not False
        if shape == "elements":
            return self._members(schema, 0, bound)
        if shape == "tags":
            parts = [(key in needed, self._tag(key, each)) for key, each in properties.items()]
            if rest:
                return self.rule(f"{self._free_tag()}*")
            return self.rule(" ".join(name if must else f"{name}?" for must, name in parts) or '""')
        assign = "=" if shape == "python" else ":"
        value = self.json if shape == "python" else self.loose
        if rest:
            if shape == "loose":
                self._define_any()
                return self.rule('(KEY ":" any ("," KEY ":" any)*)?')
            self._define_key()
            one = self.rule(f'KEY "=" {self.json({})}')
            return self.rule(f'({one} (", " {one})*)?')
        return self._row(
            [
                (key in needed, self.rule(f"{self.text(key + assign)} {value(each)}"))
                for key, each in properties.items()
            ],
            ", " if shape == "python" else ",",
        )

    def json(self, schema: Any) -> str:
        """Return a rule for JSON that follows a part of the schema."""
        if not isinstance(schema, dict):
            schema = {}
        whole = self._whole(schema)
        options = {**SPACING, "json_allowed_escapes": escapes(whole)}
        return self.rule(f"%json {json.dumps({**whole, 'x-guidance': options})}")

    def _whole(self, schema: Schema) -> Schema:
        """Return a part of the schema together with everything it refers to."""
        if schema is self._root or not any(references(schema)):
            return schema
        whole = {key: self._root[key] for key in SHARED if key in self._root} | schema
        if all(each.startswith(tuple(f"#/{key}/" for key in SHARED)) for each in references(whole)):
            return whole
        return rerooted(schema, "#/$defs/whole") | {"$defs": {"whole": rerooted(self._root, "#/$defs/whole")}}

    def loose(self, schema: Any, depth: int = 0) -> str:
        """Return a rule for a value in the "loose" notation."""
        return self._once(self._loose, schema, depth)

    def _once(self, make: Callable[[Any, int], str], schema: Any, depth: int) -> str:
        """Write a rule once for each part of the schema and level, so that recursive schemas end."""
        key = make.__name__, id(schema), depth
        if key not in self._known:
            self._known[key] = schema, make(schema, depth)
        return self._known[key][1]

    def _loose(self, schema: Any, depth: int) -> str:
        while isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and depth < DEPTH:
            schema, depth = follow(schema["$ref"], self._root), depth + 1
        if not isinstance(schema, dict) or depth >= DEPTH:
            return self._define_any()
        if choices := value_rules.choices(schema):
            return self.rule(" | ".join(map(self._loose_text, choices)))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self.rule(" | ".join(self.loose(each, depth + 1) for each in schema[key]))
        said = schema.get("type")
        if isinstance(said, list) and said:
            return self.rule(" | ".join(self.loose({**schema, "type": each}, depth + 1) for each in said))
        if said == "string":
            return self.rule(f"{self.text(self.form.quote)} {self.until(self.form.quote, schema)}")
        if said == "array":
            least, most = value_rules.bounds(schema, "Items")
            item = self.loose(schema.get("items", {}), depth + 1)
            if most == 0:
                return self.rule('"[]"')
            more = _times(f'("," {item})', max(0, (least or 1) - 1), None if most is None else most - 1)
            return self.rule(f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"')
        if said == "object" and (properties := value_rules.properties(schema)):
            needed = value_rules.needed(schema)
            row_ = [
                (key in needed, self.rule(f"{self.text(f'{key}:')} {self.loose(each, depth + 1)}"))
                for key, each in properties.items()
            ]
            return self.rule(f'"{{" {self._row(row_, ",")} "}}"')
        if said in ("number", "integer", "boolean", "null"):
            return self.json(schema)
        if said == "object":
            value = self.loose(schema.get("additionalProperties"), depth + 1)
            self._define_key()
            return self.rule(f'"{{" (KEY ":" {value} ("," KEY ":" {value})*)? "}}"')
        return self._define_any()

    def element(self, key: str, schema: Any, depth: int) -> str:
        """Return a rule for an element with its tags."""
        form = self.form
        start, end = self.text(f"{form.key[0]}{key}{form.key[1]}"), self.text(f"{key}{form.key[1]}")
        return self.rule(f"{start} {self._once(self._inside, schema, depth)} {end}")

    def _inside(self, schema: Any, depth: int) -> str:
        """Return a rule for the content of an element and the beginning of its end tag."""
        while isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and depth < DEPTH:
            schema, depth = follow(schema["$ref"], self._root), depth + 1
        mark = self.form.value[1]
        end = self.text(mark)
        if not isinstance(schema, dict) or depth >= DEPTH:
            return self.until(mark, {})
        if choices := value_rules.choices(schema):
            return self.rule(f"({' | '.join(map(value_rules.literal, choices))}) {end}")
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self.rule(" | ".join(self._once(self._inside, each, depth + 1) for each in schema[key]))
        said = schema.get("type")
        if isinstance(said, list) and said:
            return self.rule(" | ".join(self._inside({**schema, "type": each}, depth + 1) for each in said))
        if said == "array":
            least, most = value_rules.bounds(schema, "Items")
            item = self.element(ITEM, schema.get("items", {}), depth + 1)
            return self.rule(f"{_times(item, least or 0, most)} {end}")
        if said == "object":
            return self.rule(f"{self._members(schema, depth + 1)} {end}")
        if said in ("number", "integer", "boolean", "null"):
            return self.rule(f"{self.json(schema)} {end}")
        return self.until(mark, schema)

    def _members(self, schema: Schema, depth: int, bound: bool = True) -> str:
        """Return a rule for the elements of an object."""
        properties = value_rules.properties(schema) if bound else {}
        if not properties and (not bound or schema.get("additionalProperties") is not False):
            self._define_key()
            form = self.form
            value = self._once(self._inside, schema.get("additionalProperties") if bound else None, depth + 1)
            free = f"{self.text(form.key[0])} KEY {self.text(form.key[1])} {value} KEY"
            return self.rule(f"({free} {self.text(form.key[1])})*")
        needed = value_rules.needed(schema)
        parts = [self.element(key, each, depth) + ("" if key in needed else "?") for key, each in properties.items()]
        return self.rule(" ".join(parts) or '""')

    def _tag(self, key: str, schema: Any) -> str:
        form = self.form
        if form.stated:
            return self.rule(" | ".join(self._stated(self.text(form.key[0] + key), schema)))
        schema = value_rules.resolved(schema, self._root)
        before, after = form.value
        text = kinds(schema, self._root) == {"string"}
        attribute = f' string="{"true" if text else "false"}">' if form.typed else ""
        start = self.text(f"{form.key[0]}{key}{form.key[1]}{attribute}{before}")
        if not text:
            return self.rule(f"{start} {self.json(schema)} {self.text(after)}")
        if choices := value_rules.choices(schema):
            return self.rule(f"{start} ({' | '.join(map(value_rules.literal, choices))}) {self.text(after)}")
        mark = after.strip()
        lead, end = after[: after.index(mark)], after[after.index(mark) + len(mark) :]
        return self.rule(f"{start} {self.until(mark, schema, lead)} {self.text(end)}")

    def _stated(self, start: str, schema: Any) -> Iterator[str]:
        """Yield an argument with its type name, once for each type the schema allows. ``start``: its own name."""
        form = self.form
        after = self.text(form.value[1])
        found = kinds(schema, self._root) or frozenset(TYPES)
        for kind in TYPES:
            types = sorted(found & ({kind, "integer"} if kind == "number" else {kind}))
            if not types:
                continue
            part = value_rules.typed(schema, types, self._root)
            head = f"{start} {self.text(form.key[1] + form.kind[0] + kind + form.kind[1] + form.value[0])}"
            if kind != "string":
                yield f"{head} {self.json(part)} {after}"
            elif texts := [each for each in value_rules.choices(part) if isinstance(each, str)]:
                yield f"{head} ({' | '.join(map(value_rules.literal, texts))}) {after}"
            else:
                yield f"{head} {self.until(form.value[1], part)}"

    def _free_tag(self) -> str:
        form = self.form
        self._define_key()
        if form.stated:
            return self.rule(" | ".join(self._stated(f"{self.text(form.key[0])} KEY", {})))
        before, after = form.value
        attribute = ' string="false">' if form.typed else ""
        start = f"{self.text(form.key[0])} KEY {self.text(form.key[1] + attribute + before)}"
        return self.rule(f"{start} {self.json({})} {self.text(after)}")

    def _row(self, parts: list[tuple[bool, str]], comma: str) -> str:
        """Return a rule for the required parts, then the optional ones, with a separator between them."""
        must, may = ([name for needed, name in parts if needed is wanted] for wanted in (True, False))
        between = quoted(comma)
        tail = '""'
        tails = [tail]
        for name in reversed(may):
            tail = self.rule(f"({between} {name})? {tail}")
            tails.insert(0, tail)
        if must:
            return self.rule(f" {between} ".join(must) + f" {tails[0]}")
        starts = [f"{name} {rest}" for name, rest in zip(may, tails[1:], strict=True)]
        return self.rule(" | ".join([*starts, '""']))

    def _loose_text(self, value: Any) -> str:
        return (
            self.text(f"{self.form.quote}{value}{self.form.quote}")
            if isinstance(value, str)
            else value_rules.literal(value)
        )

    def _define_any(self) -> str:
        if ANY not in self.lines:
            self._define_key()
            self._define(ANY)
            self._define(f"anyplain: %json {json.dumps({'type': ['number', 'boolean', 'null']})}")
            self._define(f"anytext: {self.text(self.form.quote)} {self.until(self.form.quote, {})}")
        return "any"

    def _define_key(self) -> None:
        if KEY not in self.lines:
            self._define(KEY)

    def _define(self, line: str) -> None:
        self.lines.append(line)
        self._size += len(line)
        if self._size > SIZE:
            raise Invalid(f"tools cannot be followed: their grammar has more than {SIZE} characters.", field="tools")


def _times(item: str, least: int, most: int | None) -> str:
    """Return an item with a repeat count; empty for a maximum of 0, which llguidance cannot express."""
    return "" if most == 0 else f"{item}{{{least},{'' if most is None else most}}}"
