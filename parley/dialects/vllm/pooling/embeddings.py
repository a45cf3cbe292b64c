"""``POST /v1/embeddings`` and ``POST /pooling`` as vLLM answers them: the same members, another envelope."""

from __future__ import annotations

from typing import Any, ClassVar

from parley.dialects.fields import Fields
from parley.dialects.openai import embeddings
from parley.dialects.openai.common_members import MAX_TOKENS, unsupported_member_error
from parley.dialects.openai.reading_rules import ReadingRules
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import requests
from parley.dialects.vllm.refusal_wording import parameter_error
from parley.dialects.vllm.token_usage import embedding_usage
from parley.errors import InvalidValue, Unsupported
from parley.types import PoolingTask, Usage

TRUNCATION_TOO_LONG = (
    "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."
)
POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify", "plugin")
REMOVED_TASKS = {
    "score": "`score` task was removed; use `classify` instead.",
    "encode": "`encode` task was removed; use `token_embed` or `token_classify` instead.",
}
OFFERED_TASKS: tuple[PoolingTask, ...] = ("embed", "token_embed", "classify", "token_classify")


def read_vllm_embedding(body: bytes, context: RequestContext) -> VllmEmbeddingReply | Answer:
    """Read an embedding request. Raises BadRequest."""
    return requests.read_vllm_request(VllmEmbeddingReply, body, context)


def read_pooling_request(body: bytes, context: RequestContext) -> PoolingReply | Answer:
    """Read a pooling request. Raises BadRequest."""
    return requests.read_vllm_request(PoolingReply, body, context)


def check_removed(body: Fields) -> None:
    """Refuse members and tasks that the original has removed, and those that this server lacks. Raises InvalidValue,
    Unsupported."""
    if "normalize" in body.member_names:
        raise parameter_error("Parameter `normalize` was removed; use `use_activation` instead.", "normalize")
    if body.has_value("late_chunking_params"):
        raise unsupported_member_error(body, "late_chunking_params", "Mean vectors of a document's parts are")
    if (sentence := REMOVED_TASKS.get(str(body.raw_value("task")))) is not None:
        raise parameter_error(sentence, "task")


def check_pooling(body: Fields, context: RequestContext) -> None:
    """Check the salt, and that the requested truncation is within the context length. Raises BadRequest."""
    fault = next(requests.salt_faults(body), None)
    if fault is not None:
        raise fault
    if context.context_length and body.integer("truncate_prompt_tokens", -1, -1, MAX_TOKENS) > context.context_length:
        raise InvalidValue(TRUNCATION_TOO_LONG)


class VllmEmbeddingReply(embeddings.EmbeddingReply):
    """An embedding request, answered in vLLM's form."""

    reading_rules: ClassVar[ReadingRules] = requests.VLLM_RULES
    id_prefix: ClassVar[str] = "embd"

    def __init__(self, body: Fields, context: RequestContext, task: PoolingTask = "embed"):
        check_removed(body)
        check_pooling(body, context)
        super().__init__(body, context, task)
        self._answer_id = requests.choose_answer_id(context, self._answer_id)

    def embedding_envelope(self, data: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Return the answer in vLLM's form, which has an id and a creation time."""
        data = [
            {"index": item["index"], "object": "embedding", "embedding": item["embedding"]}
            if "embedding" in item
            else item
            for item in data
        ]
        return {
            "id": f"{self.id_prefix}-{self._answer_id}",
            "object": "list",
            "created": self._context.created,
            "model": self.request.model,
            "data": data,
            "usage": embedding_usage(usage),
        }


def _read_task(body: Fields, context: RequestContext) -> PoolingTask:
    """Return the requested task; the first task of the model by default. Raises Unsupported."""
    supported = [task for task in OFFERED_TASKS if task in context.pooling_tasks] or ["embed"]
    name = body.string("task", supported[0], allowed=POOLING_TASKS)
    for task in supported:
        if task == name:
            return task
    if name == "plugin":
        raise Unsupported("No IOProcessor plugin installed.", field="task")
    raise Unsupported(f"Unsupported task: {name!r} Supported tasks: {supported}", field="task")


class PoolingReply(VllmEmbeddingReply):
    """A pooling request: a vector or scores of classes for each input, or for each of its tokens, in ``data``."""

    id_prefix: ClassVar[str] = "pooling"

    def __init__(self, body: Fields, context: RequestContext):
        check_removed(body)
        task = _read_task(body, context)
        if body.has_value("data"):
            raise unsupported_member_error(body, "data", "Input for plugins is")
        if task == "token_embed":  # the original's vectors of tokens have length 1, even if the model's settings differ
            body = body.with_defaults({"use_activation": True})
        super().__init__(body, context, task)

    def _split_inputs(self, body: Fields) -> dict[str, Fields]:
        return {"": body}  # at most one conversation

    def embedding_envelope(self, data: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Return the answer with each vector in the member ``data`` of a pooling object."""
        pooling_items = [
            {"index": item["index"], "object": "pooling", "data": item["embedding"]} if "embedding" in item else item
            for item in data
        ]
        return super().embedding_envelope(pooling_items, usage)
