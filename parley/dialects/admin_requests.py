"""Requests to the server other than generation: tokenize, abort a request, load an adapter, change endpoints, pause.

Each is data that a route's reader returns; many contain the answer to send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from parley.dialects.facts import Endpoint
from parley.dialects.reply import Answer
from parley.errors import ParleyError
from parley.types import PoolingOptions, Prompt, TextPrompt


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Return a prompt's tokens.

    * ``with_pieces``: also the vocabulary's own pieces.
    * ``with_texts``: or the text of each token instead.
    * ``with_spans``: also the text that was read and the range of each token in it.
    * ``last_tokens``: only this many tokens from the end.
    * ``further_prompts``: texts that are tokenized in the same way.
    * ``pooling``: they are texts to embed, which follow a prompt of the model's own.
    * ``writer``: writes the answer in place of the route's.
    """

    model: str
    prompt: Prompt
    with_pieces: bool = False
    with_texts: bool = False
    with_spans: bool = False
    last_tokens: int | None = None
    further_prompts: Sequence[TextPrompt] = ()
    pooling: PoolingOptions | None = None
    writer: Callable[[TokenizeResult], bytes] | None = None


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """The tokens of a prompt. ``spans``: start and end of each token in ``text``, in characters; equal for a token
    that is not part of the text. ``further_results``: those of further prompts. ``original_tokens``: how many there
    would be without the prompt's edits, if it has some."""

    token_ids: list[int]
    pieces: list[str] | None
    max_model_len: int
    text: str = ""
    spans: Sequence[tuple[int, int]] = ()
    further_results: Sequence[TokenizeResult] = ()
    original_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Return the text of tokens. ``ignore_unknown``: ids outside the vocabulary have no text; otherwise an error.
    ``further_ids``: the tokens of further texts. ``skip_special``: leave special tokens out."""

    model: str
    token_ids: list[int]
    ignore_unknown: bool = False
    further_ids: Sequence[list[int]] = ()
    skip_special: bool = False


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Abort an open request to the path's model, by its id or by the label that its client gave it. ``success`` and
    ``not_found`` are the answers."""

    request_label: str
    success: Answer
    not_found: Answer


@dataclass(frozen=True, slots=True)
class AbortList:
    """Abort the client's open requests with these ids, in all models, and then send the answer. Unknown ids are
    ignored."""

    labels: frozenset[str]
    answer: Answer


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """Load an adapter under a name, or unload it (``folder`` None). ``success`` is the answer.

    ``replace_existing``: also if an adapter of that name is loaded. ``model``: its base model; empty: the main one.
    ``render_failure`` returns the answer to an error, where it is not the API's usual one.
    """

    name: str
    folder: str | None
    success: Answer
    replace_existing: bool = False
    model: str = ""
    render_failure: Callable[[ParleyError], Answer] | None = None


@dataclass(frozen=True, slots=True)
class EndpointChange:
    """Create or replace an endpoint (``put_endpoint``), or remove one by name, and then send the answer."""

    answer: Answer
    put_endpoint: Endpoint | None = None
    remove_endpoint: str = ""


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Download a model by its name on the hub. ``refusal`` is the answer where that is not allowed.

    A ``stream`` of ``media_type`` has parts about the progress, a fraction, and ends with ``success`` or a failure;
    without one, the answer is the last of these parts alone.
    """

    model: str
    stream: bool
    media_type: str
    refusal: Answer
    success: bytes
    write_progress: Callable[[float], bytes]
    write_failure: Callable[[ParleyError], bytes]


PauseCommand = Literal["hold", "prepare", "release"]  # refuse new requests; keep refusing them; accept them again


class PauseAnswer(NamedTuple):
    """The answer to a command that pauses or resumes the server, and the command to carry out, if any."""

    answer: Answer
    command: PauseCommand | None = None
