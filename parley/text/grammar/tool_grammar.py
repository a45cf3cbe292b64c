"""The grammar of tool calls: the marks of the model's family, the names of the tools, and their schemas.

The grammar is a text in llguidance's dialect of Lark. Marks that are special tokens are written by id, because text
never matches them. Depends on schemas and marks, not on matchers or engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from parley.errors import Invalid
from parley.text.grammar.argument_rules import Rules
from parley.text.grammar.lark import Lark
from parley.text.parsing.markup import Markup

FREE = "TEXT: /(?s:.*)/"
BEGIN, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"  # written before content by models with channels


def calls_grammar(
    markup: Markup,
    lark: Lark,
    tools: Sequence[dict[str, Any]],
    *,
    parallel: bool,
    required: bool,
    only: str | None = None,
) -> str:
    """Return the grammar of an answer (after its reasoning) that may or must call tools.

    ``required``: the answer is a call of one of the tools (only ``only``, if given) whose arguments follow its schema;
    with ``parallel``, one or more calls. Otherwise the answer is free text, but text that begins like a call has to be
    one: a call of an existing tool whose arguments are an object, and follow the schema if the tool is ``strict``.
    ``lark`` writes the model's marks. Raises Invalid if the model's family has no tool calls, or there is no such tool.
    """
    if not markup.calls:
        raise Invalid("The model has no form of tool calls that is supported.", field="tools")
    functions = [function for function in map(_function, tools) if only is None or function["name"] == only]
    if not functions:
        raise Invalid("tool_choice names a function that is not among the tools.", field="tool_choice")
    form = markup.calls[0]
    rules = Rules(form, lark)
    calls = " | ".join(_call(rules, function, required or function.get("strict") is True) for function in functions)
    if markup.channels:
        lines = _channels(rules, calls, required)
    elif required:
        lines = _block(rules, calls, parallel, lead(lark, markup.leads[0]))
    else:
        lines = _free(rules, calls, parallel, markup.silent)
    return "\n".join([*lines, *rules.lines])


def _call(rules: Rules, function: dict[str, Any], bound: bool) -> str:
    """Return one tool's calls, without the marks around each. ``follow_schema``: its arguments follow its schema."""
    form, name = rules.form, function["name"]
    schema = function.get("parameters") if bound else None
    arguments = rules.arguments({"type": "object"} | schema if isinstance(schema, dict) else {"type": "object"}, bound)
    quoted = json.dumps(name, ensure_ascii=False)
    match form.shape:
        case "object":
            parts = [rules.text(f'{{"{form.keys[0]}": {quoted}, "{form.keys[1]}": '), arguments, rules.text("}")]
        case "keyed":
            parts = [rules.text(f"{{{quoted}: "), arguments, rules.text("}")]
        case "named" if form.numbered:
            parts = [rules.text(f"functions.{name}:"), "/[0-9]{1,3}/", rules.text("".join(form.head)), arguments]
        case "named" if form.first:
            parts = ["/[a-z0-9]{10}/", rules.text(f"{form.first}{name}{''.join(form.head)}"), arguments]
        case "named" | "tags" | "elements":
            number = ["/[1-9][0-9]{0,2}/", rules.text(form.count)] if form.count else []
            parts = [rules.text(name + "".join(form.head)), *number, arguments]
        case "python":
            parts = [rules.text(f"{name}("), arguments, rules.text(")")]
        case "loose":
            parts = [rules.text(f"{name}{{"), arguments, rules.text("}")]
    return " ".join(parts)


def lead(lark: Lark, texts: Sequence[str]) -> str:
    """Return one of the texts, optional; empty if there are none."""
    return f"({' | '.join(map(lark.text, texts))})?" if texts else ""


def _block(rules: Rules, calls: str, parallel: bool, lead: str) -> list[str]:
    form = rules.form
    opening, close = rules.text("".join(form.open)), rules.text("".join(form.close))
    more = f"({rules.text(form.between)} call)*" if parallel and not form.alone else ""
    return [f"start: {lead} {opening} call {more} {close}", _each(rules, calls)]


def _each(rules: Rules, calls: str) -> str:
    """Return the rule of a call with the marks around it."""
    form = rules.form
    each, after = "".join(form.each), "".join(form.after)
    return f"call: {rules.text(each)} ({calls}) {rules.text(after)}"


def _free(rules: Rules, calls: str, parallel: bool, silent: Sequence[str]) -> list[str]:
    """Return rules for text with a block of calls after a trigger, and with ``silent`` marks anywhere."""
    form = rules.form
    each, close = "".join(form.each), rules.text("".join(form.close))
    trigger = form.trigger
    parallel = parallel and not form.alone
    together = bool(form.open) or form.bare  # several calls form one block
    more = f"({rules.text(form.between)} call)*" if parallel and together else ""
    call = _each(rules, calls)
    if form.bare:
        plain = f"PLAIN: /([^{re.escape(trigger)}](?s:.*))?/"
        return ["start: PLAIN | block", plain, f"block: {rules.text(''.join(form.open))} call {more} {close}", call]
    first = "".join(form.open) + each
    first = first[first.index(trigger) + len(trigger) :]
    mark = rules.mark(trigger)
    if mark:  # a mark, which no text matches, is enough to recognise a call
        trigger = trigger[mark.start() :]
    others = " | ".join(rules.text(each) for each in silent if mark and rules.mark(each))
    text = f"(TEXT ({others}))* TEXT" if others else "TEXT"
    lines = [
        f"start: block{'*' if parallel else '?'} end",
        f"end: {text}",
        FREE,
        f"begin{'' if mark else '[lazy]'}: {text} {rules.text(trigger)}",
        f"block: begin {rules.text(first)} ({calls}) {rules.text(''.join(form.after))} {more} {close}",
    ]
    return [*lines, call] if more else lines


def _channels(rules: Rules, calls: str, required: bool) -> list[str]:
    """Return rules for messages in channels: any number of preambles, then a call or the answer. The prompt may already
    contain the beginning of the first message."""
    form = rules.form
    head = "".join(form.each).removeprefix(BEGIN)
    lines = [f"call: {rules.text(head)} ({calls})", f"begin: {rules.text(BEGIN)}"]
    if required:
        return ["start: begin? call", *lines]
    return [
        "start: begin? (preamble begin)* (call | final)",
        *lines,
        f"preamble: {rules.text('<|channel|>commentary<|message|>')} TEXT {rules.text('<|end|>')}",
        f"final: {rules.text(FINAL)} TEXT",
        FREE,
    ]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else tool
