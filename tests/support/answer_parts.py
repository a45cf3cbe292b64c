"""The parts that an output parser reads from a text in pieces, with a check of the form of each event."""

from __future__ import annotations

import itertools

from parley.text import Regions
from parley.text.parsing.harmony_parser import Channels

Parts = tuple[str, str, list[tuple[str, str]]]


def cut(text: str, sizes: list[int]) -> list[str]:
    """Split the text into pieces of these sizes, which repeat."""
    pieces, size = [], itertools.cycle(sizes)
    while text:
        at = next(size)
        pieces.append(text[:at])
        text = text[at:]
    return pieces


def read(parser: Regions | Channels, pieces: list[str]) -> Parts:
    """Feed the pieces to a parser; return (reasoning, content, [(name, arguments)])."""
    texts = {"reasoning": "", "content": ""}
    calls: list[tuple[str, str]] = []
    for part, text, call in [event for piece in pieces for event in parser.push(piece)] + parser.flush():
        if call is None:
            assert text
            texts[part] += text
            continue
        assert part == "tool" and text == ""
        if call.name is not None:
            assert call.index == len(calls) and call.id and call.arguments == ""
            calls.append((call.name, ""))
        else:
            assert call.index == len(calls) - 1 and call.id is None and call.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert parser.calls == len(calls)
    return texts["reasoning"], texts["content"], calls
