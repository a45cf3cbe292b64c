"""Events that the server makes of the engine's outputs (text, stop strings, usage) and a dialect writes as bytes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from parley.types.engine import Cost


class Token(msgspec.Struct):
    """One token as a client may see it. ``raw`` are its own bytes, which may be part of a character.

    ``special``: a mark of the model rather than text. ``cost`` is there if it was wanted.
    """

    id: int
    text: str
    raw: bytes
    logprob: float | None = None
    rank: int | None = None
    top: list[Token] = []
    special: bool = False
    cost: Cost | None = None


class CallDelta(msgspec.Struct):
    """A piece of a tool call: the first piece of call ``index`` has id and name, later ones only ``arguments``."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Usage(msgspec.Struct):
    """Tokens read and delivered. For one choice in ``Done``, for the whole request when added up by the server."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0  # of the request's prediction, those that the answer has
    rejected_tokens: int = 0  # and those that it does not have


class Accepted(msgspec.Struct):
    """Prompt number ``prompt`` was tokenised, fits, and is in the engine's hands. Choice k draws with ``seed`` + k.

    ``text``: of these tokens, if it is wanted.
    """

    prompt: int
    token_ids: list[int]
    seed: int = 0
    text: str | None = None


class Scored(msgspec.Struct):
    """The prompt's tokens, with log-probabilities when they were asked for (the first has none), and its text."""

    prompt: int
    tokens: list[Token]
    text: str = ""


Part = Literal["content", "reasoning", "tool"]


class Delta(msgspec.Struct):
    """New output of one choice. Concatenated texts of a part are that part's full text.

    ``tokens`` are the tokens behind the text; while a character or a possible stop string is incomplete, tokens may
    arrive with a later delta. ``call`` is set when part is "tool".
    """

    index: int
    text: str
    part: Part = "content"
    tokens: list[Token] = []
    call: CallDelta | None = None


Reason = Literal["stop", "length", "tool", "repetition", "cancel", "error"]


class Done(msgspec.Struct):
    """The end of one choice. ``stop`` is the stop string or stop id that matched, None for the model's own end."""

    index: int
    reason: Reason
    usage: Usage
    stop: str | int | None = None


class Vector(msgspec.Struct):
    """The vector of prompt number ``prompt``: float32, little endian."""

    prompt: int
    values: bytes


class Failed(msgspec.Struct):
    """The end of the whole request by an error after it was accepted. ``error`` is a parley.errors.ParleyError."""

    error: Any


Event = Accepted | Scored | Delta | Vector | Done | Failed
