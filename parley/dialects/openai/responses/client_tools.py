"""Tools that OpenAI defines and clients run: a shell, patches of files, and a computer's screen.

A request names only their type, because the original's models know the schemas. Other models see the functions of this
file, whose arguments become the members of items of the tools' own types (``client_calls.py``, ``client_items.py``):
https://developers.openai.com/api/docs/guides/tools
"""

from __future__ import annotations

from typing import Any

from parley.dialects.client_tools import ClientTool, JsonSchema, closed_schema, number_schema, text_schema
from parley.dialects.fields import Fields
from parley.dialects.openai.responses.response_rules import unserved_error

MAX_SKILLS = 1024
MAX_SKILL_TEXT = 65536  # characters of a member of a skill
MAX_DISPLAY_PIXELS = 1 << 16
OPERATIONS = ("create_file", "update_file", "delete_file")
DISPLAYS = ("windows", "mac", "linux", "ubuntu", "browser")
HOSTED_SHELLS = ("container_auto", "container_reference")
BUTTONS = ("left", "right", "wheel", "back", "forward")

SHELL = ClientTool(
    "shell",
    "Runs shell commands on the user's machine, and returns what each has printed and its exit code.",
    closed_schema(
        {
            "commands": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "description": "The commands, each a line for the shell. All of them may run at the same time.",
            },
            "timeout_ms": number_schema("The milliseconds after which the commands are stopped.", 1),
            "max_output_length": number_schema("The most characters of output to return.", 1),
        },
        ["commands"],
    ),
)
LOCAL_SHELL = ClientTool(
    "local_shell",
    "Runs a command on the user's machine, and returns what it has printed.",
    closed_schema(
        {
            "command": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "description": 'The program and its arguments, such as ["bash", "-lc", "ls *.py"].',
            },
            "working_directory": text_schema("The folder in which the command runs."),
            "env": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "Variables of the command's environment.",
            },
            "timeout_ms": number_schema("The milliseconds after which the command is stopped.", 1),
            "user": text_schema("The user as whom the command runs."),
        },
        ["command"],
    ),
)
APPLY_PATCH = ClientTool(
    "apply_patch",
    "Creates, updates or deletes a text file by a diff without line numbers. create_file: each line of the diff is a "
    "line of the new file after a '+'. update_file: the diff has a section for each place to change. A section begins "
    "with '@@', optionally with a space and a line of the file above the place, such as '@@ def main():'. Then come "
    "the lines of the file there in their order: after a ' ' those that stay, after a '-' those to remove, after a '+' "
    "those to add. About three lines that stay, before and after, make the place unique. delete_file: the diff is "
    "empty.",
    closed_schema(
        {
            "type": {"type": "string", "enum": list(OPERATIONS), "description": "What to do."},
            "path": text_schema("The path of the file, relative to the workspace."),
            "diff": text_schema("The diff."),
        },
        ["type", "path", "diff"],
    ),
)


def _action(name: str, required: dict[str, JsonSchema], *, may_hold_keys: bool = False) -> JsonSchema:
    """Return the schema of one action on a screen."""
    keys = {"keys": KEYS | {"description": "Keys to hold meanwhile."}} if may_hold_keys else {}
    return closed_schema({"type": {"const": name}} | required | keys, ["type", *required])


KEYS: JsonSchema = {"type": "array", "items": {"type": "string"}, "minItems": 1}
PIXEL: JsonSchema = {"type": "integer", "minimum": 0}
DISTANCE: JsonSchema = {"type": "integer"}
POINT = {"x": PIXEL, "y": PIXEL}
ACTIONS: JsonSchema = {
    "anyOf": [
        _action("screenshot", {}),
        _action("click", POINT | {"button": {"type": "string", "enum": list(BUTTONS)}}, may_hold_keys=True),
        _action("double_click", POINT, may_hold_keys=True),
        _action("move", POINT, may_hold_keys=True),
        _action(
            "drag",
            {"path": {"type": "array", "items": closed_schema(POINT, ["x", "y"]), "minItems": 2}},
            may_hold_keys=True,
        ),
        _action("scroll", POINT | {"scroll_x": DISTANCE, "scroll_y": DISTANCE}, may_hold_keys=True),
        _action("type", {"text": {"type": "string"}}),
        _action("keypress", {"keys": KEYS}),
        _action("wait", {}),
    ]
}
COMPUTER_TEXT = (
    "Uses the mouse, the keyboard and the screen of a computer, and returns a screenshot. Places are in pixels from "
    "the left and the upper edge. Begin with a screenshot."
)
COMPUTER = ClientTool(
    "computer",
    COMPUTER_TEXT,
    closed_schema(
        {"actions": {"type": "array", "items": ACTIONS, "minItems": 1, "description": "What to do, in order."}},
        ["actions"],
    ),
)
COMPUTER_PREVIEW = ClientTool(
    "computer",
    COMPUTER_TEXT,
    closed_schema({"action": ACTIONS | {"description": "What to do."}}, ["action"]),
)
CLIENT_TOOLS = {
    "shell": SHELL,
    "local_shell": LOCAL_SHELL,
    "apply_patch": APPLY_PATCH,
    "computer": COMPUTER,
    "computer_use_preview": COMPUTER_PREVIEW,
}
# A client's own search has the client's description and schema; these stand in for absent ones.
TOOL_SEARCH = ClientTool(
    "tool_search",
    "Searches for tools that are not shown yet, and makes those that it finds available.",
    closed_schema({"query": text_schema("What the tools should do.")}, ["query"]),
)
SCREEN_TOOLS = ("computer", "computer_use_preview")
CHOICE_ALIASES = {"computer_use": "computer"}


def read_client_tool(tool: Fields, kind: str, *, reads_images: bool) -> dict[str, Any]:
    """Return the function for a tool that clients run. Raises BadRequest.

    ``reads_images``: whether the model does, which a screen needs.
    """
    note = ""
    if kind == "shell":
        note = _read_environment(tool)
    elif kind in SCREEN_TOOLS and not reads_images:
        path = tool.member_path("type")
        raise unserved_error(f"'{path}' is '{kind}', but this model reads text only, no screenshots.", path)
    elif kind == "computer_use_preview":
        note = _read_display(tool)
    return CLIENT_TOOLS[kind].signature(note) | {"strict": True}  # so that the items of calls are complete


def _read_environment(tool: Fields) -> str:
    """Return sentences about the skills of a shell, which the client has as folders. Raises BadRequest."""
    environment = tool.object("environment")
    if environment is None:
        return ""
    kind = environment.string("type", "local", allowed=("local", *HOSTED_SHELLS))
    if kind in HOSTED_SHELLS:
        path = environment.member_path("type")
        raise unserved_error(
            f"'{path}' is '{kind}', but this server has no containers. 'local' is available, which the client runs.",
            path,
        )
    lines = [
        "- {name}: {description} (in {path})".format_map({name: _skill_text(skill, name) for name in SKILL_MEMBERS})
        for skill in environment.objects("skills", cap=MAX_SKILLS)
    ]
    heading = " The machine has folders with instructions. Read SKILL.md in one before a task that it is for:\n"
    return heading + "\n".join(lines) if lines else ""


SKILL_MEMBERS = ("name", "description", "path")


def _skill_text(skill: Fields, name: str) -> str:
    text = skill.string(name, None, cap=MAX_SKILL_TEXT)
    if text is None:
        raise skill.missing_member(name)
    return text


def _read_display(tool: Fields) -> str:
    """Return a sentence about the screen of a computer. Raises BadRequest."""
    for name in ("display_width", "display_height", "environment"):
        if not tool.has_value(name):
            raise tool.missing_member(name)
    width, height = (tool.integer(f"display_{side}", 0, 1, MAX_DISPLAY_PIXELS) for side in ("width", "height"))
    environment = tool.string("environment", "", allowed=DISPLAYS)
    system = "It shows a browser" if environment == "browser" else f"Its system is {environment}"
    return f" The screen is {width} pixels wide and {height} pixels high. {system}."
