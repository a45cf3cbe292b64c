"""Hostile grammars: huge, deep, ambiguous, endless, broken, or beyond the compiler's means."""

from __future__ import annotations

from typing import Any

from parley.types import Grammar, StructuralTag, TriggeredTags


def nested_schema(levels: int, member: str = "a") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {member: schema}, "required": [member]}
    return schema


def nested_array(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


HOSTILE_REGEXES = [
    "(a|a)*b",
    "(a*)*b",
    "((a+)+)+$",
    "x{1,1000000}",
    "(x{1,1000}){1,1000}",
    "(.{1,300}){1,300}",
    "((a{1,100}){1,100}){1,100}",
    "(a|b)*a(a|b){20}",
    "(a|b)*a(a|b){200}",
    "(.*a.{30}){5}",
    "(?:.*a){300}",
    r"[\p{L}]{1,500}.*\p{L}{300}",
    r"(\p{L}|\p{N}|\p{P}){0,5000}",
    "(" * 200 + "a" + ")*" * 200,
    "(" * 5000 + "a" + ")" * 5000,
    "a|" * 50_000 + "b",
    "|".join(f"(.*{number}.*)" for number in range(3000)),
    "(?:" + "|".join(f"w{number}[a-z]*" for number in range(2000)) + "){50}",
    "".join(f"(.*x{number})?" for number in range(500)),
    "[" + "".join(chr(0x4E00 + 2 * number) for number in range(8000)) + "]{1,50}",
    "x" * 300_000,
    "(?=a)b",
    r"(a)\1",
    "[z-a]",
    "*",
    "a{2,1}",
    "\ud800",
    r"\x{110000}",
    "a{99999999999}",
]
HOSTILE_SCHEMAS: list[Any] = [
    {"enum": [f"value {number}" for number in range(100_000)]},
    {"enum": [f"value {number}" for number in range(10_000)]},
    {"enum": ["x" * 200_000]},
    {"type": "string", "minLength": 1_000_000_000},
    {"type": "string", "minLength": 10_000, "maxLength": 10_000, "pattern": "^(a|b)*$"},
    {"type": "string", "pattern": "(a|b)*a(a|b){25}"},
    {"type": "string", "pattern": "((a+)+)+$", "format": "uri", "maxLength": 5000},
    {"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}},
    {"type": "array", "maxItems": 1_000_000, "items": {"type": "array", "maxItems": 1_000_000}},
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": {}},
     "$ref": "#/$defs/d0"},
    {"$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}", "minLength": n}]}
               for n in range(30)} | {"d30": {"type": "string"}}, "$ref": "#/$defs/d0"},
    {"$defs": {f"d{n}": {"type": "object", "properties": {f"p{m}": {"$ref": f"#/$defs/d{n + 1}"} for m in range(5)}}
               for n in range(40)} | {"d40": {}}, "$ref": "#/$defs/d0"},
    {"anyOf": [{"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(50)}} for _ in range(50)]},
    {"allOf": [{"anyOf": [{"properties": {f"p{n}{m}": {}}} for n in range(10)]} for m in range(8)]},
    {"allOf": [{"anyOf": [{"type": "string", "pattern": f"{n}{m}"} for n in range(4)]} for m in range(8)]},
    {"allOf": [{"pattern": f"^(.*{letter}){{3}}"} for letter in "abcdefghij"], "type": "string"},
    {"type": "number", "multipleOf": 1e-9},
    {"type": "integer", "minimum": 0, "maximum": 10**30, "multipleOf": 999_999_937},
    {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    {"type": "number", "minimum": 1.000000000000001, "maximum": 1.000000000000002},
    {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(5000)}},
    {"type": "object", "patternProperties": {f"^(a|b)*{n}$": {} for n in range(100)}},
    {"type": "object", "patternProperties": {"^(a|b)*a(a|b){30}$": {}}, "properties": {"aaa": {"type": "null"}}},
    nested_schema(40),
    nested_schema(400),
    nested_schema(20_000),
    {"const": nested_array(60)},
    {"const": nested_array(20_000)},
    {"const": {f"k{n}": {f"m{m}": n * m for m in range(100)} for n in range(100)}},
    {"oneOf": [{"type": "string", "pattern": f"^{'a' * n}"} for n in range(100)]},
    {"x-guidance": {"lenient": True}, "not": {}},
    {"x-guidance": {"whitespace_pattern": "(a|a)*"}},
    {"type": "string", "pattern": "\ud800"},
    {"type": "string", "pattern": 5},
    {"type": ["string", 5]},
    {"properties": []},
    {"items": [{}, 3]},
    {"$ref": 5},
    {"$ref": "http://localhost/schema.json"},
    {"$ref": "file:///etc/passwd"},
]  # fmt: skip
HOSTILE_LARK = [
    'start: start start | "a" | ""',
    'start: a\na: a a a | "x" | a "y" a',
    'start: ("a" | "a" "a" | "a" "a" "a")~1..100000',
    'start: (("a"~1..1000)~1..1000)~1..1000',
    "start: " + " ".join(['("a" | "b")'] * 20_000),
    "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)) + '\nr60: "a"',
    "start: r0\n" + "\n".join(f'r{n}: r{n + 1} | "x" r{n + 1}' for n in range(5000)) + '\nr5000: "a"',
    "start: T0\n" + "\n".join(f"T{n}: T{n + 1} T{n + 1}" for n in range(60)) + "\nT60: /[ab]/",
    "start: /(a|b)*a(a|b){18}/ & ~/(.*ab.*){9}/",
    "start: A & B & C\nA: /(.*a){20}/\nB: /(.*b){20}/\nC: /.{200}/",
    "start: X\nX: ~(/(.*a.{12}b)/ & ~/(.*b.{12}a)/)",
    "start: %json " + '{"type": "array", "items": ' * 30 + "{}" + "}" * 30,
    "start: x",
    "start: start",
    "start: /a",
    'start: "a',
    "nothing: 3",
    "",
    "%import common.NUMBER",
    'start: "' + "x" * 300_000 + '"',
    "start: <[0-4000000000]>",
    "start: <[99999999]>",
    "(" * 100_000,
]
HOSTILE_EBNF = [
    "root ::= " + '("a" | ' * 3000 + '"b"' + ")" * 3000,
    "root ::= root root | root",
    'root ::= ("a" | "aa" | "aaa")* root',
    'root ::= ("a"{1,1000}){1,1000}',
    "root ::= [" + "\\u4e00-\\u9fff" * 1000 + "]*",
    "root ::= ",
    "root = 5",
    'a ::= "b"',
    'root ::= "' + "\\" * 1001,
    "root ::= " + " ".join(f"r{n}" for n in range(3000)),
    "#" * 30_000,
    "(" * 30_000,
]
DUPLICATE_CHOICES = ["word"] * 20_000
OTHER_HOSTILE = [
    Grammar("choice", [f"{number} words" for number in range(9000)]),
    Grammar("choice", DUPLICATE_CHOICES),
    Grammar("choice", ["x" * 250_000, "y"]),
    Grammar("choice", ["\ud800"]),
    Grammar("choice", []),
    Grammar("json", {"type": "object"}, whitespace="(\\s*)*"),
    Grammar("json", {"type": "object"}, whitespace="("),
    Grammar("json", {"type": "array"}, whitespace="(a|b)*a(a|b){20}"),
    Grammar("tags", TriggeredTags([StructuralTag(f"<f{n}>", {"type": "string"}, "</f>") for n in range(500)], ["<"])),
    Grammar(
        "tags",
        TriggeredTags(
            [StructuralTag(f"{n}<", {"type": "string"}, ">") for n in range(500)], [str(n) for n in range(500)]
        ),
    ),
    Grammar("tags", TriggeredTags([StructuralTag("a", nested_schema(3000), "b")], ["a"])),
    Grammar("tags", TriggeredTags([StructuralTag("a", True, "b")], ["x"])),
    Grammar("tags", TriggeredTags([], [])),
]
HOSTILE: list[Grammar] = [
    *(Grammar("regex", value) for value in HOSTILE_REGEXES),
    *(Grammar("json", value) for value in HOSTILE_SCHEMAS),
    *(Grammar("lark", value) for value in HOSTILE_LARK),
    *(Grammar("ebnf", value) for value in HOSTILE_EBNF),
    *OTHER_HOSTILE,
]
