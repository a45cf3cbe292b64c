"""Grammars in Lark that clients give for the text of a custom tool, inside the grammar of the tool's call.

In most notations of calls the text is a JSON string, so each character stands as JSON writes it: a quote as ``\\"``, a
line end as ``\\n``. Depends on productions and JSON, not on calls.
"""

from __future__ import annotations

import json

from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.lark_rules import parse_lark
from parley.text.grammar.lexemes import write_lark
from parley.text.grammar.productions import (
    AlternativesNode,
    CharacterNode,
    CharacterSet,
    GrammarNode,
    RepeatNode,
    SequenceNode,
    TextNode,
    complement_set,
    sets_intersect,
    single_set,
    union_sets,
)

MAX_DEFINITION_CHARS = 32 << 10  # characters: Python parses it, which is slow
JSON_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
UNWRITTEN: CharacterSet = ((0, 0x1F), (0x7F, 0x7F))  # JSON writes them as escapes, if at all
ESCAPED_SET = union_sets(UNWRITTEN, *map(single_set, JSON_ESCAPES))


def write_custom_lark(definition: str, end: str, *, in_json: bool) -> str:
    """Return a grammar, followed by the text ``end``, as an expression of llguidance's Lark. ``in_json``: its text
    stands inside a JSON string. Raises GrammarRefused, and RecursionError if it is nested too deeply."""
    if len(definition) > MAX_DEFINITION_CHARS:
        raise GrammarRefused(f"it has {len(definition)} characters, and at most {MAX_DEFINITION_CHARS} are allowed")
    rules = parse_lark(definition)
    if in_json:
        rules = {name: _in_json(node) for name, node in rules.items()}
    return f"%lark {{\n{write_lark(rules, [end] if end else [])}\n}}"


def _in_json(node: GrammarNode) -> GrammarNode:
    """Return a node for the same text as it stands in a JSON string."""
    match node:
        case TextNode(text):
            return TextNode(_json_text(text))
        case CharacterNode(characters):
            return _json_character(characters)
        case RepeatNode(inner, min_count, max_count):
            return RepeatNode(_in_json(inner), min_count, max_count)
        case SequenceNode(nodes):
            return SequenceNode(tuple(map(_in_json, nodes)))
        case AlternativesNode(nodes):
            return AlternativesNode(tuple(map(_in_json, nodes)))
    return node


def _json_text(text: str) -> str:
    if any((code < 0x20 and chr(code) not in JSON_ESCAPES) or code == 0x7F for code in map(ord, text)):
        raise GrammarRefused("control characters other than line ends and tabs are not supported")
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_character(characters: CharacterSet) -> GrammarNode:
    unescaped = complement_set(union_sets(complement_set(characters), ESCAPED_SET))
    escapes = [escape for letter, escape in JSON_ESCAPES.items() if sets_intersect(characters, single_set(letter))]
    nodes: list[GrammarNode] = [CharacterNode(unescaped)] if unescaped else []
    if escapes:
        letters = CharacterNode(union_sets(*map(single_set, escapes)))
        nodes.append(SequenceNode((TextNode("\\"), letters)))
    if not nodes:
        raise GrammarRefused("control characters other than line ends and tabs are not supported")
    return nodes[0] if len(nodes) == 1 else AlternativesNode(tuple(nodes))
