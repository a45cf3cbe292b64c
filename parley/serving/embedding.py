"""Embedding requests: checks, and the events of their single output.

Knows the model's capabilities and the request's options; nothing of text.
"""

from __future__ import annotations

from parley.errors import Incapable, Invalid, excerpt
from parley.types import ChoiceDone, EngineOutput, Event, ModelInfo, PromptVector, Request, Usage


def check_embedding(request: Request, info: ModelInfo) -> None:
    """Check that the model can produce the requested output, text or vectors. Raises Incapable, Invalid."""
    pooling = request.pooling
    if pooling is None:
        if not info.generates:
            message = f"The model {excerpt(request.model)} makes embeddings only and does not generate text."
            raise Incapable(message, field="model")
        return
    if not info.dimensions:
        raise Incapable(f"The model {excerpt(request.model)} does not make embeddings.", field="model")
    if pooling.dimensions is not None and pooling.dimensions > info.dimensions:
        raise Invalid(
            f"Invalid 'dimensions': the embeddings of this model have {info.dimensions}, but {pooling.dimensions} were "
            "requested.",
            field="dimensions",
        )


class EmbeddingChoice:
    """The counterpart of ``text.AnswerChoice`` in an embedding request: turns a prompt's output into events."""

    def __init__(self, prompt_number: int, prompt_tokens: int):
        self.prompt_number = prompt_number
        self.finished = False
        self.usage = Usage(prompt_tokens=prompt_tokens)

    def push_output(self, output: EngineOutput) -> list[Event]:
        """Return the events of the only output."""
        assert output.vector is not None
        self.finished = True
        self.usage.cached_tokens = output.cached_tokens
        return [PromptVector(self.prompt_number, output.vector), ChoiceDone(self.prompt_number, "stop", self.usage)]
