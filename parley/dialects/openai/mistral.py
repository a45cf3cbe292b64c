"""Mistral's additions to OpenAI's API, for its SDK: infilling, and answers with more members.

https://docs.mistral.ai/api/ has the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from parley.dialects.facts import ModelCard
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.completions import CompletionReply, LogprobLists
from parley.dialects.openai.embeddings import EmbeddingReply
from parley.dialects.openai.mistral_members import with_openai_seed
from parley.dialects.openai.token_objects import FINISH_REASONS
from parley.dialects.openai.tokens import model_object
from parley.dialects.request_context import RequestContext
from parley.types import ChoiceDone, Usage


def read_fim_request(body: bytes, context: RequestContext) -> FimReply:
    """Read a request to fill in the text between ``prompt`` and ``suffix``. Raises BadRequest."""
    return FimReply(with_openai_seed(decode_fields(body)), context)


class FimReply(CompletionReply):
    """A completion whose answer has the form of a chat's."""

    def __init__(self, body: Fields, context: RequestContext):
        prompt = body.string("prompt", None)
        if prompt is None:
            raise body.missing_member("prompt")
        super().__init__(body.without_members({"echo", "logprobs"}), context)
        if not body.has_value("max_tokens"):
            stop_conditions = self.request.stop_conditions
            self.request.stop_conditions = msgspec.structs.replace(stop_conditions, max_tokens=None)

    def _completion_chunk(self, index: int, choice: bytes) -> bytes:
        members = msgspec.json.decode(choice, type=dict[str, Any])
        delta = {"index": index, "delta": {"role": "assistant", "content": members["text"]}}
        return super()._completion_chunk(index, encode_json(delta | {"finish_reason": members["finish_reason"]}))

    def _choice_members(
        self, index: int, text: str, done: ChoiceDone | None, logprobs: LogprobLists | None = None
    ) -> dict[str, Any]:
        members = super()._choice_members(index, text, done, logprobs)
        if self.request.stream:
            return members  # a chunk is made of it
        message = {"role": "assistant", "content": text, "tool_calls": None}
        reason = None if done is None else FINISH_REASONS[done.reason]
        return {"index": index, "message": message, "finish_reason": reason}

    def _completion_envelope(self, choices: list[Any], usage: Usage | None = None) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.request.stream else "chat.completion"
        return super()._completion_envelope(choices, usage) | {"object": name}


# -- answers with more members


def read_mistral_embedding(body: bytes, context: RequestContext) -> NamedEmbeddingReply:
    """Read an embedding request. Raises BadRequest."""
    return NamedEmbeddingReply(decode_fields(body), context)


class NamedEmbeddingReply(EmbeddingReply):
    """An embedding request, whose answer has an id."""

    def embedding_envelope(self, data: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Return the answer with its vectors."""
        return {"id": f"embd-{self._answer_id}", **super().embedding_envelope(data, usage)}


def write_mistral_model(card: ModelCard) -> bytes:
    """Return one model."""
    return encode_json(_described_model(card))


def write_mistral_models(cards: Sequence[ModelCard]) -> bytes:
    """Return the list of models."""
    return encode_json({"object": "list", "data": [_described_model(card) for card in cards]})


def _described_model(card: ModelCard) -> dict[str, Any]:
    media = () if card.info is None else card.info.media_kinds
    capabilities = {
        "completion_chat": card.purpose == "chat",
        "completion_fim": "insert" in card.abilities,
        "function_calling": "tools" in card.abilities,
        "reasoning": "thinking" in card.abilities,
        "vision": "image" in media,
        "audio": "audio" in media,
        "classification": card.info is not None and bool(card.info.labels),
    }
    return model_object(card) | {"type": "base", "capabilities": capabilities}
