"""Merges the answers of several instances into one: Triton's statistics, model lists, and the data of the status page.
Pure: JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import msgspec

IDENTIFYING_MEMBERS = ("name", "batch_size")  # members that identify an entry of a list
LATEST_MEMBER = "last_inference"  # a time; the latest one counts


class ActivityMembers(msgspec.Struct):
    """The members of a status page's data that are merged."""

    phase: str
    models: list[dict[str, Any]]
    request_count: int
    requests: list[Any]


def sum_pages(pages: Iterable[bytes]) -> bytes:
    """Return one JSON page with the sums of all numbers; entries of lists are matched by their names.

    Raises msgspec.MsgspecError or UnicodeDecodeError for pages that are not JSON.
    """
    return msgspec.json.encode(reduce(_merge_values, map(msgspec.json.decode, pages)))


def unite_lists(pages: Iterable[bytes]) -> bytes:
    """Return the first JSON page, a list or an object with lists, extended by the entries of other pages with new ids.

    Raises msgspec.MsgspecError or UnicodeDecodeError for pages that are not JSON.
    """
    first, *other_answers = map(msgspec.json.decode, pages)
    if isinstance(first, list):
        lists = {"": first}, *({"": other} for other in other_answers)
        return msgspec.json.encode(_extend_lists(*lists)[""])
    return msgspec.json.encode(_extend_lists(first, *other_answers))


def _extend_lists(first: Any, *other_answers: Any) -> Any:
    for name, entries in first.items() if isinstance(first, dict) else ():
        for other in other_answers if isinstance(entries, list) else ():
            known_ids = set(map(_entry_id, entries))
            more_entries = other.get(name) if isinstance(other, dict) else None
            entries += (
                [entry for entry in more_entries if _entry_id(entry) not in known_ids]
                if isinstance(more_entries, list)
                else []
            )
    return first


def merge_activity(pages: Iterable[bytes]) -> bytes:
    """Merge the data of all instances' status pages: their models, each with the number of the instance if
    there are several, and the requests under way.

    Raises msgspec.MsgspecError or UnicodeDecodeError for pages that are not JSON, or lack a member that is merged.
    """
    states: list[dict[str, Any]] = [msgspec.json.decode(page, type=dict) for page in pages]
    merged = states[0]
    if len(states) > 1:
        members = [msgspec.convert(state, ActivityMembers) for state in states]
        merged["role"] = "mixed"
        merged["phase"] = next((state.phase for state in members if state.phase != "ready"), "ready")
        merged["models"] = [
            model | {"instance": number} for number, state in enumerate(members, 1) for model in state.models
        ]
        merged["request_count"] = sum(state.request_count for state in members)
        merged["requests"] = [request for state in members for request in state.requests]
    return msgspec.json.encode(merged)


def _entry_id(entry: Any) -> str:
    """Return the id of an entry in a list of models, or its name in APIs without ids."""
    return str(entry.get("id", entry.get("name")) if isinstance(entry, dict) else entry)


def _merge_values(left: Any, right: Any) -> Any:
    if isinstance(left, dict) and isinstance(right, dict):
        return {
            **right,
            **left,
            **{name: _merge_member(name, left[name], right[name]) for name in left if name in right},
        }
    if isinstance(left, list) and isinstance(right, list):
        merged = {_entry_name(entry): entry for entry in left}
        for entry in right:
            name = _entry_name(entry)
            merged[name] = _merge_values(merged[name], entry) if name in merged else entry
        return list(merged.values())
    return left + right if _are_numbers(left, right) else left


def _merge_member(name: str, left: Any, right: Any) -> Any:
    if name == LATEST_MEMBER and _are_numbers(left, right):
        return max(left, right)
    return left if name in IDENTIFYING_MEMBERS else _merge_values(left, right)


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(number, int | float) and not isinstance(number, bool) for number in values)


def _entry_name(entry: Any) -> Any:
    entry_members = entry if isinstance(entry, dict) else {}
    return next((str(entry_members[name]) for name in IDENTIFYING_MEMBERS if name in entry_members), str(entry))
