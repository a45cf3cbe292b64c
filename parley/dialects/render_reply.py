"""Replies to requests that generate nothing, between an API's bodies and tokens: a prompt's or an answer's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from parley.dialects.reply import Reply
from parley.types import EngineOutput, TokenInfo


class RenderedPrompt(NamedTuple):
    """A prompt as the engine would get it, and the largest number of tokens that it would generate.

    ``reasoning_ended``: as in ``TokensPrompt``. ``spans``: of the tokens' characters in the text that the model reads;
    None if they were not asked for, or the prompt has no text.
    """

    token_ids: list[int]
    max_tokens: int
    reasoning_ended: bool | None = None
    spans: list[tuple[int, int]] | None = None


class PromptRenderer(Reply):
    """A request whose prompts are answered as tokens, instead of being continued. ``wants_spans``: with the spans of
    their characters."""

    wants_spans: bool = False

    @abstractmethod
    def render_prompts(self, prompts: Sequence[RenderedPrompt]) -> bytes:
        """Return the answer."""


class AnswerRenderer(Reply):
    """A request whose answer the client has as tokens, and wants as this API writes it.

    ``outputs``: the whole output of each choice, in their order. ``prompt_tokens``: of all prompts.
    """

    outputs: Sequence[EngineOutput] = ()
    prompt_tokens: int = 0


class ChunkRenderer(Reply):
    """A request whose answer so far the client has as tokens, and whose newest chunk it wants as this API writes it.

    ``outputs``: of the only choice in the chunks so far, this one last; empty if this chunk has no choice.
    """

    outputs: Sequence[EngineOutput] = ()

    @abstractmethod
    def render_answer(self, frames: bytes, tokens: list[TokenInfo]) -> bytes:
        """Return the answer. ``frames``: the bytes of the chunk in a stream of this API; ``tokens``: those of all
        chunks, if the request asks for log-probabilities."""
