"""Requests to the server other than generation: tokenize, abort a request, load an adapter, change endpoints, pause.

Each is data that a route's reader returns; many contain the answer to send.
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
    """Return a prompt's tokens. ``with_pieces``: also the vocabulary's own pieces; ``with_texts``: or the text of each
    token instead; ``with_spans``: also the text that was read and the range of each token in it; ``last_tokens``: only
    this many tokens from the end."""

    model: str
    prompt: Prompt
    strings: bool = False
    texts: bool = False
    spans: bool = False
    truncate: int | None = None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of a prompt. ``spans``: start and end of each token in ``text``, in characters; equal for a token
    that is not part of the text."""

    ids: list[int]
    strings: list[str] | None
    max_model_len: int
    text: str = ""
    spans: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Return the text of tokens. ``ignore_unknown``: ids outside the vocabulary have no text; otherwise an error."""

    model: str
    ids: list[int]
    lax: bool = False


@dataclass(frozen=True, slots=True)
class Halt:
    """Abort an open request to the path's model, by its id or by the label that its client gave it. ``success`` and
    ``not_found`` are the answers."""

    label: str
    done: Answer
    unknown: Answer


@dataclass(frozen=True, slots=True)
class Adapt:
    """Load an adapter under a name, or unload it (``folder`` None). ``success`` is the answer.

    ``replace_existing``: also if an adapter of that name is loaded. ``model``: its base model; empty: the main one.
    ``render_failure`` returns the answer to an error, where it is not the API's usual one.
    """

    name: str
    folder: str | None
    done: Answer
    replace: bool = False
    model: str = ""
    failed: Callable[[ParleyError], Answer] | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Create or replace an endpoint (``put_endpoint``), or remove one by name, and then send the answer."""

    answer: Answer
    put: Endpoint | None = None
    drop: str = ""


Command = Literal["hold", "prepare", "release"]  # refuse new requests; keep refusing them; accept them again


class Told(NamedTuple):
    """The answer to a command that pauses or resumes the server, and the command to carry out, if any."""

    answer: Answer
    command: Command | None = None
