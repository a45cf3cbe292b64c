"""Reloading of options: which of them a running process takes over, and which need a restart."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class ReloadedNames(NamedTuple):
    """The names of changed options: those that were taken over, and those that need a restart."""

    changed: list[str]
    unchanged: list[str]

    def describe(self) -> str:
        """Describe the outcome in words for the log."""
        text = f"changed: {', '.join(self.changed) or 'nothing'}"
        return text + (f"; these need a restart: {', '.join(self.unchanged)}" if self.unchanged else "")


def take_over_fields(current: T, new: T, names: Collection[str]) -> tuple[T, ReloadedNames]:
    """Return a copy of a dataclass with the fields ``names`` of another, and the names of all fields that differ."""
    values: Any = new
    old_values: Any = current
    differing = [
        field.name
        for field in fields(values)
        if field.compare and getattr(values, field.name) != getattr(old_values, field.name)
    ]
    changed = [name for name in differing if name in names]
    result: T = replace(old_values, **{name: getattr(values, name) for name in changed})
    return result, ReloadedNames(changed, [name for name in differing if name not in names])
