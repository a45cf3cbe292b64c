"""Are the pages of two instances alike? Their layouts name all that decides the bytes (``model/layout``). Pure."""

from __future__ import annotations

from collections.abc import Sequence


def difference(theirs: str, ours: str, their_sizes: Sequence[int] = (), our_sizes: Sequence[int] = ()) -> str:
    """In what pages of two layouts differ, in words; empty if one side can use those of the other.

    ``their_sizes``, ``our_sizes``: bytes of a page in each region, where they are known.
    """
    if theirs != ours:
        one, two = (_named(layout) for layout in (theirs, ours))
        names = [name for name in one | two if one.get(name) != two.get(name)]
        return ", ".join(f"{name} {one.get(name, 'unknown')} and {two.get(name, 'unknown')}" for name in names)
    if len(their_sizes) != len(our_sizes):
        return f"{len(their_sizes)} and {len(our_sizes)} regions"
    unlike = [(i, a, b) for i, (a, b) in enumerate(zip(their_sizes, our_sizes, strict=True)) if a != b]
    return ", ".join(f"{a} and {b} bytes in region {i}" for i, a, b in unlike[:3])


def _named(layout: str) -> dict[str, str]:
    """The parts of a layout, which is ``name=value;…`` or one word."""
    parts = (part.rpartition("=") for part in layout.split(";"))
    return {name or "layout": value for name, _, value in parts}
