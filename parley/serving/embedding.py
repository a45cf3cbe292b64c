"""Embedding requests: checks, and the events of their single output.

Knows the model's capabilities and the request's options; nothing of text.
"""

from __future__ import annotations

from parley.errors import Incapable, Invalid, excerpt
from parley.types import Done, Event, ModelInfo, Output, Request, Usage, Vector


def check(request: Request, info: ModelInfo) -> None:
    """Check that the model can produce the requested output, text or vectors. Raises Incapable, Invalid."""
    wish = request.pooling
    if wish is None:
        if not info.generates:
            told = f"The model {excerpt(request.model)} makes embeddings only and does not generate text."
            raise Incapable(told, field="model")
        return
    if not info.dimensions:
        raise Incapable(f"The model {excerpt(request.model)} does not make embeddings.", field="model")
    if wish.dimensions is not None and wish.dimensions > info.dimensions:
        raise Invalid(
            f"Invalid 'dimensions': the embeddings of this model have {info.dimensions}, but {wish.dimensions} were "
            "requested.",
            field="dimensions",
        )


class Pooled:
    """The counterpart of ``text.AnswerChoice`` in an embedding request: turns a prompt's output into events."""

    def __init__(self, number: int, prompt_tokens: int):
        self.number = number
        self.ended = False
        self.usage = Usage(prompt_tokens=prompt_tokens)

    def push(self, output: Output) -> list[Event]:
        """Return the events of the only output."""
        assert output.vector is not None
        self.ended = True
        self.usage.cached_tokens = output.cached_tokens
        return [Vector(self.number, output.vector), Done(self.number, "stop", self.usage)]
