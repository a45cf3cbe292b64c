"""Compare page layouts of two instances. A layout lists everything that decides the bytes:
``model/load/kv_fingerprint``."""

from __future__ import annotations

from collections.abc import Sequence


def layout_difference(theirs: str, ours: str, their_sizes: Sequence[int] = (), our_sizes: Sequence[int] = ()) -> str:
    """Return in words how pages of two layouts differ; "" if each side can use the pages of the other.

    ``their_sizes``, ``our_sizes``: bytes of a page in each region, if known.
    """
    if theirs != ours:
        their_parts, our_parts = (_parse_layout(layout) for layout in (theirs, ours))
        names = [name for name in their_parts | our_parts if their_parts.get(name) != our_parts.get(name)]
        return ", ".join(
            f"{name} {their_parts.get(name, 'unknown')} and {our_parts.get(name, 'unknown')}" for name in names
        )
    if len(their_sizes) != len(our_sizes):
        return f"{len(their_sizes)} and {len(our_sizes)} regions"
    differences = [
        f"{their_size} and {our_size} bytes in region {number}"
        for number, (their_size, our_size) in enumerate(zip(their_sizes, our_sizes, strict=True))
        if their_size != our_size
    ]
    return ", ".join(differences[:3])


def _parse_layout(layout: str) -> dict[str, str]:
    """Return the parts of a layout, which is ``name=value;…`` or one word, by name."""
    parts = (part.rpartition("=") for part in layout.split(";"))
    return {name or "layout": value for name, _, value in parts}
