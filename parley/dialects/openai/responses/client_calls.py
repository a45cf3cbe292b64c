"""Calls of the tools that OpenAI defines and clients run, as items of the output with events of their own."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any

from parley.dialects.json_answer import encode_json
from parley.dialects.openai.responses.argument_strings import ArgumentStrings, StringPiece
from parley.dialects.openai.responses.call_items import CallItem
from parley.dialects.openai.responses.events import EventStream
from parley.dialects.openai.responses.open_item import Item, ItemStatus
from parley.dialects.openai.responses.tools import ResponsesTool


class ClientCallItem(CallItem):
    """A call whose item has the arguments as members. If they are cut off, it has the strings that have arrived."""

    item_type: str

    def __init__(self, unique_id: str, output_index: int, events: EventStream, call_id: str, tool: ResponsesTool):
        super().__init__(unique_id, output_index, events, call_id, tool)
        self._reader = ArgumentStrings()
        self._strings: dict[str, list[list[str]]] = {}  # the pieces of each string, by member
        self._members: dict[str, Any] = {}  # once the item is closed
        self._is_whole = False  # then, if the arguments are complete

    def add_arguments(self, text: str) -> None:
        """Add a piece of the arguments."""
        if not text:
            return
        self._arguments.append(text)
        for piece in self._reader.add_arguments(text):
            strings = self._strings.setdefault(piece.member, [])
            if piece.is_first:
                strings.append([])
            strings[-1].append(piece.text)
            self._write_piece(piece)

    def close(self, status: ItemStatus) -> Item:
        """Write the events that end the item, and return it."""
        arguments = _decode_arguments("".join(self._arguments))
        self._is_whole = arguments is not None
        self._members = arguments or {
            member: ["".join(pieces) for pieces in strings] for member, strings in self._strings.items()
        }
        return super().close(status)

    def snapshot(self, status: ItemStatus) -> Item:
        """Return the item as it is now."""
        members = self.own_members(status) | {"call_id": self.call_id}
        return {"id": self.id, "type": self.item_type, "status": status} | dict(sorted(members.items()))

    @abstractmethod
    def own_members(self, status: ItemStatus) -> Item:
        """Return the members that only items of this type have."""

    def _write_piece(self, piece: StringPiece) -> None:
        """Write the event of a piece of a string, if there is one."""

    def _close_parts(self) -> None:
        """Write the events that end the item's parts."""

    def _texts(self, member: str) -> list[str]:
        """Return the strings of an array; a string in its place is one of one."""
        value = self._members.get(member)
        values = value if isinstance(value, list) else [value]
        return [text for text in values if isinstance(text, str)]

    def _text(self, member: str) -> str:
        """Return a string, "" if there is none."""
        value = self._members.get(member)
        return value if isinstance(value, str) else next(iter(self._texts(member)), "")

    def _number(self, member: str) -> int | None:
        value = self._members.get(member)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


class ShellCallItem(ClientCallItem):
    """A call of the shell, with events for each command."""

    prefix, item_type = "sh", "shell_call"

    def __init__(self, unique_id: str, output_index: int, events: EventStream, call_id: str, tool: ResponsesTool):
        super().__init__(unique_id, output_index, events, call_id, tool)
        self._begun = self._ended = 0  # commands with events

    def own_members(self, status: ItemStatus) -> Item:
        """Return the commands."""
        commands = self._texts("commands")
        limits = {name: self._number(name) for name in ("max_output_length", "timeout_ms")}
        return {"action": {"commands": commands, **limits}}

    def _write_piece(self, piece: StringPiece) -> None:
        if piece.member != "commands":
            return
        if piece.is_first:
            self._begin_command()
        if piece.text:
            self._events.write_delta(self._template, piece.text)
        if piece.is_last:
            self._end_command("".join(self._strings["commands"][piece.place]))

    def _close_parts(self) -> None:
        for number, command in enumerate(self._texts("commands")[self._ended :], self._ended):
            if number == self._begun:
                self._begin_command()
                self._events.write_delta(self._template, command)
            self._end_command(command)

    def _begin_command(self) -> None:
        place = {"command_index": self._begun, "output_index": self._index}
        self._begun += 1
        self._events.write("response.shell_call_command.added", **place, command="")
        self._template = self._events.delta_template("response.shell_call_command.delta", **place)

    def _end_command(self, command: str) -> None:
        place = {"command_index": self._ended, "output_index": self._index}
        self._ended += 1
        self._events.write("response.shell_call_command.done", **place, command=command)


class LocalShellCallItem(ClientCallItem):
    """A call of the older shell, which has no events for its command."""

    prefix, item_type = "lsh", "local_shell_call"

    def own_members(self, status: ItemStatus) -> Item:
        """Return the command."""
        env = self._members.get("env")
        action: Item = {"type": "exec", "command": self._texts("command"), "env": env if isinstance(env, dict) else {}}
        if (timeout := self._number("timeout_ms")) is not None:
            action["timeout_ms"] = timeout
        return {"action": action | {name: text for name in ("user", "working_directory") if (text := self._text(name))}}


class PatchCallItem(ClientCallItem):
    """A call of the patch tool, announced once its operation and file are known, with events for its diff."""

    prefix, item_type = "apc", "apply_patch_call"

    def __init__(self, unique_id: str, output_index: int, events: EventStream, call_id: str, tool: ResponsesTool):
        super().__init__(unique_id, output_index, events, call_id, tool)
        self._template = events.delta_template("response.apply_patch_call_operation_diff.delta", **self._place)
        self._head: dict[str, str] = {}  # the operation and the file
        self._is_announced = False

    def open(self) -> None:
        """Announce nothing yet."""

    def snapshot(self, status: ItemStatus) -> Item:
        """Return the item as it is now. The original has no status for one that is cut off."""
        return super().snapshot("in_progress" if status == "incomplete" else status)

    def own_members(self, status: ItemStatus) -> Item:
        """Return the operation."""
        head = self._head or {"type": self._text("type"), "path": self._text("path")}
        diff = {} if head["type"] == "delete_file" else {"diff": self._text("diff")}
        return {"operation": {"type": head["type"], **diff, "path": head["path"]}}

    def _write_piece(self, piece: StringPiece) -> None:
        if piece.member == "diff":
            if self._is_announced and self._head["type"] != "delete_file" and piece.text:
                self._events.write_delta(self._template, piece.text)
        elif piece.is_last and "diff" not in self._strings and {"type", "path"} <= self._strings.keys():
            self._head = {name: "".join(self._strings[name][0]) for name in ("type", "path")}
            self._announce()

    def _announce(self) -> None:
        self._is_announced = True
        super().open()

    def _close_parts(self) -> None:
        diff = self._text("diff")
        was_announced = self._is_announced
        if not was_announced:
            self._announce_whole()
        if self.own_members("completed")["operation"]["type"] == "delete_file":
            return
        if diff and not was_announced:
            self._events.write_delta(self._template, diff)
        self._events.write("response.apply_patch_call_operation_diff.done", **self._place, diff=diff)

    def _announce_whole(self) -> None:
        """Announce the item when its arguments are complete, as it would have been before."""
        members, self._members = self._members, self._members | {"diff": ""}
        self._announce()
        self._members = members


class ScreenCallItem(ClientCallItem):
    """A call of the computer's screen. Nothing is pending: no safety checks are made here."""

    prefix, item_type = "cu", "computer_call"

    def own_members(self, status: ItemStatus) -> Item:
        """Return the actions."""
        actions = self._members.get("actions")
        return {"actions": _objects(actions), "pending_safety_checks": []}


class PreviewScreenCallItem(ScreenCallItem):
    """A call of the older form of the tool, with one action."""

    def own_members(self, status: ItemStatus) -> Item:
        """Return the action."""
        actions = _objects([self._members.get("action")])
        return {**({"action": actions[0]} if actions else {}), "pending_safety_checks": []}


class SearchCallItem(ClientCallItem):
    """A call of the client's search for tools."""

    prefix, item_type = "tsc", "tool_search_call"

    def own_members(self, status: ItemStatus) -> Item:
        """Return the arguments."""
        return {"arguments": self._members if self._is_whole else {}, "execution": "client"}


CLIENT_CALLS: dict[str, type[CallItem]] = {
    "shell": ShellCallItem,
    "local_shell": LocalShellCallItem,
    "apply_patch": PatchCallItem,
    "computer": ScreenCallItem,
    "computer_use_preview": PreviewScreenCallItem,
    "tool_search": SearchCallItem,
}


def _objects(value: Any) -> list[Item]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _decode_arguments(arguments: str) -> dict[str, Any] | None:
    """Return complete arguments, None for others. Models write bare line ends."""
    try:
        value = json.loads(arguments, strict=False)
        encode_json(value)  # raises ValueError for half of a surrogate pair
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
