"""History formatter: writes past turns, above all those with tool calls, as a model's chat template expects them.

Clients send turns in OpenAI's format; templates differ in the members they read. The source of a template shows which
ones it needs. Handles templates as texts only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from parley.text.parsing.calls import CallForm, write_calls
from parley.text.parsing.content_parts import content_parts
from parley.text.parsing.markup import ID_ALPHABET, detect_markup
from parley.types import Message, PlacedMedia, ToolCall

TemplateTurn = dict[str, Any]

NINE_CHARACTER_IDS = re.compile(r"length\s*(!=|<|>=)\s*9")  # Mistral's templates refuse ids of other lengths
IDS_AS_NAMES = "<|tool_call_argument_begin|>"  # Kimi's templates write the id where others write the name
ONE_CALL_PER_TURN = "single tool-calls at once"  # Llama's templates refuse turns with several calls
# Gemma's first templates read results in the turn that called; later ones read turns of tools too.
RESULTS_IN_CALLER = re.compile(r"""[.'"]tool_responses\b""")
READS_TOOL_TURNS = "tool_call_id"  # occurs in templates that read turns of tools
CALLS_MEMBER = "tool_calls"  # templates without it see calls only as part of the content
LATER_SYSTEM = "<system>\n{}\n</system>"  # a system message, written as a user's turn
CONTENT_OR_THINKING = "content and message.thinking"  # gpt-oss's template refuses turns with calls that have both


class CallArguments(dict[str, Any]):
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


class TemplateNeeds(NamedTuple):
    """What a template needs of the turns that it is given.

    * ``short_ids``: ids of calls have nine characters.
    * ``ids_as_names``: ids of calls are made of the calls' names.
    * ``call_form``: calls are written into the content in this form.
    * ``one_text``: content that precedes calls is reasoning.
    * ``results_in_caller``: results of calls are in the turn that called.
    * ``one_call``: a turn has one call.
    """

    short_ids: bool
    ids_as_names: bool
    call_form: CallForm | None
    one_text: bool
    results_in_caller: bool
    one_call: bool


@lru_cache(16)  # a source is long, and each model has only one or two
def _find_needs(source: str) -> TemplateNeeds:
    """Find out the needs of a template from its source."""
    forms = () if CALLS_MEMBER in source else detect_markup(source).call_forms
    return TemplateNeeds(
        NINE_CHARACTER_IDS.search(source) is not None,
        IDS_AS_NAMES in source,
        forms[0] if forms else None,
        CONTENT_OR_THINKING in source,
        RESULTS_IN_CALLER.search(source) is not None and READS_TOOL_TURNS not in source,
        ONE_CALL_PER_TURN in source,
    )


def format_history(messages: Sequence[Message], source: str) -> list[TemplateTurn]:
    """Return the conversation for the template with this source. Members that are None are left out."""
    needs = _find_needs(source)
    calls = [call for message in messages for call in message.tool_calls]
    names, ids = {call.id: call.name for call in calls}, _replacement_ids(messages, calls, needs)
    history = [_format_message(message, names, ids) for message in messages]
    if needs.call_form is not None:
        history = [_calls_as_content(turn, needs.call_form) for turn in history]
    if needs.one_text:
        history = [_content_as_reasoning(turn) for turn in history]
    if needs.results_in_caller:
        history = list(_results_in_callers(history))
    return list(_split_calls(history)) if needs.one_call else history


def later_system_as_user(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with each system message after the first turn as text of the user, in its place.

    It joins the user's turns next to it, because some templates require that turns alternate.
    """
    turns: list[Message] = []
    joins = False  # the last turn was a system message
    for index, message in enumerate(messages):
        is_later = index > 0 and message.role == "system"
        if is_later:
            message = Message("user", LATER_SYSTEM.format(message.content or ""))
        if turns and turns[-1].role == message.role == "user" and (joins or is_later):
            message = _join_turns(turns.pop(), message)
        turns.append(message)
        joins = is_later
    return turns


def _join_turns(first: Message, second: Message) -> Message:
    """Return two turns of one role as one."""
    start = f"{first.content or ''}\n"
    moved = [PlacedMedia(len(start) + placed.position, placed.media) for placed in second.media]
    return msgspec.structs.replace(first, content=start + (second.content or ""), media=[*first.media, *moved])


def _format_message(message: Message, names: dict[str, str], ids: dict[str, str]) -> TemplateTurn:
    """Return one message as a template reads it."""
    reasoning = message.reasoning
    result_call_id = message.tool_call_id
    calls = [
        {
            "id": ids.get(call.id, call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": _read_call_arguments(call)},
        }
        for call in message.tool_calls
    ]
    value = {
        "role": message.role,
        "content": content_parts(message.content or "", message.media) if message.media else message.content,
        "name": names.get(result_call_id or "") if message.name is None and message.role == "tool" else message.name,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
        "thinking": reasoning,
        "tool_plan": reasoning if calls else None,
        "tool_call_id": ids.get(result_call_id, result_call_id) if result_call_id is not None else None,
        "tool_calls": calls or None,
    }
    return {key: entry for key, entry in value.items() if entry is not None}


def _read_call_arguments(call: ToolCall) -> Any:
    """Return a call's arguments as an object if they are one, else as text."""
    if not call.arguments.strip():
        return CallArguments({}, "{}")
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return CallArguments(value, call.arguments) if isinstance(value, dict) else call.arguments


def _replacement_ids(messages: Sequence[Message], calls: Sequence[ToolCall], needs: TemplateNeeds) -> dict[str, str]:
    """Return new call ids, by old id, for those that the template would refuse. ``calls``: those of the messages."""
    if needs.short_ids:
        ids = [*(call.id for call in calls), *(message.tool_call_id or "" for message in messages)]
        return {
            call_id: _short_call_id(call_id)
            for call_id in ids
            if call_id and not (len(call_id) == 9 and call_id.isalnum())
        }
    if needs.ids_as_names:
        is_numbered = [call.id.startswith("functions.") for call in calls]
        return (
            {}
            if all(is_numbered)
            else {call.id: f"functions.{call.name}:{number}" for number, call in enumerate(calls)}
        )
    return {}


def _short_call_id(call_id: str) -> str:
    """Return nine letters and digits derived from an id."""
    return "".join(
        ID_ALPHABET[byte % len(ID_ALPHABET)] for byte in hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:9]
    )


def _calls_as_content(turn: TemplateTurn, form: CallForm) -> TemplateTurn:
    """Return the turn with its calls written at the end of its content, in the model's own form."""
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in turn.get(CALLS_MEMBER, ())
    ]
    if not calls or not all(isinstance(arguments, dict) for _, _, arguments in calls):
        return turn
    content, written_calls = turn.get("content"), write_calls(form, calls).strip()
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": f"\n{written_calls}"}]
    else:
        content = "\n".join(filter(None, (content, written_calls)))
    return {key: value for key, value in turn.items() if key != CALLS_MEMBER} | {"content": content}


def _content_as_reasoning(turn: TemplateTurn) -> TemplateTurn:
    """Return the turn with content that precedes calls appended to the reasoning before them."""
    if "tool_calls" not in turn or not isinstance(turn.get("content") or None, str) or "thinking" not in turn:
        return turn
    thinking = f"{turn['thinking']}\n\n{turn['content']}"
    return {key: value for key, value in turn.items() if key != "content"} | {"thinking": thinking}


def _results_in_callers(history: list[TemplateTurn]) -> Iterator[TemplateTurn]:
    """Yield the turns with the results of calls moved into the turns that called."""
    caller: TemplateTurn | None = None
    for turn in history:
        if turn["role"] == "tool" and caller is not None and not isinstance(turn.get("content"), list):
            result = {"name": turn.get("name", "unknown"), "response": _read_result(turn.get("content") or "")}
            caller.setdefault("tool_responses", []).append(result)
            continue
        caller = turn if "tool_calls" in turn else None
        yield turn


def _read_result(content: str) -> Any:
    """Return a call's result as an object if it is one, else as text."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content
    return value if isinstance(value, dict) else content


def _split_calls(history: list[TemplateTurn]) -> Iterator[TemplateTurn]:
    """Yield turns with one call each, and the result of each call after it."""
    results: dict[str, list[TemplateTurn]] = {}
    for turn in history:
        if turn["role"] == "tool" and "tool_call_id" in turn:
            results.setdefault(turn["tool_call_id"], []).append(turn)
    moved: set[int] = set()
    for turn in history:
        calls = turn.get("tool_calls", ())
        if id(turn) in moved:
            continue
        if len(calls) < 2:
            yield turn
            continue
        members = {key: value for key, value in turn.items() if key != "tool_calls"}
        for call in calls:
            yield {**members, "tool_calls": [call]}
            members = {"role": turn["role"]}
            call_results = results.pop(call["id"], [])
            moved.update(map(id, call_results))
            yield from call_results
