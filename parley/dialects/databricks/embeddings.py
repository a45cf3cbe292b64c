"""Texts and their embeddings, in Databricks' format: OpenAI's members, and an id in the answer.

``instruction`` is put in front of each text. Under strict rules embeddings are always lists of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from parley.dialects.databricks import members
from parley.dialects.databricks.answer_parts import answer_uuid, served_model_header
from parley.dialects.databricks.api_rules import DatabricksRules
from parley.dialects.databricks.refusal_wording import DatabricksErrorWording
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.openai import embeddings
from parley.dialects.reply import HeaderList, RequestTimings
from parley.dialects.request_context import RequestContext
from parley.types import Prompt, TextPrompt, Usage

EMBEDDING_WORDING = DatabricksErrorWording("Embedding")
MAX_INSTRUCTION = 1 << 16  # characters


def read_databricks_embedding(rules: DatabricksRules, body: bytes, context: RequestContext) -> DatabricksEmbeddingReply:
    """Read an embedding request. Raises BadRequest."""
    return DatabricksEmbeddingReply(rules, decode_fields(body, EMBEDDING_WORDING), context)


class DatabricksEmbeddingReply(embeddings.EmbeddingReply):
    """A reply with embeddings; never a stream."""

    def __init__(self, rules: DatabricksRules, body: Fields, context: RequestContext):
        if rules.strict:
            members.check_databricks_members(body, members.EMBEDDING_TREE)
            body.strings("input", cap=embeddings.MAX_EMBEDDING_INPUTS, total=2**31)
        members.check_client_information(body)
        super().__init__(body.without_members({"encoding_format"}) if rules.strict else body, context)

    def _read_inputs(self, body: Fields, conversations: Iterable[Fields]) -> list[Prompt]:
        instruction = body.string("instruction", "", cap=MAX_INSTRUCTION)
        prompts = super()._read_inputs(body, conversations)
        if not instruction:
            return prompts
        prefix = instruction if instruction[-1].isspace() else instruction + " "
        texts = [prompt for prompt in prompts if isinstance(prompt, TextPrompt)]
        if len(texts) < len(prompts):
            raise body.member_error("instruction", "can only be used with texts")
        return [TextPrompt(prefix + text.text, text.add_special_tokens) for text in texts]

    def embedding_envelope(self, data: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Return the answer's object."""
        usage_object = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {
            "id": answer_uuid(self._context),
            "object": "list",
            "model": self.request.model,
            "data": data,
            "usage": usage_object,
        }

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the usual headers, and the one that names the served model."""
        return [*super().answer_headers(timings), *served_model_header(self)]
