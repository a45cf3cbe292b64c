"""Stop strings against a naive search, under any cut of the text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.answer_parts import split_text

from parley.text.tokens.stop_strings import StopAutomaton, StopScanner

abc_texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=6)


def naive_search(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reference search: the first completed stop string wins, then the longest."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            longest = max(completed, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def scan_pieces(pieces: list[str], stops: list[str], include: bool) -> tuple[list[str], str | None]:
    scanner = StopScanner(StopAutomaton(stops), include)
    out = []
    for piece in pieces:
        out.append(scanner.scan_piece(piece))
        if scanner.matched is not None:
            return out, scanner.matched
    return [*out, scanner.release_held()], None


@given(abc_texts, stop_lists, st.lists(st.integers(1, 6), min_size=1, max_size=8), st.booleans())
@settings(max_examples=200, deadline=None)
def test_stop_scanner_agrees_with_naive_search(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    out, matched = scan_pieces(split_text(text, sizes), stops, include)
    assert ("".join(out), matched) == naive_search(text, stops, include)


@given(abc_texts, stop_lists)
@settings(max_examples=200, deadline=None)
def test_stop_scanner_holds_back_only_possible_prefixes(text: str, stops: list[str]) -> None:
    scanner = StopScanner(StopAutomaton(stops))
    seen = ""
    for end, char in enumerate(text, start=1):
        seen += scanner.scan_piece(char)
        if scanner.matched is not None:
            break
        endings = (size for size in range(end + 1) if any(stop.startswith(text[end - size : end]) for stop in stops))
        assert len(seen) == end - max(endings, default=0)


@given(abc_texts, stop_lists)
@settings(max_examples=100, deadline=None)
def test_stop_scanner_holds_back_nothing_if_stops_are_included(text: str, stops: list[str]) -> None:
    scanner = StopScanner(StopAutomaton(stops), include=True)
    seen = ""
    for end, char in enumerate(text, start=1):
        seen += scanner.scan_piece(char)
        assert seen == text[:end]
        if scanner.matched is not None:
            break


@given(abc_texts, stop_lists, st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_stop_scanner_ignores_matches_before_it_is_armed(text: str, stops: list[str], start: int) -> None:
    scanner = StopScanner(StopAutomaton(stops))
    seen = ""
    for index, char in enumerate(text):
        seen += scanner.scan_piece(char, armed=index >= start)
        if scanner.matched is not None:
            assert index >= start
            assert text[: index + 1] == seen + scanner.matched
            return
    assert seen + scanner.release_held() == text
    assert not any(text[:end].endswith(stop) for stop in stops for end in range(start + 1, len(text) + 1))


def test_stop_scanner_ignores_empty_and_repeated_strings() -> None:
    assert scan_pieces(["abc"], ["", "c", "c"], False) == (["ab"], "c")
    assert scan_pieces(["abc"], [], False) == (["abc", ""], None)


def test_stop_scanner_handles_many_long_strings() -> None:
    stops = ["a" * 31 + chr(0x100 + number) for number in range(1024)]
    text = "a" * 200_000
    out, matched = scan_pieces(split_text(text, [1, 1000]), stops, False)
    assert ("".join(out), matched) == (text, None)
    assert scan_pieces([text, stops[7]], stops, False)[1] == stops[7]
