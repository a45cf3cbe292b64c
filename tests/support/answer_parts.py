"""The parts that an output parser reads from a text in pieces, with a check of the form of each event."""

from __future__ import annotations

import itertools

from parley.text.parsing.harmony_parser import HarmonyParser
from parley.text.parsing.output_parser import OutputParser

AnswerParts = tuple[str, str, list[tuple[str, str]]]


def split_text(text: str, sizes: list[int]) -> list[str]:
    """Split the text into pieces of these sizes, which repeat."""
    pieces, lengths = [], itertools.cycle(sizes)
    while text:
        length = next(lengths)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def parse_pieces(parser: OutputParser | HarmonyParser, pieces: list[str]) -> AnswerParts:
    """Feed the pieces to a parser; return (reasoning, content, [(name, arguments)])."""
    texts = {"reasoning": "", "content": ""}
    calls: list[tuple[str, str]] = []
    for part, text, call in [
        event for piece in pieces for event in parser.parse_piece(piece)
    ] + parser.finish_parsing():
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
    assert parser.call_count == len(calls)
    return texts["reasoning"], texts["content"], calls
