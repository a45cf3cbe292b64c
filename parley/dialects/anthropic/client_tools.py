"""Tools that Anthropic defines and clients run: a shell, an editor of files, a memory of files, a computer's screen.

A request names only their type, because the original's models know the schemas. Other models need them, so they are
written here, with the members that clients of these tools read:
https://platform.claude.com/docs/en/agents-and-tools/tool-use/overview
"""

from __future__ import annotations

from dataclasses import dataclass

from parley.dialects.client_tools import ClientTool, JsonSchema, object_schema, text_schema


@dataclass(frozen=True, slots=True)
class AnthropicClientTool(ClientTool):
    """One tool.

    * ``name``: the only one that the original accepts.
    * ``has_max_characters``: whether a client may say how much of a file it shows.
    * ``has_display``: whether a client has to give the size of its screen.
    * ``has_zoom``: whether a client may offer to enlarge a part of its screen.
    """

    has_max_characters: bool = False
    has_display: bool = False
    has_zoom: bool = False


def _command_schema(*names: str) -> JsonSchema:
    return {"type": "string", "enum": list(names), "description": "What to do."}


EDIT_PROPERTIES: dict[str, JsonSchema] = {  # of commands that show and change a file
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 2,
        "maxItems": 2,
        "description": "view: the first and the last line, counted from 1; -1 as the last line is the end of the file.",
    },
    "file_text": text_schema("create: the whole text of the file."),
    "old_str": text_schema("str_replace: the text to replace, exactly as in the file, where it must occur once."),
    "new_str": text_schema("str_replace: the text in its place."),
    "insert_line": {
        "type": "integer",
        "minimum": 0,
        "description": "insert: the line after which the text is inserted; 0 is the beginning of the file.",
    },
    "insert_text": text_schema("insert: the text to insert."),
}

BASH = AnthropicClientTool(
    "bash",
    "Runs commands in a bash shell that keeps its state from call to call. Give a command, or restart the shell.",
    object_schema(
        {
            "command": text_schema("The command to run. It is needed unless restart is true."),
            "restart": {"type": "boolean", "description": "true starts a new shell."},
        },
        [],
    ),
)


def _editor_tool(name: str, *, can_undo: bool = False, has_max_characters: bool = False) -> AnthropicClientTool:
    """Return a version of the editor. Those that can undo read the text to insert from ``new_str``."""
    commands = ["view", "create", "str_replace", "insert"]
    properties = {
        "path": text_schema("The absolute path of the file; for view also of a folder."),
        **EDIT_PROPERTIES,
    }
    if can_undo:
        commands.append("undo_edit")
        del properties["insert_text"]
        properties["new_str"] = text_schema("str_replace: the text in its place. insert: the text to insert.")
    return AnthropicClientTool(
        name,
        "Shows, creates and edits text files, and lists folders." + " undo_edit takes back the last edit." * can_undo,
        object_schema({"command": _command_schema(*commands), **properties}, ["command", "path"]),
        has_max_characters,
    )


MEMORY = AnthropicClientTool(
    "memory",
    "Keeps notes in files below /memories, which outlast this conversation. Look at the folder first, and write down "
    "what a later conversation should know.",
    object_schema(
        {
            "command": _command_schema("view", "create", "str_replace", "insert", "delete", "rename"),
            "path": text_schema("The path of the file, below /memories; for view and delete also of a folder."),
            **EDIT_PROPERTIES,
            "old_path": text_schema("rename: the present path."),
            "new_path": text_schema("rename: the path from then on."),
        },
        ["command"],
    ),
)

POINT: JsonSchema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}
FIRST_ACTIONS = (
    "key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click",
    "screenshot", "cursor_position",
)  # fmt: skip
SCROLL_DIRECTIONS = ("up", "down", "left", "right")
LATER_ACTIONS = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")
ZOOM: JsonSchema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 4,
    "maxItems": 4,
    "description": "zoom: the left, upper, right and lower edge of the part to enlarge, in pixels.",
}


def _computer_tool(*, has_later_actions: bool, has_zoom: bool = False) -> AnthropicClientTool:
    """Return a version of the computer. Its description ends with the size of the screen, which a request names."""
    actions = [*FIRST_ACTIONS, *(LATER_ACTIONS if has_later_actions else ())]
    properties: dict[str, JsonSchema] = {
        "action": {"type": "string", "enum": actions, "description": "What to do."},
        "coordinate": POINT | {"description": "Pixels from the left and the upper edge, for actions of the mouse."},
        "text": text_schema("type: the text to type. key, hold_key: the key or the keys together, such as ctrl+s."),
    }
    if has_later_actions:
        properties |= {
            "start_coordinate": POINT | {"description": "left_click_drag: where it begins."},
            "scroll_direction": {"type": "string", "enum": list(SCROLL_DIRECTIONS)},
            "scroll_amount": {"type": "integer", "minimum": 0, "description": "scroll: the clicks of the wheel."},
            "duration": {"type": "number", "minimum": 0, "description": "hold_key, wait: seconds."},
        }
    return AnthropicClientTool(
        "computer",
        "Uses the mouse, the keyboard and the screen of a computer. Take a screenshot to see what an action has done.",
        object_schema(properties, ["action"]),
        has_display=True,
        has_zoom=has_zoom,
    )


def with_zoom(schema: JsonSchema) -> JsonSchema:
    """Return the schema of a computer that can enlarge a part of its screen."""
    properties = schema["properties"]
    action = properties["action"] | {"enum": [*properties["action"]["enum"], "zoom"]}
    return schema | {"properties": properties | {"action": action, "region": ZOOM}}


CLIENT_TOOLS = {
    "bash_20241022": BASH,
    "bash_20250124": BASH,
    "text_editor_20241022": _editor_tool("str_replace_editor", can_undo=True),
    "text_editor_20250124": _editor_tool("str_replace_editor", can_undo=True),
    "text_editor_20250429": _editor_tool("str_replace_based_edit_tool"),
    "text_editor_20250728": _editor_tool("str_replace_based_edit_tool", has_max_characters=True),
    "memory_20250818": MEMORY,
    "computer_20241022": _computer_tool(has_later_actions=False),
    "computer_20250124": _computer_tool(has_later_actions=True),
    "computer_20251124": _computer_tool(has_later_actions=True, has_zoom=True),
}
