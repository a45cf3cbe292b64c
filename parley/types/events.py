"""Events of an answer: the server makes them from the engine's outputs (text, stops, usage); a dialect writes them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from parley.types.context_edits import AppliedEdit
from parley.types.engine import TokenCost
from parley.types.media import MediaKind


class TokenInfo(msgspec.Struct):
    """One token as a client sees it. ``raw_bytes`` are its own bytes, possibly only a part of a character.

    ``is_special``: one of the model's control tokens, not text. ``cost`` is set if the request asked for it.
    """

    id: int
    text: str
    raw_bytes: bytes
    logprob: float | None = None
    rank: int | None = None
    top_tokens: list[TokenInfo] = []
    is_special: bool = False
    cost: TokenCost | None = None


class ToolCallDelta(msgspec.Struct):
    """A piece of a tool call: the first piece of call ``index`` has id and name, later pieces only ``arguments``."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Usage(msgspec.Struct):
    """Token counts: of one choice in ``ChoiceDone``, of the whole request when the server adds them up."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0  # tokens of the request's prediction that occur in the answer
    rejected_tokens: int = 0  # tokens of the request's prediction that do not
    media_tokens: dict[MediaKind, int] = {}  # prompt tokens whose embeddings encoders compute, by kind of media
    media_seconds: dict[MediaKind, float] = {}  # how long the prompts' clips and videos are together, by kind of media


class PromptAccepted(msgspec.Struct):
    """Prompt number ``prompt`` was tokenized, fits, and was submitted to the engine. Choice k draws with ``seed`` + k.

    ``text``: the text of these tokens, if the request asked for it. ``applied_edits``: those of its edits that changed
    the conversation.
    """

    prompt: int
    token_ids: list[int]
    seed: int = 0
    text: str | None = None
    applied_edits: list[AppliedEdit] = []


class PromptScored(msgspec.Struct):
    """The prompt's text and tokens, with log-probabilities if the request asked for them (the first token has none)."""

    prompt: int
    tokens: list[TokenInfo]
    text: str = ""


DeltaPart = Literal["content", "reasoning", "tool"]


class ChoiceDelta(msgspec.Struct):
    """New output of one choice. The texts of one part, joined, are the full text of that part.

    ``tokens`` are the tokens of the text. While a character or a possible stop string is incomplete, tokens may come
    with a later delta. ``tool_call`` is set if ``output_part`` is "tool".
    """

    index: int
    text: str
    output_part: DeltaPart = "content"
    tokens: list[TokenInfo] = []
    tool_call: ToolCallDelta | None = None


FinishReason = Literal["stop", "length", "tool", "repetition", "cancel", "error"]


class ChoiceDone(msgspec.Struct):
    """The end of one choice. ``stop``: the stop string or stop id that matched; None for the model's own end.
    ``token_ids``: all tokens of the choice, if the request wants them. ``summary``: the choice is a summary that an
    answer follows, with this text; empty if the model did not write it to its end, and then nothing is replaced."""

    index: int
    reason: FinishReason
    usage: Usage
    stop: str | int | None = None
    token_ids: list[int] = []
    summary: str | None = None


class PromptVector(msgspec.Struct):
    """The numbers of prompt number ``prompt`` in float32, little endian: its vector, one vector for each token in
    ``rows`` rows, or the scores of all classes. For the task "embed_sparse", pairs of a token's id, uint32, and its
    weight, float32."""

    prompt: int
    values: bytes
    rows: int = 1


class RequestFailed(msgspec.Struct):
    """The end of the whole request by an error, after it was accepted. ``error`` is a parley.errors.ParleyError."""

    error: Any


Event = PromptAccepted | PromptScored | ChoiceDelta | PromptVector | ChoiceDone | RequestFailed
