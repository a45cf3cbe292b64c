"""What a dialect may have the server do beside generating: read texts as tokens, end a request, load an adapter, change
endpoints, hold requests back. Each is data that a route's ``read`` makes; many bring their answer with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from parley.dialects.dialect import Answer
from parley.dialects.facts import Endpoint
from parley.errors import ParleyError
from parley.types import Prompt


@dataclass(frozen=True, slots=True)
class Tokenize:
    """The wish to see a prompt's tokens. ``strings``: also the vocabulary's own pieces; ``texts``: or each one's text
    instead; ``spans``: also the text that was read and which part of it each token is; ``truncate``: only the last so
    many tokens."""

    model: str
    prompt: Prompt
    strings: bool = False
    texts: bool = False
    spans: bool = False
    truncate: int | None = None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """``spans``: begin and end of each token in ``text``, in characters; equal where a token is no part of it."""

    ids: list[int]
    strings: list[str] | None
    max_model_len: int
    text: str = ""
    spans: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Detokenize:
    """The wish to see the text of tokens. ``lax``: those that are not in the vocabulary have none."""

    model: str
    ids: list[int]
    lax: bool = False


@dataclass(frozen=True, slots=True)
class Halt:
    """The wish to end an open request to the path's model, by its id or the label that its client gave it, and what is
    answered."""

    label: str
    done: Answer
    unknown: Answer


@dataclass(frozen=True, slots=True)
class Adapt:
    """The wish to have an adapter known by a name, or (``folder`` None) known no longer, and what is answered.

    ``replace``: also where one is known by it. ``model``: which it is for; empty: the main one. ``failed``: the answer
    to what goes wrong, where that is not the API's usual one.
    """

    name: str
    folder: str | None
    done: Answer
    replace: bool = False
    model: str = ""
    failed: Callable[[ParleyError], Answer] | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """An answer, and what is to be done before it is given: an endpoint made or replaced, or one removed by name."""

    answer: Answer
    put: Endpoint | None = None
    drop: str = ""


Command = Literal["hold", "prepare", "release"]  # new requests are refused; still so; taken again


class Told(NamedTuple):
    """What is said of a command, and what is to be done for it, if anything."""

    answer: Answer
    command: Command | None = None
