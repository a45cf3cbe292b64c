"""What a parser of answers makes of a text that is cut into pieces, and a check of the events' form on the way."""

from __future__ import annotations

import itertools

from parley.text import Regions
from parley.text.parsing.harmony_parser import Channels

Parts = tuple[str, str, list[tuple[str, str]]]


def cut(text: str, sizes: list[int]) -> list[str]:
    """The text in pieces of these sizes, over and over."""
    pieces, size = [], itertools.cycle(sizes)
    while text:
        at = next(size)
        pieces.append(text[:at])
        text = text[at:]
    return pieces


def read(parser: Regions | Channels, pieces: list[str]) -> Parts:
    """(reasoning, content, [(name, arguments)])"""
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
