"""Shared by the replies of MindIE's interfaces: collecting an answer, splitting it into frames, ending on an error.

An event of a stream is the output of one step of the engine, usually one token.
"""

from __future__ import annotations

import codecs
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from parley.dialects.dialect import Answer, Head, Reply
from parley.dialects.mindie import shared
from parley.dialects.mindie.inputs import Input
from parley.dialects.mindie.rules import Rules
from parley.dialects.tgi.shared import reason
from parley.errors import NoTokens, ParleyError
from parley.types import Accepted, Cost, Delta, Done, Event, Scored, Token, Usage


def common(rules: Rules, head: Head, label: str = "") -> dict[str, Any]:
    """Return the ``Request`` members that all interfaces share. The header's name or the label cancels it."""
    return {
        "id": head.id,
        "overflow": rules.truncation or "refuse",
        "labels": (shared.name(head), label) if label else (shared.name(head),),
        "sole": shared.sole(head),
    }


class MindieReply(Reply):
    """A reply of any interface. ``prompt_input``: its input, which words the refusal of a prompt without tokens."""

    media_type: ClassVar[str] = "text/event-stream"
    names: ClassVar[Mapping[str, str]] = {"stop_ids": "stop_token_ids"}
    ping: ClassVar[bytes] = b""

    def __init__(self, rules: Rules, known: Input):
        self._rules = rules
        self._known = known

    def end(self, usage: Usage) -> bytes:
        """Return nothing: the last frame ends the stream."""
        return b""

    def fail(self, error: ParleyError) -> bytes:
        """Return the end of a stream after an error; like the original, strict rules send the bare text."""
        if self._rules.strict:
            return shared.failure(error)
        return b"data: " + shared.error(error, self._rules).body + b"\n\n"

    def refusal(self, error: ParleyError) -> Answer | None:
        """Return the refusal of a prompt without tokens; None for other errors."""
        return shared.refused(self._known.tokens) if isinstance(error, NoTokens) else None


class Piece(NamedTuple):
    """A frame of a stream: the tokens of a step (none if an end came alone), their text, and whether it is the last."""

    tokens: Sequence[Token]
    text: str
    last: bool

    @property
    def token(self) -> Token | None:
        """The last token, or None."""
        return self.tokens[-1] if self.tokens else None

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        return [token.id for token in self.tokens]

    @property
    def milliseconds(self) -> int:
        """The time these tokens took together, in milliseconds."""
        costs = [token.cost for token in self.tokens if token.cost is not None]
        return round(1000 * sum(cost.waited + cost.computed for cost in costs))


class Single(MindieReply):
    """A reply with one choice."""

    def __init__(self, rules: Rules, known: Input, limit: int):
        super().__init__(rules, known)
        self.prompt: Sequence[int] = ()
        self.seed = 0
        self.tokens: list[Token] = []
        self.scored: Scored | None = None
        self.done: Done | None = None
        self._limit = limit
        self._said: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @abstractmethod
    def frame(self, piece: Piece) -> bytes:
        """Return a piece as bytes of the stream."""

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Return a frame for each step of the engine."""
        return b"".join([self.frame(piece) for piece in self._pieces(events)])

    def add(self, events: Sequence[Event]) -> None:
        """Collect the tokens and text of these events."""
        tokens, text = self._take(events)
        self.tokens += tokens
        self._said.append(text)

    @property
    def text(self) -> str:
        """The whole text so far; its parts are joined when it is read."""
        self._said = ["".join(self._said)]
        return self._said[0]

    @property
    def reason(self) -> str:
        """The finish reason; a request cancelled by another call counts as stopped by a string."""
        assert self.done is not None
        return "stop_sequence" if self.done.reason == "cancel" else reason(self.done, self._limit)

    def _take(self, events: Sequence[Event]) -> tuple[list[Token], str]:
        """Return the tokens and text of these events; store the other events."""
        tokens: list[Token] = []
        texts: list[str] = []
        for event in events:
            match event:
                case Delta():
                    texts.append(event.text)
                    tokens += event.tokens
                case Accepted():
                    self.prompt, self.seed = event.token_ids, event.seed
                case Scored():
                    self.scored = event
                case Done():
                    self.done = event
        return tokens, "".join(texts)

    def _pieces(self, events: Sequence[Event]) -> Iterator[Piece]:
        """Split the text among the steps whose tokens spell it; the rest of the text goes to the last step."""
        tokens, rest = self._take(events)
        groups = list(_steps(tokens))
        for group in groups[:-1]:
            piece = "".join(map(self._spelt, group))
            piece = piece if rest.startswith(piece) else ""
            rest = rest[len(piece) :]
            self._said.append(piece)
            yield Piece(group, piece, False)
        if groups or rest or self.done is not None:
            for token in groups[-1] if groups else ():
                self._spelt(token)
            self._said.append(rest)
            yield Piece(groups[-1] if groups else (), rest, self.done is not None)

    def _spelt(self, token: Token) -> str:
        return "" if token.special else self._decoder.decode(token.raw)


def _steps(tokens: Iterable[Token]) -> Iterator[list[Token]]:
    """Group the tokens of one step: they have equal costs, and different steps have different ones."""
    group: list[Token] = []
    for token in tokens:
        if group and (token.cost is None or token.cost.tokens == 1 or token.cost != group[-1].cost):
            yield group
            group = []
        group.append(token)
    if group:
        yield group


def milliseconds(cost: Cost | None) -> int:
    """Return the whole milliseconds from the choice's previous token, or from queueing, to this one."""
    return round(1000 * (cost.waited + cost.computed)) if cost is not None else 0


def microseconds(cost: Cost | None) -> int:
    """Return the microseconds that the choice waited for the step."""
    return round(1e6 * cost.waited) if cost is not None else 0
