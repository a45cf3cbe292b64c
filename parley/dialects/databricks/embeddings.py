"""Texts and their embeddings, in Databricks' format: OpenAI's members, and an id in the answer.

``instruction`` is put in front of each text. Under strict rules embeddings are always lists of numbers.
"""

from __future__ import annotations

from typing import Any

from parley.dialects.databricks import members, shared
from parley.dialects.databricks.shared import Rules, Words
from parley.dialects.dialect import Head, Headers, Timings
from parley.dialects.fields import Fields, decode
from parley.dialects.openai import embeddings
from parley.types import Prompt, Text, Usage

WORDS = Words("Embedding")
MAX_INSTRUCTION = 1 << 16  # characters


def read(rules: Rules, body: bytes, head: Head) -> EmbeddingReply:
    """Read an embedding request. Raises BadRequest."""
    return EmbeddingReply(rules, decode(body, WORDS), head)


class EmbeddingReply(embeddings.EmbeddingReply):
    """A reply with embeddings; never a stream."""

    def __init__(self, rules: Rules, body: Fields, head: Head):
        if rules.strict:
            members.known(body, members.EMBEDDING)
            body.strings("input", cap=embeddings.MAX_INPUTS, total=2**31)
        members.context(body)
        super().__init__(body.without({"encoding_format"}) if rules.strict else body, head)

    def _prompts(self, body: Fields) -> list[Prompt]:
        instruction = body.string("instruction", "", cap=MAX_INSTRUCTION)
        prompts = super()._prompts(body)
        if not instruction:
            return prompts
        before = instruction if instruction[-1].isspace() else instruction + " "
        texts = [prompt for prompt in prompts if isinstance(prompt, Text)]
        if len(texts) < len(prompts):
            raise body.fail("instruction", "can only be used with texts")
        return [Text(before + text.text, text.special) for text in texts]

    def envelope(self, data: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Return the answer's object."""
        told = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {
            "id": shared.identity(self._head),
            "object": "list",
            "model": self.request.model,
            "data": data,
            "usage": told,
        }

    def headers(self, timings: Timings | None) -> Headers:
        """Return the usual headers, and the one that names the served model."""
        return [*super().headers(timings), *shared.served_header(self)]
