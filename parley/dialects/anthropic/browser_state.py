"""The state of a browser in the result of a call of its toolset, as a text for the model."""

from __future__ import annotations

from collections.abc import Iterator

from parley.dialects.anthropic.api_rules import AnthropicRules
from parley.dialects.anthropic.refusal_wording import check_anthropic_members
from parley.dialects.fields import Fields

MAX_TABS = 1000
MAX_CHANGES = 1000
MAX_ID = 256  # characters
STATE_MEMBERS = {"type", "tabs", "state_changes", "cache_control"}
TAB_MEMBERS = {"tab_id", "title", "url", "active"}
# What a change is called, and its members, by its type.
CHANGES = {
    "tab_opened": ("Opened tab", {"type", "tab_id"}),
    "download_started": ("Started download", {"type", "download_id", "url"}),
    "download_completed": ("Completed download", {"type", "download_id", "url", "path", "size_bytes"}),
    "download_failed": ("Failed download", {"type", "download_id", "url", "error"}),
}


def read_browser_state(block: Fields, rules: AnthropicRules) -> str:
    """Return a line for each open tab, and one for each change. Raises BadRequest."""
    check_anthropic_members(block, STATE_MEMBERS, rules, "browser_state")
    if not block.has_value("tabs"):
        raise block.missing_member("tabs")
    tabs = [_tab_line(tab, rules) for tab in block.objects("tabs", cap=MAX_TABS)]
    changes = [_change_line(change, rules) for change in block.objects("state_changes", cap=MAX_CHANGES)]
    return "\n".join(["Open tabs:" if tabs else "No tab is open.", *tabs, *changes])


def _tab_line(tab: Fields, rules: AnthropicRules) -> str:
    check_anthropic_members(tab, TAB_MEMBERS, rules)
    tab_id, title, url = (_required_text(tab, name) for name in ("tab_id", "title", "url"))
    mark = " (active)" if tab.boolean("active", False) else ""
    return f"{tab_id}{mark}: {title} <{url}>"


def _change_line(change: Fields, rules: AnthropicRules) -> str:
    kind = change.string("type", None, allowed=tuple(CHANGES))
    if kind is None:
        raise change.missing_member("type")
    name, members = CHANGES[kind]
    check_anthropic_members(change, members, rules, kind)
    return f"{name} {', '.join(_change_details(change, kind))}"


def _change_details(change: Fields, kind: str) -> Iterator[str]:
    if kind == "tab_opened":
        yield _required_text(change, "tab_id")
        return
    yield _required_text(change, "download_id")
    yield _required_text(change, "url")
    detail = "path" if kind == "download_completed" else "error"
    if kind != "download_started" and (text := change.string(detail, None)) is not None:
        yield text
    if kind == "download_completed" and (size := change.integer("size_bytes", None, 0)) is not None:
        yield f"{size} bytes"


def _required_text(fields: Fields, name: str) -> str:
    """Return a text that may be empty."""
    text = fields.string(name, None, cap=MAX_ID if name.endswith("_id") else None)
    if text is None:
        raise fields.missing_member(name)
    return text
