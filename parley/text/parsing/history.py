"""History formatter: writes past turns, above all those with tool calls, as a model's chat template expects them.

Clients send turns in OpenAI's format; templates differ in the members they read. The source of a template shows which
ones it needs. Handles templates as texts only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from parley.text.parsing.calls import Form, written
from parley.text.parsing.markup import ALPHABET, detect
from parley.types import Message, ToolCall

Turn = dict[str, Any]

NINE = re.compile(r"length\s*(!=|<|>=)\s*9")  # Mistral's templates refuse ids of other lengths
NUMBERED = "<|tool_call_argument_begin|>"  # Kimi's templates write the id where others write the name
SINGLE = "single tool-calls at once"  # Llama's templates refuse turns with several calls
RESPONSES = re.compile(
    r"""[.'"]tool_responses\b"""
)  # Gemma's first templates read results in the turn that called; later ones read turns of tools too
RESULTS = "tool_call_id"  # occurs in templates that read turns of tools
CALLS = "tool_calls"  # templates without it see calls only as part of the content
EITHER = "content and message.thinking"  # gpt-oss's template refuses turns with calls that have both


class Arguments(dict[str, Any]):
    """A call's arguments: an object if the template reads one; when printed, the text that the client sent."""

    def __init__(self, value: dict[str, Any], text: str):
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def turns(messages: Sequence[Message], source: str) -> list[Turn]:
    """Return the conversation for the template with this source. Members that are None are left out."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    ids = _ids(messages, source)
    made = [_turn(message, names, ids) for message in messages]
    if CALLS not in source and (forms := detect(source).calls):
        made = [_said(turn, forms[0]) for turn in made]
    if EITHER in source:
        made = [_joined(turn) for turn in made]
    if RESPONSES.search(source) and RESULTS not in source:
        made = list(_gathered(made))
    return list(_split(made)) if SINGLE in source else made


def _turn(message: Message, names: dict[str, str], ids: dict[str, str]) -> Turn:
    """Return one message as a template reads it."""
    reasoning = message.reasoning
    of = message.tool_call_id
    calls = [
        {"id": ids.get(call.id, call.id), "type": "function", "function": {"name": call.name, "arguments": _read(call)}}
        for call in message.tool_calls
    ]
    value = {
        "role": message.role,
        "content": message.content,
        "name": names.get(of or "") if message.name is None and message.role == "tool" else message.name,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
        "thinking": reasoning,
        "tool_plan": reasoning if calls else None,
        "tool_call_id": ids.get(of, of) if of is not None else None,
        "tool_calls": calls or None,
    }
    return {key: entry for key, entry in value.items() if entry is not None}


def _read(call: ToolCall) -> Any:
    """Return a call's arguments as an object if they are one, else as text."""
    if not call.arguments.strip():
        return Arguments({}, "{}")
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return Arguments(value, call.arguments) if isinstance(value, dict) else call.arguments


def _ids(messages: Sequence[Message], source: str) -> dict[str, str]:
    """Return new call ids, by old id, for those that the template would refuse."""
    calls = [call for message in messages for call in message.tool_calls]
    if NINE.search(source):
        ids = [*(call.id for call in calls), *(message.tool_call_id or "" for message in messages)]
        return {id: _short(id) for id in ids if id and not (len(id) == 9 and id.isalnum())}
    if NUMBERED in source:
        own = [call.id.startswith("functions.") for call in calls]
        return {} if all(own) else {call.id: f"functions.{call.name}:{n}" for n, call in enumerate(calls)}
    return {}


def _short(id: str) -> str:
    """Return nine letters and digits derived from an id."""
    return "".join(
        ALPHABET[byte % len(ALPHABET)] for byte in hashlib.sha256(id.encode("utf-8", "replace")).digest()[:9]
    )


def _said(turn: Turn, form: Form) -> Turn:
    """Return the turn with its calls written at the end of its content, in the model's own form."""
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in turn.get(CALLS, ())]
    if not calls or not all(isinstance(arguments, dict) for _, _, arguments in calls):
        return turn
    content = "\n".join(filter(None, (turn.get("content"), written(form, calls).strip())))
    return {key: value for key, value in turn.items() if key != CALLS} | {"content": content}


def _joined(turn: Turn) -> Turn:
    """Return the turn with content that precedes calls appended to the reasoning before them."""
    if "tool_calls" not in turn or not turn.get("content") or "thinking" not in turn:
        return turn
    thinking = f"{turn['thinking']}\n\n{turn['content']}"
    return {key: value for key, value in turn.items() if key != "content"} | {"thinking": thinking}


def _gathered(made: list[Turn]) -> Iterator[Turn]:
    """Yield the turns with the results of calls moved into the turns that called."""
    caller: Turn | None = None
    for turn in made:
        if turn["role"] == "tool" and caller is not None:
            result = {"name": turn.get("name", "unknown"), "response": _result(turn.get("content") or "")}
            caller.setdefault("tool_responses", []).append(result)
            continue
        caller = turn if "tool_calls" in turn else None
        yield turn


def _result(content: str) -> Any:
    """Return a call's result as an object if it is one, else as text."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content
    return value if isinstance(value, dict) else content


def _split(made: list[Turn]) -> Iterator[Turn]:
    """Yield turns with one call each, and the result of each call after it."""
    results: dict[str, list[Turn]] = {}
    for turn in made:
        if turn["role"] == "tool" and "tool_call_id" in turn:
            results.setdefault(turn["tool_call_id"], []).append(turn)
    moved: set[int] = set()
    for turn in made:
        calls = turn.get("tool_calls", ())
        if id(turn) in moved:
            continue
        if len(calls) < 2:
            yield turn
            continue
        said = {key: value for key, value in turn.items() if key != "tool_calls"}
        for call in calls:
            yield {**said, "tool_calls": [call]}
            said = {"role": turn["role"]}
            own = results.pop(call["id"], [])
            moved.update(map(id, own))
            yield from own
