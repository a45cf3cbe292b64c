"""Input items of the tools that OpenAI defines and clients run: calls as arguments again, and outputs as texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from parley.dialects.fields import Fields, is_shallow
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.responses.client_tools import OPERATIONS
from parley.dialects.openai.responses.tools import namespaced_name

MAX_PARTS = 1024  # commands, outputs and actions of one item
MAX_NAME = 4096  # characters of paths and names
MAX_ACTION_DEPTH = 4
SHELL_LIMITS = ("timeout_ms", "max_output_length")
CallReader = Callable[[Fields], dict[str, Any]]


def read_client_call(item: Fields, kind: str) -> tuple[str, str]:
    """Return the name of the function that an item of this type called, and its arguments. Raises BadRequest."""
    name, read_arguments = CALL_READERS[kind]
    return name, encode_json(read_arguments(item)).decode()


def _read_shell_call(item: Fields) -> dict[str, Any]:
    action = _required_object(item, "action")
    limits = {name: action.integer(name, None) for name in SHELL_LIMITS}
    return {"commands": _texts(action, "commands")} | _present(limits)


def _read_local_shell_call(item: Fields) -> dict[str, Any]:
    action = _required_object(item, "action")
    action.string("type", "exec", allowed=("exec",))
    others = {
        "working_directory": action.string("working_directory", None, cap=MAX_NAME),
        "env": action.free_object("env") or None,
        "timeout_ms": action.integer("timeout_ms", None),
        "user": action.string("user", None, cap=MAX_NAME),
    }
    return {"command": _texts(action, "command")} | _present(others)


def _read_patch_call(item: Fields) -> dict[str, Any]:
    operation = _required_object(item, "operation")
    kind = operation.string("type", None, allowed=OPERATIONS)
    if kind is None:
        raise operation.missing_member("type")
    texts = {"path": operation.string("path", None), "diff": operation.string("diff", "")}
    if texts["path"] is None:
        raise operation.missing_member("path")
    return {"type": kind} | texts


def _read_screen_call(item: Fields) -> dict[str, Any]:
    if item.has_value("actions"):
        return {"actions": [_whole_object(action) for action in item.objects("actions", cap=MAX_PARTS)]}
    return {"action": _whole_object(_required_object(item, "action"))}


CALL_READERS: dict[str, tuple[str, CallReader]] = {
    "shell_call": ("shell", _read_shell_call),
    "local_shell_call": ("local_shell", _read_local_shell_call),
    "apply_patch_call": ("apply_patch", _read_patch_call),
    "computer_call": ("computer", _read_screen_call),
}


def read_search_arguments(item: Fields) -> str:
    """Return the arguments of a search for tools, which are an object or its JSON. Raises BadRequest."""
    if isinstance(item.raw_value("arguments"), str):
        return item.string("arguments", "") or "{}"
    return encode_json(item.free_object("arguments")).decode()


def search_result(tools: list[Fields]) -> str:
    """Return a sentence about the tools that a search has found. Raises BadRequest."""
    names = [namespaced_name(namespace, name) for tool in tools for namespace, name in _tool_names(tool)]
    return f"These tools are available now: {', '.join(names)}." if names else "No tool was found."


def _tool_names(tool: Fields) -> Iterator[tuple[str, str]]:
    """Yield the name of a tool with its namespace, or those of the tools in a namespace."""
    name = tool.string("name", "", cap=MAX_NAME)
    if tool.raw_value("type") == "namespace":
        for inner in tool.objects("tools", cap=MAX_PARTS):
            yield name, inner.string("name", "", cap=MAX_NAME)
    elif name:
        yield "", name


def read_shell_output(item: Fields) -> str:
    """Return what the commands of a shell call printed, and how each ended. Raises BadRequest."""
    if isinstance(item.raw_value("output"), str):  # as some clients send the outputs of all calls
        return item.string("output", "")
    if item.raw_value("output") is None:
        raise item.missing_member("output")
    return "\n\n".join("\n".join(_output_lines(part)) for part in item.objects("output", cap=MAX_PARTS))


def _output_lines(part: Fields) -> Iterator[str]:
    outcome = part.object("outcome")
    if outcome is not None:
        if outcome.string("type", "exit", allowed=("exit", "timeout")) == "timeout":
            yield "The command took too long and was stopped."
        elif (code := outcome.integer("exit_code", None)) is not None:
            yield f"Exit code: {code}"
    for name, heading in (("stdout", "Output:"), ("stderr", "Errors:")):
        if text := part.string(name, ""):
            yield heading
            yield text.removesuffix("\n")


def read_patch_output(item: Fields) -> str:
    """Return whether a patch was applied, and what the client says about it. Raises BadRequest."""
    status = item.string("status", "completed", allowed=("completed", "failed"))
    sentence = "The patch was applied." if status == "completed" else "The patch was not applied."
    text = item.string("output", None)
    return f"{sentence}\n{text}" if text else sentence


def _required_object(item: Fields, name: str) -> Fields:
    value = item.object(name)
    if value is None:
        raise item.missing_member(name)
    return value


def _whole_object(fields: Fields) -> dict[str, Any]:
    """Return an action of a screen, whose members are numbers, texts, and arrays of these."""
    members = {name: fields.raw_value(name) for name in fields.member_names}
    if not is_shallow(members, MAX_ACTION_DEPTH):
        raise fields.member_error("type", f"the action is nested deeper than {MAX_ACTION_DEPTH} levels.")
    return members


def _texts(fields: Fields, name: str) -> list[str]:
    """Return an array of strings."""
    values = fields.array(name, cap=MAX_PARTS)
    if not all(isinstance(value, str) for value in values):
        raise fields.mistyped_member(name, "an array of strings")
    return values


def _present(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}
