"""Merges the answers of several instances into one: Triton's statistics, and model lists. Pure: JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import msgspec

NAMES = ("name", "batch_size")  # members that identify an entry of a list
LATEST = "last_inference"  # a time; the latest one counts


def add(pages: Iterable[bytes]) -> bytes:
    """Return one JSON page with the sums of all numbers; entries of lists are matched by their names.

    Raises msgspec.MsgspecError or UnicodeDecodeError for pages that are not JSON.
    """
    return msgspec.json.encode(reduce(_both, map(msgspec.json.decode, pages)))


def unite(pages: Iterable[bytes]) -> bytes:
    """Return the first JSON page, its lists extended by the entries of other pages with new ids.

    Raises msgspec.MsgspecError or UnicodeDecodeError for pages that are not JSON.
    """
    first, *others = map(msgspec.json.decode, pages)
    for name, entries in first.items() if isinstance(first, dict) else ():
        for other in others if isinstance(entries, list) else ():
            known = set(map(_id, entries))
            more = other.get(name) if isinstance(other, dict) else None
            entries += [entry for entry in more if _id(entry) not in known] if isinstance(more, list) else []
    return msgspec.json.encode(first)


def _id(entry: Any) -> str:
    return str(entry.get("id") if isinstance(entry, dict) else entry)


def _both(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {**other, **one, **{name: _member(name, one[name], other[name]) for name in one if name in other}}
    if isinstance(one, list) and isinstance(other, list):
        made = {_name(entry): entry for entry in one}
        for entry in other:
            name = _name(entry)
            made[name] = _both(made[name], entry) if name in made else entry
        return list(made.values())
    return one + other if _numbers(one, other) else one


def _member(name: str, one: Any, other: Any) -> Any:
    if name == LATEST and _numbers(one, other):
        return max(one, other)
    return one if name in NAMES else _both(one, other)


def _numbers(*values: Any) -> bool:
    return all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)


def _name(entry: Any) -> Any:
    named = entry if isinstance(entry, dict) else {}
    return next((str(named[name]) for name in NAMES if name in named), str(entry))
