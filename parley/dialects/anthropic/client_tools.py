"""Tools that Anthropic defines and clients run: a shell, an editor of files, and a memory of files.

A request names only their type, because the original's models know the schemas. Other models need them, so they are
written here, with the members that clients of these tools read:
https://platform.claude.com/docs/en/agents-and-tools/tool-use/overview
"""

from __future__ import annotations

from typing import Any, NamedTuple

JsonSchema = dict[str, Any]


class ClientTool(NamedTuple):
    """One tool. ``name``: the only one that the original accepts. ``has_max_characters``: whether a client may say how
    much of a file it shows."""

    name: str
    description: str
    input_schema: JsonSchema
    has_max_characters: bool = False


def _text(description: str) -> JsonSchema:
    return {"type": "string", "description": description}


def _object(properties: dict[str, JsonSchema], required: list[str]) -> JsonSchema:
    return {"type": "object", "properties": properties, "required": required}


def _command(*names: str) -> JsonSchema:
    return {"type": "string", "enum": list(names), "description": "What to do."}


VIEW_RANGE: JsonSchema = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "view: the first and the last line, counted from 1; -1 as the last line is the end of the file.",
}
INSERT_LINE: JsonSchema = {
    "type": "integer",
    "minimum": 0,
    "description": "insert: the line after which the text is inserted; 0 is the beginning of the file.",
}
OLD_TEXT = _text("str_replace: the text to replace, exactly as in the file, where it must occur once.")
NEW_TEXT = _text("str_replace: the text in its place.")
INSERTED_TEXT = _text("insert: the text to insert.")
FILE_TEXT = _text("create: the whole text of the file.")

BASH = ClientTool(
    "bash",
    "Runs commands in a bash shell that keeps its state from call to call. Give a command, or restart the shell.",
    _object(
        {
            "command": _text("The command to run. It is needed unless restart is true."),
            "restart": {"type": "boolean", "description": "true starts a new shell."},
        },
        [],
    ),
)


def _editor(name: str, *, can_undo: bool = False, has_max_characters: bool = False) -> ClientTool:
    """Return a version of the editor. Those that can undo read the text to insert from ``new_str``."""
    commands = ["view", "create", "str_replace", "insert"]
    properties = {
        "path": _text("The absolute path of the file; for view also of a folder."),
        "view_range": VIEW_RANGE,
        "file_text": FILE_TEXT,
        "old_str": OLD_TEXT,
        "new_str": NEW_TEXT,
        "insert_line": INSERT_LINE,
        "insert_text": INSERTED_TEXT,
    }
    if can_undo:
        commands.append("undo_edit")
        del properties["insert_text"]
        properties["new_str"] = _text("str_replace: the text in its place. insert: the text to insert.")
    return ClientTool(
        name,
        "Shows, creates and edits text files, and lists folders." + " undo_edit takes back the last edit." * can_undo,
        _object({"command": _command(*commands), **properties}, ["command", "path"]),
        has_max_characters,
    )


MEMORY = ClientTool(
    "memory",
    "Keeps notes in files below /memories, which outlast this conversation. Look at the folder first, and write down "
    "what a later conversation should know.",
    _object(
        {
            "command": _command("view", "create", "str_replace", "insert", "delete", "rename"),
            "path": _text("The path of the file, below /memories; for view and delete also of a folder."),
            "view_range": VIEW_RANGE,
            "file_text": FILE_TEXT,
            "old_str": OLD_TEXT,
            "new_str": NEW_TEXT,
            "insert_line": INSERT_LINE,
            "insert_text": INSERTED_TEXT,
            "old_path": _text("rename: the present path."),
            "new_path": _text("rename: the path from then on."),
        },
        ["command"],
    ),
)

CLIENT_TOOLS = {
    "bash_20241022": BASH,
    "bash_20250124": BASH,
    "text_editor_20241022": _editor("str_replace_editor", can_undo=True),
    "text_editor_20250124": _editor("str_replace_editor", can_undo=True),
    "text_editor_20250429": _editor("str_replace_based_edit_tool"),
    "text_editor_20250728": _editor("str_replace_based_edit_tool", has_max_characters=True),
    "memory_20250818": MEMORY,
}
