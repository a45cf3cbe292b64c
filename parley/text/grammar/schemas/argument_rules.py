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

from parley.errors import InvalidValue
from parley.text.grammar.custom_lark import write_custom_lark
from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.lark import LarkWriter, quote_lark
from parley.text.grammar.limits import MAX_GRAMMAR_CHARS, TOO_DEEP
from parley.text.grammar.schemas import value_rules
from parley.text.grammar.schemas.json_schema import allowed_escapes, list_references, reroot_references
from parley.text.grammar.schemas.value_rules import Schema
from parley.text.parsing.calls import LIST_ITEM, CallForm, resolve_pointer, schema_types
from parley.types import CUSTOM_GRAMMAR

# As chat templates write JSON.
JSON_SPACING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
JSON_QUOTE = '"'
CUSTOM_END = '"}'  # of an object with one text
MAX_ARGUMENT_DEPTH = 8  # levels of a schema that are enforced where the notation is not JSON
SHARED_DEFINITIONS = ("$defs", "definitions")  # where referenced parts of schemas usually are
ARGUMENT_TYPES = ("string", "number", "boolean", "object", "array", "null")
KEY_RULE = "KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/"
ANY_RULE = """any: anytext | anyplain | "[" (any ("," any)*)? "]" | "{" (KEY ":" any ("," KEY ":" any)*)? "}\""""


class ArgumentRules:
    """Collects the rules for one model's tool calls, each written when it is first needed.

    Raises InvalidValue when the rules exceed MAX_GRAMMAR_CHARS: a small schema can stand for any number of rules.
    """

    def __init__(self, form: CallForm, lark: LarkWriter):
        self.lines: list[str] = []
        self._written_chars = 0  # characters written
        self._line_names: dict[tuple[str, str], str] = {}  # of rules and terminals, by the rest of their lines
        self.form = form
        self._lark = lark
        self._root_schema: Schema = {}
        # Rules by id(schema); the schema is kept alive here.
        self._schema_rules: dict[tuple[str, int, int], tuple[Any, str]] = {}

    def write_text(self, text: str) -> str:
        """Return a text in Lark, as ``LarkWriter.write_text`` does."""
        return self._lark.write_text(text)

    def find_mark(self, text: str) -> re.Match[str] | None:
        """Find the first mark in a text, as ``LarkWriter.find_mark`` does."""
        return self._lark.find_mark(text)

    def text_until(self, mark: str, schema: Schema, before: str = "") -> str:
        """Return a rule for text up to a mark that it does not contain. ``before``: stands right before the mark."""
        if CUSTOM_GRAMMAR in schema:
            return self._custom_text(schema[CUSTOM_GRAMMAR], before + mark, in_json=False)
        form = f"/(?s:.{value_rules.length_quantifier(schema)})/{value_rules.pattern_condition(schema)}"
        if self.find_mark(mark):
            return self.add_rule(f"{self.add_terminal(form)} {self.write_text(before + mark)}")
        inner = re.escape(mark).replace("/", r"\/")
        text = self.add_terminal(f"{form} & ~/(?s:.*){inner}(?s:.*)/")
        return self.add_rule(f"{text} {quote_lark(before + mark)}", "[lazy]")

    def _custom_text(self, definition: str, end: str, *, in_json: bool) -> str:
        """Return a rule for text that follows a grammar, up to ``end``. ``in_json``: it stands inside a JSON string."""
        mark = self.find_mark(end)
        plain_end = end[: mark.start()] if mark else end
        try:
            text = write_custom_lark(definition, plain_end, in_json=in_json)
        except (GrammarRefused, RecursionError) as error:
            reason = error if isinstance(error, GrammarRefused) else TOO_DEEP
            raise InvalidValue(f"The grammar of a tool cannot be enforced: {reason}.", field="tools") from None
        return self.add_rule(f"{self.add_rule(text)} {self.write_text(end[len(plain_end) :])}")

    def add_rule(self, body: str, option: str = "") -> str:
        """Return the name of a rule; equal rules are written once."""
        return self._name_line("r", f"{option}: {body}")

    def add_terminal(self, body: str) -> str:
        """Return the name of a terminal; equal terminals are written once."""
        return self._name_line("T", f": {body}")

    def _name_line(self, letter: str, rest: str) -> str:
        if (letter, rest) not in self._line_names:
            self._line_names[letter, rest] = f"{letter}{len(self.lines)}"
            self._append_line(self._line_names[letter, rest] + rest)
        return self._line_names[letter, rest]

    def arguments_rule(self, schema: Schema, follow_schema: bool) -> str:
        """Return a rule for arguments that follow the schema, or for any object if not ``follow_schema``."""
        self._root_schema, self._schema_rules = schema, {}
        shape = self.form.shape
        if shape in ("object", "named", "keyed"):
            return self._custom_object(schema) if follow_schema else self.json_rule(schema)
        resolved = value_rules.resolve_references(schema, schema)
        schema = resolved if isinstance(resolved, dict) else {}
        properties = value_rules.schema_properties(schema) if follow_schema else {}
        needed = value_rules.required_properties(schema)
        allows_any = not properties and schema.get("additionalProperties") is not False
        if shape == "elements":
            return self._member_elements(schema, 0, follow_schema)
        if shape == "tags":
            parts = [(key in needed, self._tag_rule(key, member)) for key, member in properties.items()]
            if allows_any:
                return self.add_rule(f"{self._free_tag_rule()}*")
            return self.add_rule(" ".join(name if must else f"{name}?" for must, name in parts) or '""')
        assign = "=" if shape == "python" else ":"
        value = self.json_rule if shape == "python" else self.loose_rule
        if allows_any:
            if shape == "loose":
                self._define_any_rule()
                return self.add_rule('(KEY ":" any ("," KEY ":" any)*)?')
            self._define_key_rule()
            argument = self.add_rule(f'KEY "=" {self.json_rule({})}')
            return self.add_rule(f'({argument} (", " {argument})*)?')
        return self._separated_row(
            [
                (key in needed, self.add_rule(f"{self.write_text(key + assign)} {value(member)}"))
                for key, member in properties.items()
            ],
            ", " if shape == "python" else ",",
        )

    def _custom_object(self, schema: Schema) -> str:
        """Return a rule for a JSON object; its only member may be a text that follows a grammar."""
        properties = value_rules.schema_properties(schema)
        (name, text), *other_properties = properties.items() or [("", {})]
        if other_properties or not isinstance(text, dict) or CUSTOM_GRAMMAR not in text:
            return self.json_rule(schema)
        start = self.write_text(f'{{{json.dumps(name)}: "')
        return self.add_rule(f"{start} {self._custom_text(text[CUSTOM_GRAMMAR], CUSTOM_END, in_json=True)}")

    def json_rule(self, schema: Any) -> str:
        """Return a rule for JSON that follows a part of the schema."""
        if not isinstance(schema, dict):
            schema = {}
        if CUSTOM_GRAMMAR in schema:
            text = self._custom_text(schema[CUSTOM_GRAMMAR], JSON_QUOTE, in_json=True)
            return self.add_rule(f"{quote_lark(JSON_QUOTE)} {text}")
        self_contained_schema = self._self_contained(schema)
        options = {**JSON_SPACING, "json_allowed_escapes": allowed_escapes(self_contained_schema)}
        return self.add_rule(f"%json {json.dumps({**self_contained_schema, 'x-guidance': options})}")

    def _self_contained(self, schema: Schema) -> Schema:
        """Return a part of the schema together with everything it refers to."""
        if schema is self._root_schema or not any(list_references(schema)):
            return schema
        with_definitions = {
            key: self._root_schema[key] for key in SHARED_DEFINITIONS if key in self._root_schema
        } | schema
        if all(
            reference.startswith(tuple(f"#/{key}/" for key in SHARED_DEFINITIONS))
            for reference in list_references(with_definitions)
        ):
            return with_definitions
        result: Schema = reroot_references(schema, "#/$defs/whole") | {
            "$defs": {"whole": reroot_references(self._root_schema, "#/$defs/whole")}
        }
        return result

    def loose_rule(self, schema: Any, depth: int = 0) -> str:
        """Return a rule for a value in the "loose" notation."""
        return self._rule_once(self._write_loose, schema, depth)

    def _rule_once(self, make: Callable[[Any, int], str], schema: Any, depth: int) -> str:
        """Write a rule once for each part of the schema and level, so that recursive schemas end."""
        key = make.__name__, id(schema), depth
        if key not in self._schema_rules:
            self._schema_rules[key] = schema, make(schema, depth)
        return self._schema_rules[key][1]

    def _write_loose(self, schema: Any, depth: int) -> str:
        while isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and depth < MAX_ARGUMENT_DEPTH:
            schema, depth = resolve_pointer(schema["$ref"], self._root_schema), depth + 1
        if not isinstance(schema, dict) or depth >= MAX_ARGUMENT_DEPTH:
            return self._define_any_rule()
        if choices := value_rules.listed_values(schema):
            return self.add_rule(" | ".join(map(self._loose_literal, choices)))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self.add_rule(" | ".join(self.loose_rule(subschema, depth + 1) for subschema in schema[key]))
        schema_type = schema.get("type")
        if isinstance(schema_type, list) and schema_type:
            return self.add_rule(
                " | ".join(self.loose_rule({**schema, "type": type_name}, depth + 1) for type_name in schema_type)
            )
        if schema_type == "string":
            return self.add_rule(
                f"{self.write_text(self.form.quote_mark)} {self.text_until(self.form.quote_mark, schema)}"
            )
        if schema_type == "array":
            min_count, max_count = value_rules.count_limits(schema, "Items")
            item = self.loose_rule(schema.get("items", {}), depth + 1)
            if max_count == 0:
                return self.add_rule('"[]"')
            more_items = _repeat_item(
                f'("," {item})', max(0, (min_count or 1) - 1), None if max_count is None else max_count - 1
            )
            return self.add_rule(f'"[" {item} {more_items} "]"' if min_count else f'"[" ({item} {more_items})? "]"')
        if schema_type == "object" and (properties := value_rules.schema_properties(schema)):
            needed = value_rules.required_properties(schema)
            members = [
                (key in needed, self.add_rule(f"{self.write_text(f'{key}:')} {self.loose_rule(member, depth + 1)}"))
                for key, member in properties.items()
            ]
            return self.add_rule(f'"{{" {self._separated_row(members, ",")} "}}"')
        if schema_type in ("number", "integer", "boolean", "null"):
            return self.json_rule(schema)
        if schema_type == "object":
            value = self.loose_rule(schema.get("additionalProperties"), depth + 1)
            self._define_key_rule()
            return self.add_rule(f'"{{" (KEY ":" {value} ("," KEY ":" {value})*)? "}}"')
        return self._define_any_rule()

    def element_rule(self, key: str, schema: Any, depth: int) -> str:
        """Return a rule for an element with its tags."""
        form = self.form
        start = self.write_text(f"{form.key_marks[0]}{key}{form.key_marks[1]}")
        end = self.write_text(f"{key}{form.key_marks[1]}")
        return self.add_rule(f"{start} {self._rule_once(self._element_content, schema, depth)} {end}")

    def _element_content(self, schema: Any, depth: int) -> str:
        """Return a rule for the content of an element and the beginning of its end tag."""
        while isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and depth < MAX_ARGUMENT_DEPTH:
            schema, depth = resolve_pointer(schema["$ref"], self._root_schema), depth + 1
        mark = self.form.value_marks[1]
        end = self.write_text(mark)
        if not isinstance(schema, dict) or depth >= MAX_ARGUMENT_DEPTH:
            return self.text_until(mark, {})
        if choices := value_rules.listed_values(schema):
            return self.add_rule(f"({' | '.join(map(value_rules.value_literal, choices))}) {end}")
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                return self.add_rule(
                    " | ".join(
                        self._rule_once(self._element_content, subschema, depth + 1) for subschema in schema[key]
                    )
                )
        schema_type = schema.get("type")
        if isinstance(schema_type, list) and schema_type:
            return self.add_rule(
                " | ".join(self._element_content({**schema, "type": type_name}, depth + 1) for type_name in schema_type)
            )
        if schema_type == "array":
            min_count, max_count = value_rules.count_limits(schema, "Items")
            item = self.element_rule(LIST_ITEM, schema.get("items", {}), depth + 1)
            return self.add_rule(f"{_repeat_item(item, min_count or 0, max_count)} {end}")
        if schema_type == "object":
            return self.add_rule(f"{self._member_elements(schema, depth + 1)} {end}")
        if schema_type in ("number", "integer", "boolean", "null"):
            return self.add_rule(f"{self.json_rule(schema)} {end}")
        return self.text_until(mark, schema)

    def _member_elements(self, schema: Schema, depth: int, follow_schema: bool = True) -> str:
        """Return a rule for the elements of an object."""
        properties = value_rules.schema_properties(schema) if follow_schema else {}
        if not properties and (not follow_schema or schema.get("additionalProperties") is not False):
            self._define_key_rule()
            form = self.form
            value = self._rule_once(
                self._element_content, schema.get("additionalProperties") if follow_schema else None, depth + 1
            )
            any_member = f"{self.write_text(form.key_marks[0])} KEY {self.write_text(form.key_marks[1])} {value} KEY"
            return self.add_rule(f"({any_member} {self.write_text(form.key_marks[1])})*")
        needed = value_rules.required_properties(schema)
        parts = [
            self.element_rule(key, member, depth) + ("" if key in needed else "?") for key, member in properties.items()
        ]
        return self.add_rule(" ".join(parts) or '""')

    def _tag_rule(self, key: str, schema: Any) -> str:
        form = self.form
        if form.type_required:
            return self.add_rule(" | ".join(self._typed_arguments(self.write_text(form.key_marks[0] + key), schema)))
        schema = value_rules.resolve_references(schema, self._root_schema)
        value_open, value_close = form.value_marks
        text = schema_types(schema, self._root_schema) == {"string"}
        attribute = f' string="{"true" if text else "false"}">' if form.marks_strings else ""
        start = self.write_text(f"{form.key_marks[0]}{key}{form.key_marks[1]}{attribute}{value_open}")
        if not text:
            return self.add_rule(f"{start} {self.json_rule(schema)} {self.write_text(value_close)}")
        if choices := value_rules.listed_values(schema):
            return self.add_rule(
                f"{start} ({' | '.join(map(value_rules.value_literal, choices))}) {self.write_text(value_close)}"
            )
        mark = value_close.strip()
        lead, end = value_close[: value_close.index(mark)], value_close[value_close.index(mark) + len(mark) :]
        return self.add_rule(f"{start} {self.text_until(mark, schema, lead)} {self.write_text(end)}")

    def _typed_arguments(self, start: str, schema: Any) -> Iterator[str]:
        """Yield an argument with its type name, once for each type the schema allows. ``start``: its own name."""
        form = self.form
        value_close = self.write_text(form.value_marks[1])
        allowed = schema_types(schema, self._root_schema) or frozenset(ARGUMENT_TYPES)
        for kind in ARGUMENT_TYPES:
            types = sorted(allowed & ({kind, "integer"} if kind == "number" else {kind}))
            if not types:
                continue
            part = value_rules.narrow_to_types(schema, types, self._root_schema)
            opening = form.key_marks[1] + form.type_marks[0] + kind + form.type_marks[1] + form.value_marks[0]
            head = f"{start} {self.write_text(opening)}"
            if kind != "string":
                yield f"{head} {self.json_rule(part)} {value_close}"
            elif texts := [listed for listed in value_rules.listed_values(part) if isinstance(listed, str)]:
                yield f"{head} ({' | '.join(map(value_rules.value_literal, texts))}) {value_close}"
            else:
                yield f"{head} {self.text_until(form.value_marks[1], part)}"

    def _free_tag_rule(self) -> str:
        form = self.form
        self._define_key_rule()
        if form.type_required:
            return self.add_rule(" | ".join(self._typed_arguments(f"{self.write_text(form.key_marks[0])} KEY", {})))
        value_open, value_close = form.value_marks
        attribute = ' string="false">' if form.marks_strings else ""
        start = (
            f"{self.write_text(form.key_marks[0])} KEY {self.write_text(form.key_marks[1] + attribute + value_open)}"
        )
        return self.add_rule(f"{start} {self.json_rule({})} {self.write_text(value_close)}")

    def _separated_row(self, parts: list[tuple[bool, str]], comma: str) -> str:
        """Return a rule for the required parts, then the optional ones, with a separator between them."""
        required, optional = (
            [name for needed, name in parts if needed is is_required] for is_required in (True, False)
        )
        separator = quote_lark(comma)
        tail = '""'
        tails = [tail]
        for name in reversed(optional):
            tail = self.add_rule(f"({separator} {name})? {tail}")
            tails.insert(0, tail)
        if required:
            return self.add_rule(f" {separator} ".join(required) + f" {tails[0]}")
        starts = [f"{name} {later_names}" for name, later_names in zip(optional, tails[1:], strict=True)]
        return self.add_rule(" | ".join([*starts, '""']))

    def _loose_literal(self, value: Any) -> str:
        return (
            self.write_text(f"{self.form.quote_mark}{value}{self.form.quote_mark}")
            if isinstance(value, str)
            else value_rules.value_literal(value)
        )

    def _define_any_rule(self) -> str:
        if ANY_RULE not in self.lines:
            self._define_key_rule()
            self._append_line(ANY_RULE)
            self._append_line(f"anyplain: %json {json.dumps({'type': ['number', 'boolean', 'null']})}")
            self._append_line(
                f"anytext: {self.write_text(self.form.quote_mark)} {self.text_until(self.form.quote_mark, {})}"
            )
        return "any"

    def _define_key_rule(self) -> None:
        if KEY_RULE not in self.lines:
            self._append_line(KEY_RULE)

    def _append_line(self, line: str) -> None:
        self.lines.append(line)
        self._written_chars += len(line)
        if self._written_chars > MAX_GRAMMAR_CHARS:
            raise InvalidValue(
                f"tools cannot be enforced: their grammar has more than {MAX_GRAMMAR_CHARS} characters.", field="tools"
            )


def _repeat_item(item: str, min_count: int, max_count: int | None) -> str:
    """Return an item with a repeat count; empty for a maximum of 0, which llguidance cannot express."""
    return "" if max_count == 0 else f"{item}{{{min_count},{'' if max_count is None else max_count}}}"
