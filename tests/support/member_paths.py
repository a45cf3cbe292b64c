"""The members of a JSON document, to compare answers with documented ones."""

from typing import Any


def member_paths(value: Any, at: str = "") -> set[str]:
    """Return the paths of all members; entries of a list share one path."""
    if isinstance(value, list):
        return set().union(*(member_paths(entry, at) for entry in value))
    if not isinstance(value, dict):
        return set()
    paths = {f"{at}.{name}".strip(".") for name in value}
    return paths.union(*(member_paths(inner, f"{at}.{name}".strip(".")) for name, inner in value.items()))
