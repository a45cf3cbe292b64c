"""What replies of MindIE's interfaces have in common: how an answer grows, its frames in a stream, its end by an error.

An event of a stream is what one step of the engine gave, which is one token here.
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
    """What requests of all interfaces say. They can be stopped under the name of their header and under their label."""
    return {
        "id": head.id,
        "overflow": rules.truncation or "refuse",
        "labels": (shared.name(head), label) if label else (shared.name(head),),
        "sole": shared.sole(head),
    }


class MindieReply(Reply):
    """``known`` is the input that is to blame for a prompt without tokens."""

    media_type: ClassVar[str] = "text/event-stream"
    names: ClassVar[Mapping[str, str]] = {"stop_ids": "stop_token_ids"}
    ping: ClassVar[bytes] = b""

    def __init__(self, rules: Rules, known: Input):
        self._rules = rules
        self._known = known

    def end(self, usage: Usage) -> bytes:
        return b""

    def fail(self, error: ParleyError) -> bytes:
        """The original's stream ends with the bare text."""
        if self._rules.strict:
            return shared.failure(error)
        return b"data: " + shared.error(error, self._rules).body + b"\n\n"

    def refusal(self, error: ParleyError) -> Answer | None:
        return shared.refused(self._known.tokens) if isinstance(error, NoTokens) else None


class Piece(NamedTuple):
    """A frame of a stream: the tokens of a step (none where an end came alone), what they add, is it the last?"""

    tokens: Sequence[Token]
    text: str
    last: bool

    @property
    def token(self) -> Token | None:
        """The last of them."""
        return self.tokens[-1] if self.tokens else None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def milliseconds(self) -> int:
        """What they took together."""
        costs = [token.cost for token in self.tokens if token.cost is not None]
        return round(1000 * sum(cost.waited + cost.computed for cost in costs))


class Single(MindieReply):
    """A reply of one choice."""

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
        """What this piece is on the wire."""

    def chunk(self, events: Sequence[Event]) -> bytes:
        return b"".join([self.frame(piece) for piece in self._pieces(events)])

    def add(self, events: Sequence[Event]) -> None:
        tokens, text = self._take(events)
        self.tokens += tokens
        self._said.append(text)

    @property
    def text(self) -> str:
        """All that was said, which is kept in one piece from here on."""
        self._said = ["".join(self._said)]
        return self._said[0]

    @property
    def reason(self) -> str:
        """Why it ended; another's wish counts as a stop string there."""
        assert self.done is not None
        return "stop_sequence" if self.done.reason == "cancel" else reason(self.done, self._limit)

    def _take(self, events: Sequence[Event]) -> tuple[list[Token], str]:
        """The tokens and the text of these events; what else they tell is put down."""
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
        """What was said is divided among the tokens that came with it. What they do not spell is the last ones'."""
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
    """Tokens that one step gave together are one frame. Those of a step have the same costs, and no others have."""
    group: list[Token] = []
    for token in tokens:
        if group and (token.cost is None or token.cost.tokens == 1 or token.cost != group[-1].cost):
            yield group
            group = []
        group.append(token)
    if group:
        yield group


def milliseconds(cost: Cost | None) -> int:
    """From the choice's last token, or from when it was queued, to this one; whole ones, as there."""
    return round(1000 * (cost.waited + cost.computed)) if cost is not None else 0


def microseconds(cost: Cost | None) -> int:
    """How long the choice waited for the step."""
    return round(1e6 * cost.waited) if cost is not None else 0
