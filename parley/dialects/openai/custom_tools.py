"""Custom tools, whose calls are a text instead of arguments, as functions with one text and back.

The model sees functions alone. The text of a call is a JSON string in the function's arguments, and may have to follow
a grammar. Read and written here for chat completions and the Responses API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.output_constraints import MAX_GRAMMAR_CHARACTERS
from parley.types import CUSTOM_GRAMMAR, ChoiceDelta, ChoiceDone, Event, ToolCallDelta

CUSTOM_INPUT = "input"  # the argument of the function that stands for a custom tool
HEAD = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
PAIR = r"ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}"
CHARACTERS = re.compile(rf'(?:[^"\\]|\\(?:["\\/bfnrt]|{PAIR}|u(?!d[89a-f])[0-9a-f]{{4}}))*', re.IGNORECASE)


def custom_parameters(form: Fields | None, *, nested: bool) -> dict[str, Any]:
    """Return the schema of the function that stands for a custom tool, given the tool's ``format``.

    ``nested``: a grammar is in a member of its own, as in chat completions. Raises BadRequest.
    """
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"} | _read_custom_format(form, nested)},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool, given the text of a call."""
    return encode_json({CUSTOM_INPUT: text}).decode()


def _read_custom_format(form: Fields | None, nested: bool) -> dict[str, str]:
    """Return the schema of a custom tool's text without its type."""
    if form is None or form.string("type", "text", allowed=("text", "grammar")) == "text":
        return {}
    grammar = form.object("grammar") if nested else form
    if grammar is None:
        raise form.missing_member("grammar")
    syntax = grammar.string("syntax", None, allowed=("lark", "regex"))
    if syntax is None:
        raise grammar.missing_member("syntax")
    definition = grammar.string("definition", None, cap=MAX_GRAMMAR_CHARACTERS)
    if definition is None:
        raise grammar.missing_member("definition")
    return {CUSTOM_GRAMMAR: definition} if syntax == "lark" else {"pattern": f"^(?:{definition})$"}


def decode_characters(text: str) -> str:
    """Return the text that the characters of a JSON string stand for. Models write bare line ends, too."""
    return str(json.loads(f'"{text}"', strict=False))


class CustomInput:
    """Reads the text of a call while the arguments arrive. ``text``: so far."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._unread = ""
        self._has_begun = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def add_arguments(self, arguments: str) -> str:
        """Add a piece of the arguments; return the text in it."""
        self._unread += arguments
        if not self._has_begun:
            if (head := HEAD.match(self._unread)) is None:
                return ""
            self._has_begun, self._unread = True, self._unread[head.end() :]
        characters = CHARACTERS.match(self._unread)
        assert characters is not None
        return self._take(characters.end())

    def finish(self) -> str:
        """Return the rest of the text. If the arguments are not of the usual form, they are the text."""
        if self._has_begun:
            return ""
        try:
            value = msgspec.json.decode(self._unread, type=dict[str, Any]).get(CUSTOM_INPUT)
        except (msgspec.MsgspecError, RecursionError):
            value = None
        self._pieces.append(value if isinstance(value, str) else self._unread)
        return self._pieces[-1]

    def _take(self, length: int) -> str:
        piece = decode_characters(self._unread[:length])
        self._unread = self._unread[length:]
        self._pieces.append(piece)
        return piece


class CustomCallDelta(ToolCallDelta):
    """A piece of a custom tool's call: ``arguments`` are a piece of the text."""


class OpenCustomCall:
    """A custom tool's call whose arguments arrive."""

    def __init__(self, call_index: int):
        self.call_index = call_index
        self._input = CustomInput()

    def add_piece(self, call: ToolCallDelta) -> CustomCallDelta | None:
        """Return the piece of the call with text in place of arguments; None if it has nothing new."""
        text = self._input.add_arguments(call.arguments)
        return CustomCallDelta(call.index, call.id, call.name, text) if text or call.name is not None else None

    def finish(self) -> CustomCallDelta | None:
        """Return the rest of the call, None if all of it has been returned."""
        text = self._input.finish()
        return CustomCallDelta(self.call_index, arguments=text) if text else None


class CustomCallReader:
    """Finds the calls of custom tools in a reply's events, and turns their arguments into texts.

    ``names``: of the custom tools.
    """

    def __init__(self, names: Collection[str]):
        self._names = names
        self._open_calls: dict[int, OpenCustomCall] = {}  # by choice

    def read_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return the events, with ``CustomCallDelta`` for the pieces of custom tools' calls."""
        return [read_event for event in events for read_event in self._read_event(event)] if self._names else events

    def _read_event(self, event: Event) -> Iterator[Event]:
        match event:
            case ChoiceDelta(tool_call=ToolCallDelta() as call):
                open_call = self._open_calls.get(event.index)
                if open_call is None or open_call.call_index != call.index:
                    yield from self._finish_call(event.index)
                    if call.name not in self._names:
                        yield event
                        return
                    open_call = self._open_calls[event.index] = OpenCustomCall(call.index)
                yield msgspec.structs.replace(event, tool_call=open_call.add_piece(call))
            case ChoiceDone():
                yield from self._finish_call(event.index)
                yield event
            case _:
                yield event

    def _finish_call(self, choice_index: int) -> Iterator[Event]:
        open_call = self._open_calls.pop(choice_index, None)
        if open_call is not None and (rest := open_call.finish()) is not None:
            yield ChoiceDelta(choice_index, "", "tool", tool_call=rest)
