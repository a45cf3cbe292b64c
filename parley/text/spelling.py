"""How a model has to write tool calls, as a grammar: the marks of its family, the names of the tools, their schemas.

The grammar is a text in llguidance's dialect of Lark. Marks that are special tokens are written as such, for text never
matches these. Knows schemas and marks; nothing of matchers or engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from parley.errors import Invalid

from .calls import Form
from .families import Markup

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON
FREE = "TEXT: /(?s:.*)/"


def calls_grammar(
    markup: Markup,
    tools: Sequence[dict[str, Any]],
    *,
    parallel: bool,
    required: bool,
    only: str | None = None,
    special: Mapping[str, int],
) -> str:
    """The grammar of an answer, behind its reasoning, that may or must call tools.

    ``required``: the answer is a call of one of the tools, or of ``only`` that one, with arguments that follow its
    schema; with ``parallel`` there may be several. Otherwise it is free text in which what begins as a call is one: of
    a tool that there is, with arguments that are an object and follow the schema if the tool is ``strict``.
    ``special``: the ids of the special tokens. Raises Invalid if the model cannot call, or there is no such tool.
    """
    if not markup.calls:
        raise Invalid("The model has no form of tool calls that is known.", field="tools")
    functions = [function for function in map(_function, tools) if only is None or function["name"] == only]
    if not functions:
        raise Invalid("tool_choice names a function that is not among the tools.", field="tool_choice")
    spelling = _Spelling(markup.calls[0], special)
    for function in functions:
        spelling.add(function["name"], _schema(function, required or function.get("strict") is True))
    return spelling.grammar(parallel, required)


class _Spelling:
    """The rules of a grammar for calls of one form."""

    def __init__(self, form: Form, special: Mapping[str, int]):
        self._form = form
        self._special = special
        marks = sorted(filter(None, special), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._calls: list[str] = []
        self._rules: list[str] = []

    def add(self, name: str, schema: dict[str, Any]) -> None:
        form, number = self._form, len(self._calls)
        arguments = f"args_{number}"
        self._rules.append(f"{arguments}: %json {json.dumps(schema | {'x-guidance': SPACING})}")
        if form.shape == "object":
            before = f'{{"{form.keys[0]}": {json.dumps(name, ensure_ascii=False)}, "{form.keys[1]}": '
            call = [self.text(before), arguments, self.text("}")]
        else:
            name = f"functions.{name}:" if form.numbered else name
            number_ = "/[0-9]{1,3}/" if form.numbered else ""
            call = [self.text(name), number_, self.text("".join(form.head)), arguments]
        self._calls.append(" ".join(filter(None, call)))

    def grammar(self, parallel: bool, required: bool) -> str:
        form = self._form
        each, after = "".join(form.each), "".join(form.after)
        more = f" ({self.text(form.between)} call)*" if parallel else ""
        rules = [
            f"call: {self.text(each)} ({' | '.join(self._calls)}) {self.text(after)}",
            f"block: {self.text(''.join(form.open))} call{more} {self.text(''.join(form.close))}",
            *self._rules,
        ]
        if required:
            return "\n".join(["start: block", *rules])
        return "\n".join([*self._free(parallel), *rules[2:]])

    def text(self, text: str) -> str:
        """A text as literals, special tokens as tokens."""
        if not text:
            return ""
        parts, at = [], 0
        for found in self._split.finditer(text) if self._split is not None else ():
            parts += [_literal(text[at : found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return " ".join(filter(None, [*parts, _literal(text[at:])]))

    def _free(self, parallel: bool) -> list[str]:
        """Rules for text in which a block of calls may begin with its trigger."""
        form = self._form
        opening, each, after = "".join(form.open), "".join(form.each), "".join(form.after)
        trigger = form.trigger
        whole = f"({' | '.join(self._calls)}) {self.text(after)}"
        call = f"{self.text(each)} {whole}"
        more = f" ({self.text(form.between)} more)*" if parallel and (form.open or form.bare) else ""
        close = self.text("".join(form.close))
        if form.bare:
            return ["start: PLAIN | block", "PLAIN: /([^{](?s:.*))?/", f"block: more{more} {close}", f"more: {call}"]
        first = opening + each
        first = first[first.index(trigger) + len(trigger) :]
        lazy = "[lazy]" if self._split is None or not self._split.search(trigger) else ""
        begin = f"begin{lazy}: TEXT {self.text(trigger)}"
        block = f"block: begin {self.text(first)} {whole}{more} {close}"
        return [f"start: block{'*' if parallel else '?'} end", "end: TEXT", FREE, begin, block, f"more: {call}"]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def _schema(function: dict[str, Any], bound: bool) -> dict[str, Any]:
    """What the arguments follow: always an object."""
    schema = function.get("parameters") if bound else None
    return {"type": "object"} | schema if isinstance(schema, dict) else {"type": "object"}
