"""Writes a compiled grammar, which is a list of llguidance grammars that refer to each other, as one text in Lark.

vLLM takes one text. Each grammar of the list becomes a rule with an inline grammar, next to the rules that refer to it.

vLLM's llguidance is older than parley's and ignores ``whitespace_pattern``: an answer could consist of white space
without end. Its options for separators say where white space may stand: after commas and colons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

# llguidance would otherwise force tokens where only one text can follow (``NO_FORCING`` in text/grammar/compiler.py).
HEADER = '%llguidance {"no_forcing": true}'
# A reference to another grammar, and the beginning of a schema; both also match strings and expressions, to skip them.
REFERENCE = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|@([A-Za-z_]\w*)')
SCHEMA = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(%json\s*)')


def decompile_lark(compiled: str) -> str:
    """Return a compiled grammar (``EngineRequest.grammar``) as one text in Lark."""
    first, *other_grammars = json.loads(compiled)["grammars"]
    grammars = {other["name"]: other for other in other_grammars}
    return f"{HEADER}\n{_write_rules(first, grammars)}"


def _write_rules(grammar: Mapping[str, Any], grammars: Mapping[str, Any]) -> str:
    """Return the rules of a grammar, and a rule for each grammar that it refers to."""
    if "json_schema" in grammar:
        return f"start: {_write_inline(grammar, grammars)}\n"
    names: dict[str, None] = {}

    def replace_reference(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        names[match[1]] = None
        return f"sub_{match[1]}"

    rules = REFERENCE.sub(replace_reference, _limit_inner_schemas(grammar["lark_grammar"]))
    lines = [f"sub_{name}: {_write_inline(grammars[name], grammars)}" for name in names]
    return "\n".join([rules, *lines]) + "\n"


def _write_inline(grammar: Mapping[str, Any], grammars: Mapping[str, Any]) -> str:
    if "json_schema" in grammar:
        return f"%json {json.dumps(_limit_whitespace(grammar['json_schema']))}"
    return f"%lark {{\n{_write_rules(grammar, grammars)}}}"


def _limit_inner_schemas(lark: str) -> str:
    """Limit the white space of all schemas within a text in Lark."""
    parts, position = [], 0
    for match in SCHEMA.finditer(lark):
        if match[1] is not None and match.start() >= position:
            schema, end = json.JSONDecoder().raw_decode(lark, match.end())
            parts += [lark[position : match.end()], json.dumps(_limit_whitespace(schema))]
            position = end
    return "".join([*parts, lark[position:]])


def _limit_whitespace(schema: Any) -> Any:
    """Return a schema whose pattern for white space is in the options that vLLM's llguidance knows."""
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if not (whitespace := options.get("whitespace_pattern")):
        return schema
    separators = {"item_separator": f",(?:{whitespace})?", "key_separator": f":(?:{whitespace})?"}
    other_options = {name: value for name, value in options.items() if name != "whitespace_pattern"}
    return schema | {"x-guidance": other_options | {"whitespace_flexible": False} | separators}
