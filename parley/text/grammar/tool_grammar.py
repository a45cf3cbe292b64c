"""The grammar of tool calls: the marks of the model's family, the names of the tools, and their schemas.

The grammar is a text in llguidance's dialect of Lark. Marks that are special tokens are written by id, because text
never matches them. Depends on schemas and marks, not on matchers or engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from parley.errors import InvalidValue
from parley.text.grammar.lark import LarkWriter
from parley.text.grammar.schemas.argument_rules import ArgumentRules
from parley.text.parsing.markup import Markup

FREE_TEXT = "TEXT: /(?s:.*)/"
# Written before content by models with channels.
ASSISTANT_START = "<|start|>assistant"
FINAL_CHANNEL = "<|channel|>final<|message|>"


def tool_calls_grammar(
    markup: Markup,
    lark: LarkWriter,
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
    ``lark`` writes the model's marks. Raises InvalidValue if the model's family has no tool calls, or there is no such
    tool.
    """
    if not markup.call_forms:
        raise InvalidValue("The model has no form of tool calls that is supported.", field="tools")
    functions = [function for function in map(_tool_function, tools) if only is None or function["name"] == only]
    if not functions:
        raise InvalidValue("tool_choice names a function that is not among the tools.", field="tool_choice")
    form = markup.call_forms[0]
    rules = ArgumentRules(form, lark)
    calls = " | ".join(
        _write_tool_call(rules, function, required or function.get("strict") is True) for function in functions
    )
    if markup.uses_channels:
        lines = _channel_messages(rules, calls, required)
    elif required:
        lines = _required_block(rules, calls, parallel, optional_lead(lark, markup.lead_marks[0]))
    else:
        lines = _text_with_calls(rules, calls, parallel, markup.dropped_marks)
    return "\n".join([*lines, *rules.lines])


def _write_tool_call(rules: ArgumentRules, function: dict[str, Any], follow_schema: bool) -> str:
    """Return one tool's calls, without the marks around each. ``follow_schema``: its arguments follow its schema."""
    form, name = rules.form, function["name"]
    schema = function.get("parameters") if follow_schema else None
    arguments = rules.arguments_rule(
        {"type": "object"} | schema if isinstance(schema, dict) else {"type": "object"}, follow_schema
    )
    quoted_name = json.dumps(name, ensure_ascii=False)
    match form.shape:
        case "object":
            parts = [
                rules.write_text(f'{{"{form.member_names[0]}": {quoted_name}, "{form.member_names[1]}": '),
                arguments,
                rules.write_text("}"),
            ]
        case "keyed":
            parts = [rules.write_text(f"{{{quoted_name}: "), arguments, rules.write_text("}")]
        case "named" if form.numbered_names:
            parts = [
                rules.write_text(f"functions.{name}:"),
                "/[0-9]{1,3}/",
                rules.write_text("".join(form.after_name)),
                arguments,
            ]
        case "named" if form.name_mark:
            parts = ["/[a-z0-9]{10}/", rules.write_text(f"{form.name_mark}{name}{''.join(form.after_name)}"), arguments]
        case "named" | "tags" | "elements":
            number = ["/[1-9][0-9]{0,2}/", rules.write_text(form.number_end)] if form.number_end else []
            parts = [rules.write_text(name + "".join(form.after_name)), *number, arguments]
        case "python":
            parts = [rules.write_text(f"{name}("), arguments, rules.write_text(")")]
        case "loose":
            parts = [rules.write_text(f"{name}{{"), arguments, rules.write_text("}")]
    return " ".join(parts)


def optional_lead(lark: LarkWriter, texts: Sequence[str]) -> str:
    """Return one of the texts, optional; empty if there are none."""
    return f"({' | '.join(map(lark.write_text, texts))})?" if texts else ""


def _required_block(rules: ArgumentRules, calls: str, parallel: bool, lead: str) -> list[str]:
    form = rules.form
    opening, close = rules.write_text("".join(form.block_open)), rules.write_text("".join(form.block_close))
    more_calls = f"({rules.write_text(form.separator)} call)*" if parallel and not form.single_call else ""
    return [f"start: {lead} {opening} call {more_calls} {close}", _marked_call(rules, calls)]


def _marked_call(rules: ArgumentRules, calls: str) -> str:
    """Return the rule of a call with the marks around it."""
    form = rules.form
    call_open, call_close = "".join(form.call_open), "".join(form.call_close)
    return f"call: {rules.write_text(call_open)} ({calls}) {rules.write_text(call_close)}"


def _text_with_calls(rules: ArgumentRules, calls: str, parallel: bool, silent: Sequence[str]) -> list[str]:
    """Return rules for text with a block of calls after a trigger, and with ``silent`` marks anywhere."""
    form = rules.form
    call_open, close = "".join(form.call_open), rules.write_text("".join(form.block_close))
    trigger = form.trigger_mark
    parallel = parallel and not form.single_call
    together = bool(form.block_open) or form.unmarked  # several calls form one block
    more_calls = f"({rules.write_text(form.separator)} call)*" if parallel and together else ""
    call = _marked_call(rules, calls)
    if form.unmarked:
        plain_rule = f"PLAIN: /([^{re.escape(trigger)}](?s:.*))?/"
        return [
            "start: PLAIN | block",
            plain_rule,
            f"block: {rules.write_text(''.join(form.block_open))} call {more_calls} {close}",
            call,
        ]
    first = "".join(form.block_open) + call_open
    first = first[first.index(trigger) + len(trigger) :]
    mark = rules.find_mark(trigger)
    if mark:  # a mark, which no text matches, is enough to recognize a call
        trigger = trigger[mark.start() :]
    other_marks = " | ".join(rules.write_text(mark) for mark in silent if mark and rules.find_mark(mark))
    text = f"(TEXT ({other_marks}))* TEXT" if other_marks else "TEXT"
    lines = [
        f"start: block{'*' if parallel else '?'} end",
        f"end: {text}",
        FREE_TEXT,
        f"begin{'' if mark else '[lazy]'}: {text} {rules.write_text(trigger)}",
        f"block: begin {rules.write_text(first)} ({calls}) {rules.write_text(''.join(form.call_close))} "
        f"{more_calls} {close}",
    ]
    return [*lines, call] if more_calls else lines


def _channel_messages(rules: ArgumentRules, calls: str, required: bool) -> list[str]:
    """Return rules for messages in channels: any number of preambles, then a call or the answer. The prompt may already
    contain the beginning of the first message."""
    form = rules.form
    head = "".join(form.call_open).removeprefix(ASSISTANT_START)
    lines = [f"call: {rules.write_text(head)} ({calls})", f"begin: {rules.write_text(ASSISTANT_START)}"]
    if required:
        return ["start: begin? call", *lines]
    return [
        "start: begin? (preamble begin)* (call | final)",
        *lines,
        f"preamble: {rules.write_text('<|channel|>commentary<|message|>')} TEXT {rules.write_text('<|end|>')}",
        f"final: {rules.write_text(FINAL_CHANNEL)} TEXT",
        FREE_TEXT,
    ]


def _tool_function(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, dict) else tool
