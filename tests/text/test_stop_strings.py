"""Stop strings against a naive search, under any cut of the text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.answer_parts import cut

from parley.text import Scanner, Stops

letters = st.text("abc", max_size=30)
strings = st.lists(st.text("abc", min_size=1, max_size=5), max_size=6)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reference search: the first completed stop string wins, then the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def scan(pieces: list[str], stops: list[str], include: bool) -> tuple[list[str], str | None]:
    scanner = Scanner(Stops(stops), include)
    out = []
    for piece in pieces:
        out.append(scanner.push(piece))
        if scanner.matched is not None:
            return out, scanner.matched
    return [*out, scanner.flush()], None


@given(letters, strings, st.lists(st.integers(1, 6), min_size=1, max_size=8), st.booleans())
@settings(max_examples=200, deadline=None)
def test_stop_scanner_agrees_with_naive_search(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    out, matched = scan(cut(text, sizes), stops, include)
    assert ("".join(out), matched) == naive(text, stops, include)


@given(letters, strings)
@settings(max_examples=200, deadline=None)
def test_stop_scanner_holds_back_only_possible_prefixes(text: str, stops: list[str]) -> None:
    scanner = Scanner(Stops(stops))
    seen = ""
    for end, char in enumerate(text, start=1):
        seen += scanner.push(char)
        if scanner.matched is not None:
            break
        endings = (size for size in range(end + 1) if any(stop.startswith(text[end - size : end]) for stop in stops))
        assert len(seen) == end - max(endings, default=0)


@given(letters, strings)
@settings(max_examples=100, deadline=None)
def test_stop_scanner_holds_back_nothing_if_stops_are_included(text: str, stops: list[str]) -> None:
    scanner = Scanner(Stops(stops), include=True)
    seen = ""
    for end, char in enumerate(text, start=1):
        seen += scanner.push(char)
        assert seen == text[:end]
        if scanner.matched is not None:
            break


@given(letters, strings, st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_stop_scanner_ignores_matches_before_it_is_armed(text: str, stops: list[str], start: int) -> None:
    scanner = Scanner(Stops(stops))
    seen = ""
    for index, char in enumerate(text):
        seen += scanner.push(char, armed=index >= start)
        if scanner.matched is not None:
            assert index >= start
            assert text[: index + 1] == seen + scanner.matched
            return
    assert seen + scanner.flush() == text
    assert not any(text[:end].endswith(stop) for stop in stops for end in range(start + 1, len(text) + 1))


def test_stop_scanner_ignores_empty_and_repeated_strings() -> None:
    assert scan(["abc"], ["", "c", "c"], False) == (["ab"], "c")
    assert scan(["abc"], [], False) == (["abc", ""], None)


def test_stop_scanner_handles_many_long_strings() -> None:
    stops = ["a" * 31 + chr(0x100 + number) for number in range(1024)]
    text = "a" * 200_000
    out, matched = scan(cut(text, [1, 1000]), stops, False)
    assert ("".join(out), matched) == (text, None)
    assert scan([text, stops[7]], stops, False)[1] == stops[7]
