"""``POST /v1/embeddings`` and ``POST /pooling`` as vLLM answers them: the same members, another envelope."""

from __future__ import annotations

from typing import Any, ClassVar

from parley.dialects.dialect import Answer, Head
from parley.dialects.fields import Fields
from parley.dialects.openai import embeddings
from parley.dialects.openai.shared import MAX_TOKENS, Rules, unsupported
from parley.dialects.vllm import requests, shared
from parley.errors import Invalid, Unsupported
from parley.types import Usage

UNCUT = "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."
TASKS = ("embed", "classify", "token_embed", "token_classify", "plugin")


def read(body: bytes, head: Head) -> EmbeddingReply | Answer:
    """Read an embedding request. Raises BadRequest."""
    return requests.read(EmbeddingReply, body, head)


def pool(body: bytes, head: Head) -> PoolingReply | Answer:
    """Read a pooling request. Raises BadRequest."""
    return requests.read(PoolingReply, body, head)


def check_cut(body: Fields, head: Head) -> None:
    """Check that the requested truncation is within the context length. Raises BadRequest."""
    if head.context and body.integer("truncate_prompt_tokens", -1, -1, MAX_TOKENS) > head.context:
        raise Invalid(UNCUT)


class EmbeddingReply(embeddings.EmbeddingReply):
    """An embedding request, answered in vLLM's form."""

    rules: ClassVar[Rules] = requests.RULES
    kind: ClassVar[str] = "embd"

    def __init__(self, body: Fields, head: Head):
        check_cut(body, head)
        super().__init__(body, head)
        self._name = requests.name(head, self._name)

    def envelope(self, data: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": f"{self.kind}-{self._name}",
            "object": "list",
            "created": self._head.created,
            "model": self.request.model,
            "data": data,
            "usage": shared.embedded(usage),
        }


class PoolingReply(EmbeddingReply):
    """A pooling request: one vector for each input, in a member called ``data``."""

    kind: ClassVar[str] = "pooling"

    def __init__(self, body: Fields, head: Head):
        if (task := body.string("task", "embed", allowed=TASKS)) != "embed":
            raise Unsupported(f"Unsupported task: {task!r} Supported tasks: ['embed']", field="task")
        if body.has("data"):
            raise unsupported(body, "data", "Input for plugins is")
        super().__init__(body, head)

    def envelope(self, data: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        pooled = [
            {"index": each["index"], "object": "pooling", "data": each["embedding"]} if "embedding" in each else each
            for each in data
        ]
        return super().envelope(pooled, usage)
