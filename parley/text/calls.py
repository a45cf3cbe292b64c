"""One tool call as Hermes and Qwen models write it, ``{"name": …, "arguments": {…}}``, read while it arrives.

The name is announced as soon as it is complete; the arguments are passed on exactly as written, piece by piece.
Reading is lenient where models slip (a missing or surplus brace, a line break inside a string) and never evaluates
what it reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from parley.types import CallDelta

Wait = Generator[None, None, None]  # yields when it needs more text than there is
_BLANKS = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r'[^\s,{}\[\]"<]*')
_OUTSIDE = re.compile(r'["{}\[\]<]')  # what matters in a value outside of its strings
_INSIDE = re.compile(r'["\\<\x00-\x1f]')  # and inside of one


class _Malformed(Exception):
    pass


class CallReader:
    """Reads call number ``index`` from just behind its opening mark up to and including the closing ``mark``.

    ``ended``: nothing more belongs to the call. ``announced``: the name is known and was given out. A reader that ended
    without is malformed, and ``raw`` is the text that it consumed.
    """

    def __init__(self, index: int, id: str, mark: str):
        self.ended = False
        self.announced = False
        self._index = index
        self._id = id
        self._mark = mark
        self._raw: list[str] = []
        self._arguments: list[str] | None = None  # not given out yet; None before there are any
        self._inside = False  # the arguments
        self._deltas: list[CallDelta] = []
        self._text = ""
        self._at = 0
        self._run = self._call()

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def read(self, text: str, start: int) -> tuple[int, list[CallDelta]]:
        """Read on from ``start``. Returns how far it came and what is new; the rest is to be given again."""
        self._text, self._at, self._deltas = text, start, []
        try:
            next(self._run)
        except (StopIteration, _Malformed):
            self.ended = True
        if not self.announced:
            self._raw.append(text[start : self._at])
        self._give()
        return self._at, self._deltas

    def finish(self, rest: str) -> list[CallDelta]:
        """The end of all text, with ``rest`` unread: it belongs to the arguments if these are open."""
        return [CallDelta(self._index, arguments=rest)] if self._inside and rest else []

    def _call(self) -> Wait:
        try:
            yield from self._object()
        except _Malformed:
            if not self.announced:
                raise
        if not self.announced:
            raise _Malformed
        if self._arguments is None:
            self._arguments = ["{}"]
        self._inside = False
        while not (yield from self._at_mark()):
            if self._text[self._at] not in " \t\r\n}":
                return
            self._at += 1
        self._at += len(self._mark)

    def _object(self) -> Wait:
        yield from self._expect("{")
        while (yield from self._peek()) != "}":
            key = yield from self._string()
            yield from self._expect(":")
            yield from self._peek()
            if key == "name" and not self.announced:
                name = yield from self._string()
                if not name:
                    raise _Malformed
                self.announced = True
                self._deltas.append(CallDelta(self._index, self._id, name))
            elif key in ("arguments", "parameters") and self._arguments is None:
                self._arguments = []
                yield from self._value(self._arguments)
                self._inside = False
            else:
                yield from self._value([])
            if (yield from self._peek()) == ",":
                self._at += 1
            elif self._text[self._at] != "}":
                raise _Malformed
        self._at += 1

    def _value(self, into: list[str]) -> Wait:
        """Any JSON value, into a list of pieces. Only brackets and strings are told apart."""
        self._inside = into is self._arguments
        depth = 0
        quoted = torn = False  # torn: the string has a raw line break, so its end is probably missing
        if self._text[self._at] not in '"{[':
            yield from self._scalar(into)
            return
        while True:
            found = (_INSIDE if quoted else _OUTSIDE).search(self._text, self._at)
            if found is None:
                self._take(len(self._text), into)
                yield
                continue
            self._take(found.start(), into)
            char = found[0]
            if char == "<":
                if (torn or not quoted) and (yield from self._at_mark()):
                    raise _Malformed
            elif char == "\\":
                if self._at + 1 == len(self._text):
                    yield
                    continue
                self._take(self._at + 1, into)
            elif char == '"':
                quoted, torn = not quoted, False
            elif quoted:
                torn = True
            else:
                depth += 1 if char in "{[" else -1
            self._take(self._at + 1, into)
            if depth <= 0 and not quoted:
                return

    def _scalar(self, into: list[str]) -> Wait:
        empty = True
        while True:
            end = _SCALAR.match(self._text, self._at).end()  # type: ignore[union-attr]  # it also matches nothing
            empty = empty and end == self._at
            self._take(end, into)
            if end < len(self._text):
                break
            yield
        if empty:
            raise _Malformed

    def _string(self) -> Generator[None, None, str]:
        """A JSON string, decoded. Raises _Malformed."""
        yield from self._expect('"')
        parts = ['"']
        while True:
            found = _INSIDE.search(self._text, self._at)
            self._take(found.start() if found else len(self._text), parts)
            if found is None or (found[0] == "\\" and self._at + 1 == len(self._text)):
                yield
                continue
            if found[0] < " ":
                raise _Malformed
            self._take(self._at + (2 if found[0] == "\\" else 1), parts)
            if found[0] == '"':
                break
        try:
            return json.loads("".join(parts))
        except ValueError:
            raise _Malformed from None

    def _expect(self, char: str) -> Wait:
        if (yield from self._peek()) != char:
            raise _Malformed
        self._at += 1

    def _peek(self) -> Generator[None, None, str]:
        """The next character that is not blank, left unread."""
        while True:
            self._at = _BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            yield

    def _at_mark(self) -> Generator[None, None, bool]:
        while True:
            here = self._text[self._at : self._at + len(self._mark)]
            if len(here) == len(self._mark) or not self._mark.startswith(here):
                return here == self._mark
            yield

    def _take(self, end: int, into: list[str]) -> None:
        if end > self._at:
            into.append(self._text[self._at : end])
            self._at = end

    def _give(self) -> None:
        if self.announced and self._arguments:
            self._deltas.append(CallDelta(self._index, arguments="".join(self._arguments)))
            self._arguments.clear()
