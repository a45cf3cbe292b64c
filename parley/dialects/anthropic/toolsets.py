"""Toolsets that Anthropic defines and clients run: one entry of a request's tools stands for several functions.

The model sees the functions under joined names, because those of the members, such as ``type``, are also names of
other tools. Calls have the member's own name and that of the toolset:
https://platform.claude.com/docs/en/agents-and-tools/tool-use/computer-use-tool
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from parley.dialects.anthropic.api_rules import AnthropicRules
from parley.dialects.anthropic.browser_members import BROWSER_MEMBERS, DISABLED_MEMBERS, Members
from parley.dialects.anthropic.client_tools import POINT, SCROLL_DIRECTIONS, ZOOM
from parley.dialects.anthropic.refusal_wording import check_anthropic_members
from parley.dialects.client_tools import ClientTool, JsonSchema, closed_schema, number_schema, text_schema
from parley.dialects.fields import Fields

ENTRY_MEMBERS = {"type", "configs", "cache_control"}
CONFIG_MEMBERS = {"enabled", "defer_loading"}


class ToolsetMember(NamedTuple):
    """A tool of a toolset, under the names that clients know."""

    name: str
    toolset: str


class Toolset(NamedTuple):
    """A toolset with its members by their names. ``disabled``: those that a request has to enable."""

    name: str
    members: dict[str, ClientTool]
    disabled: frozenset[str]


class ToolsetTool(NamedTuple):
    """A member that a request offers. ``is_deferred``: the model does not see it before a search has found it."""

    function: dict[str, Any]
    member: ToolsetMember
    is_deferred: bool


def joined_tool_name(toolset: str, name: str) -> str:
    """Return the model's name for a member of a toolset."""
    return f"{toolset}_{name}"


def read_toolset(entry: Fields, kind: str, rules: AnthropicRules) -> Iterator[ToolsetTool]:
    """Yield the members of a toolset that its entry does not disable. Raises BadRequest."""
    check_anthropic_members(entry, ENTRY_MEMBERS, rules, kind)
    toolset = TOOLSETS[kind]
    disabled, deferred = _read_configs(entry, toolset, rules)
    for name, tool in toolset.members.items():
        if name not in disabled:
            member = ToolsetMember(name, toolset.name)
            yield ToolsetTool(tool.signature() | {"strict": True}, member, name in deferred)


def _read_configs(entry: Fields, toolset: Toolset, rules: AnthropicRules) -> tuple[set[str], set[str]]:
    """Return the members that an entry does not enable, and those that it defers. Raises BadRequest."""
    disabled = set(toolset.disabled)
    deferred: set[str] = set()
    configs = entry.object("configs")
    if configs is None:
        return disabled, deferred
    for name in configs.member_names:
        if name not in toolset.members:
            raise configs.member_error(name, "Extra inputs are not permitted")
        config = configs.object(name)
        if config is None:
            continue
        check_anthropic_members(config, CONFIG_MEMBERS, rules)
        if config.boolean("enabled", name not in toolset.disabled):
            disabled.discard(name)
        else:
            disabled.add(name)
        if config.boolean("defer_loading", False):
            deferred.add(name)
    return disabled, deferred


def _member(description: str, properties: dict[str, JsonSchema], required: list[str]) -> tuple[str, JsonSchema]:
    return description, closed_schema(properties, required)


PLACE = POINT | {"description": "Pixels from the left and the upper edge; the pointer's place if there is none."}
HELD_KEYS = text_schema("Keys to hold meanwhile, such as ctrl or ctrl+shift.")
SECONDS = number_schema("Seconds.", 1)


def _click(description: str) -> tuple[str, JsonSchema]:
    return _member(description, {"coordinate": PLACE, "text": HELD_KEYS}, [])


COMPUTER_MEMBERS: Members = {
    "screenshot": _member("Takes a screenshot.", {}, []),
    "zoom": _member(
        "Takes a screenshot of a part of the screen, enlarged.",
        {"region": ZOOM | {"description": "The left, upper, right and lower edge of the part, in pixels."}},
        ["region"],
    ),
    "cursor_position": _member("Returns the place of the pointer in pixels.", {}, []),
    "mouse_move": _member(
        "Moves the pointer without a click.", {"coordinate": POINT | {"description": "Where to."}}, ["coordinate"]
    ),
    "left_click": _click("Clicks with the left button of the mouse."),
    "right_click": _click("Clicks with the right button of the mouse."),
    "middle_click": _click("Clicks with the middle button of the mouse."),
    "double_click": _click("Clicks twice with the left button of the mouse."),
    "triple_click": _click("Clicks three times with the left button of the mouse."),
    "left_click_drag": _member(
        "Drags with the left button of the mouse from start_coordinate to coordinate.",
        {
            "start_coordinate": POINT | {"description": "Where it begins, in pixels."},
            "coordinate": POINT | {"description": "Where it ends, in pixels."},
            "text": HELD_KEYS,
        },
        ["start_coordinate", "coordinate"],
    ),
    "left_mouse_down": _member("Presses the left button of the mouse, and holds it.", {}, []),
    "left_mouse_up": _member("Releases the left button of the mouse.", {}, []),
    "scroll": _member(
        "Turns the wheel of the mouse.",
        {
            "scroll_direction": {"type": "string", "enum": list(SCROLL_DIRECTIONS)},
            "scroll_amount": number_schema("The clicks of the wheel."),
            "coordinate": PLACE,
            "text": HELD_KEYS,
        },
        ["scroll_direction", "scroll_amount"],
    ),
    "type": _member("Types a text.", {"text": text_schema("The text.")}, ["text"]),
    "key": _member(
        "Presses a key or several together, such as Return or ctrl+s.",
        {"text": text_schema("The keys."), "repeat": number_schema("How often; once if absent.", 1)},
        ["text"],
    ),
    "hold_key": _member(
        "Holds a key or several together.",
        {"text": text_schema("The keys."), "duration": SECONDS},
        ["text", "duration"],
    ),
    "wait": _member("Waits.", {"duration": SECONDS}, ["duration"]),
}


def _toolset(name: str, members: Members, disabled: frozenset[str] = frozenset()) -> Toolset:
    tools = {
        member: ClientTool(joined_tool_name(name, member), description, schema)
        for member, (description, schema) in members.items()
    }
    return Toolset(name, tools, disabled)


TOOLSETS = {
    "computer_toolset_20260801": _toolset("computer", COMPUTER_MEMBERS),
    "browser_toolset_20260801": _toolset("browser", BROWSER_MEMBERS, DISABLED_MEMBERS),
}
