"""The members of Anthropic's toolset for a browser, with the schemas of their arguments.

https://platform.claude.com/docs/en/agents-and-tools/tool-use/browser-use-tool
"""

from __future__ import annotations

from parley.dialects.anthropic.client_tools import SCROLL_DIRECTIONS, ZOOM
from parley.dialects.client_tools import JsonSchema, closed_schema, number_schema, text_schema

Members = dict[str, tuple[str, JsonSchema]]  # description and schema, by name

MAX_SECONDS = 30
SECONDS: JsonSchema = {"type": "number", "minimum": 0, "maximum": MAX_SECONDS, "description": "Seconds, at most 30."}
TAB = {"tab_id": text_schema("The tab; the active one if absent.")}
PLACE = closed_schema(
    {
        "type": {"type": "string", "enum": ["coordinate"]},
        "x": number_schema("Pixels from the left edge of the view."),
        "y": number_schema("Pixels from its upper edge."),
    },
    ["type", "x", "y"],
)
ELEMENT = closed_schema(
    {
        "type": {"type": "string", "enum": ["ref"]},
        "ref": text_schema("What read_page or find call the element, such as ref_7."),
    },
    ["type", "ref"],
)
TARGET: JsonSchema = {"anyOf": [PLACE, ELEMENT]}
MODIFIERS = text_schema("Keys to hold meanwhile, such as shift or ctrl+shift.")
# A request has to enable them.
DISABLED_MEMBERS = frozenset(("file_upload", "read_console", "read_network", "javascript_exec"))


def _member(description: str, properties: dict[str, JsonSchema], required: list[str]) -> tuple[str, JsonSchema]:
    """Return a member that acts on a tab."""
    return description, closed_schema(properties | TAB, required)


def _click(description: str) -> tuple[str, JsonSchema]:
    return _member(description, {"target": TARGET, "modifiers": MODIFIERS}, ["target"])


BROWSER_MEMBERS: Members = {
    "navigate": _member(
        "Opens an address, or goes back, forward or reloads.",
        {"url": text_schema("The address, or back, forward or reload.")},
        ["url"],
    ),
    "list_tabs": ("Lists the open tabs with their ids, titles and addresses.", closed_schema({}, [])),
    "new_tab": ("Opens an empty tab, and returns its id.", closed_schema({}, [])),
    "switch_tab": (
        "Makes a tab the active one, on which actions without a tab_id act.",
        closed_schema({"tab_id": text_schema("The tab.")}, ["tab_id"]),
    ),
    "close_tab": ("Closes a tab.", closed_schema({"tab_id": text_schema("The tab.")}, ["tab_id"])),
    "read_page": _member(
        "Returns the elements of the page as a tree, with references to act on them.",
        {
            "filter": {
                "type": "string",
                "enum": ["all", "interactive"],
                "description": "interactive: only elements to act on. all: also those outside the view.",
            },
            "depth": number_schema("How deep the tree is at most; 15 if absent.", 1),
            "ref": text_schema("The element to begin with; the whole page if absent."),
        },
        [],
    ),
    "get_page_text": _member("Returns the visible text of the page, as of an article.", {}, []),
    "read_console": _member("Returns what the page wrote to the console since the last call.", {}, []),
    "read_network": _member("Returns the page's network requests since the last call.", {}, []),
    "find": _member(
        "Finds up to 20 elements by a description, and returns references to them.",
        {"query": text_schema("What to find, such as: the search bar.")},
        ["query"],
    ),
    "form_input": _member(
        "Sets the value of a field of a form.",
        {
            "target": ELEMENT,
            "value": {
                "anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}],
                "description": "A boolean for a checkbox, the value or text of an option for a list.",
            },
        },
        ["target", "value"],
    ),
    "file_upload": _member(
        "Sets the files of a field for files, by paths or document_ids.",
        {
            "target": ELEMENT,
            "paths": {"type": "array", "items": {"type": "string"}, "description": "Paths where the browser runs."},
            "document_ids": {"type": "array", "items": {"type": "string"}, "description": "Files that are staged."},
        },
        ["target"],
    ),
    "scroll_to": _member("Scrolls an element into the view.", {"target": ELEMENT}, ["target"]),
    "screenshot": _member("Takes a screenshot of the view.", {}, []),
    "zoom": _member(
        "Takes a screenshot of a part of the view, enlarged.",
        {"region": ZOOM | {"description": "The left, upper, right and lower edge of the part, in pixels."}},
        ["region"],
    ),
    "left_click": _click("Clicks with the left button of the mouse."),
    "right_click": _click("Clicks with the right button of the mouse."),
    "middle_click": _click("Clicks with the middle button of the mouse."),
    "double_click": _click("Clicks twice with the left button of the mouse."),
    "triple_click": _click("Clicks three times with the left button of the mouse, which selects a paragraph."),
    "hover": _member("Moves the pointer to a place or an element without a click.", {"target": TARGET}, ["target"]),
    "left_click_drag": _member(
        "Drags with the left button of the mouse.", {"from": PLACE, "target": PLACE}, ["from", "target"]
    ),
    "left_mouse_down": _member("Presses the left button of the mouse, and holds it.", {"target": PLACE}, ["target"]),
    "left_mouse_up": _member("Releases the left button of the mouse.", {"target": PLACE}, ["target"]),
    "mouse_move": _member("Moves the pointer to a place without a click.", {"target": PLACE}, ["target"]),
    "scroll": _member(
        "Turns the wheel of the mouse.",
        {
            "target": PLACE,
            "scroll_direction": {"type": "string", "enum": list(SCROLL_DIRECTIONS)},
            "scroll_amount": {
                "type": "integer",
                "minimum": 1,
                "maximum": 10,
                "description": "The clicks of the wheel; 3 if absent.",
            },
        },
        ["target", "scroll_direction"],
    ),
    "type": _member("Types a text where the focus is.", {"text": text_schema("The text.")}, ["text"]),
    "key": _member(
        "Presses keys: one, several together such as ctrl+a, or one after another with spaces between them.",
        {"text": text_schema("The keys."), "repeat": number_schema("How often; once if absent.", 1)},
        ["text"],
    ),
    "hold_key": _member(
        "Holds a key or several together.",
        {"text": text_schema("The keys."), "duration": SECONDS},
        ["text", "duration"],
    ),
    "wait": _member("Waits.", {"duration": SECONDS}, ["duration"]),
    "javascript_exec": _member(
        "Runs JavaScript in the page, and returns the value of its last expression.",
        {"text": text_schema("The code, without return.")},
        ["text"],
    ),
}
