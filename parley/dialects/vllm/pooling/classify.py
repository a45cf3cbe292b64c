"""``POST /classify`` as vLLM answers it: the most probable class of each text, and the scores of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects import vectors
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import vllm_members
from parley.dialects.openai.embeddings import read_embedding_inputs
from parley.dialects.reply import Answer, UnstreamedReply
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import requests
from parley.dialects.vllm.pooling import embeddings
from parley.dialects.vllm.token_usage import embedding_usage
from parley.types import Event, PoolingOptions, PromptVector, Request, Usage


def read_classification(body: bytes, context: RequestContext) -> ClassificationReply | Answer:
    """Read a classification request. Raises BadRequest."""
    return requests.read_vllm_request(ClassificationReply, body, context)


class ClassificationReply(UnstreamedReply):
    """A classification request: texts, token ids or a conversation."""

    field_names: ClassVar[Mapping[str, str]] = {"prompt": "input"}

    def __init__(self, body: Fields, context: RequestContext):
        embeddings.check_removed(body)
        embeddings.check_pooling(body, context)
        extra_members = vllm_members.read_vllm_pooling_members(body, context)
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=read_embedding_inputs(body, requests.VLLM_RULES),
            **extra_members.request_members,
            pooling=PoolingOptions(normalize=body.boolean("use_activation", None), task="classify"),
        )
        body.string("user", None, cap=vllm_members.MAX_NAME_CHARACTERS)
        self._answer_id = requests.choose_answer_id(context, extra_members.client_id or context.unique_id)
        self._context = context
        self._scores: dict[int, list[float]] = {}

    def add_events(self, events: Sequence[Event]) -> None:
        """Keep the scores of these events by input."""
        for event in events:
            if isinstance(event, PromptVector):
                self._scores[event.prompt] = vectors.vector_numbers(event.values)

    def render_body(self, usage: Usage) -> bytes:
        """Return the classes of each input as JSON."""
        return encode_json(
            {
                "id": f"classify-{self._answer_id}",
                "object": "list",
                "created": self._context.created,
                "model": self.request.model,
                "data": [self._describe_classes(index) for index in range(len(self._scores))],
                "usage": embedding_usage(usage),
            }
        )

    def _describe_classes(self, index: int) -> dict[str, Any]:
        scores = self._scores[index]
        best = max(range(len(scores)), key=scores.__getitem__)
        return {"index": index, "label": self._context.labels[best], "probs": scores, "num_classes": len(scores)}
