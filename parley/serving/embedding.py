"""What is other about a request whose answers are vectors.

Knows what a model can do and what is wanted; nothing of texts.
"""

from __future__ import annotations

from parley.errors import Incapable, Invalid, excerpt
from parley.types import Done, Event, ModelInfo, Output, Request, Usage, Vector


def check(request: Request, info: ModelInfo) -> None:
    """The model must be able to do what is wanted, text or vectors. Raises BadRequest."""
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
    """Prompt ``number``, of so many tokens: to a generation what ``text.Choice`` is for an answer in text."""

    def __init__(self, number: int, prompt_tokens: int):
        self.number = number
        self.ended = False
        self.usage = Usage(prompt_tokens=prompt_tokens)

    def push(self, output: Output) -> list[Event]:
        """The events of its only output."""
        assert output.vector is not None
        self.ended = True
        self.usage.cached_tokens = output.cached_tokens
        return [Vector(self.number, output.vector), Done(self.number, "stop", self.usage)]
