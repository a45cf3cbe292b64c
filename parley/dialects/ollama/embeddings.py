"""``POST /api/embed``: vectors of length 1 for texts; ``/api/embeddings``, its older form, one vector as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects import vectors
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.ollama.api_rules import OllamaRules
from parley.dialects.ollama.error_answers import INPUT_TOO_LONG, NO_ROOM
from parley.dialects.ollama.go_encoding import JSON_TYPE, duration_nanoseconds, encode_go, go_answer
from parley.dialects.ollama.model_names import check_served, read_ollama_model_name
from parley.dialects.ollama.options import check_keep_alive, read_options
from parley.dialects.ollama.refusal_wording import OllamaWording, invalid_member_error
from parley.dialects.reply import Acknowledgement, Answer, UnstreamedReply
from parley.dialects.request_context import RequestContext
from parley.errors import ContextLength, ParleyError, UnknownModel, UnsuitableModel
from parley.types import Event, PoolingOptions, PromptVector, Request, TextPrompt, Usage

MAX_TEXTS = 2048
MAX_DIMENSIONS = 2**31 - 1


def read_ollama_embed(rules: OllamaRules, body: bytes, context: RequestContext) -> OllamaEmbedReply | Answer:
    """Read texts to embed; without any the answer is empty. Raises BadRequest."""
    fields = decode_fields(body, OllamaWording("EmbedRequest"))
    if fields.raw_value("model") in (None, ""):
        raise UnknownModel("model '' not found", field="model")
    name, window = _read_common(fields, rules, context)
    texts = _read_texts(fields)
    dimensions = fields.integer("dimensions", None, 0, MAX_DIMENSIONS) or None
    truncate = fields.boolean("truncate", True)
    if not texts:
        check_served(name, context)
        return Acknowledgement(*go_answer({"model": name, "embeddings": []}))
    return OllamaEmbedReply(name, texts, PoolingOptions(dimensions, normalize=True), context, window, truncate=truncate)


def read_ollama_embeddings(rules: OllamaRules, body: bytes, context: RequestContext) -> SingleEmbeddingReply | Answer:
    """Read one text to embed; an empty one has no vector. Raises BadRequest."""
    fields = decode_fields(body, OllamaWording("EmbeddingRequest"))
    name, window = _read_common(fields, rules, context)
    text = fields.string("prompt", "")
    if not text:
        check_served(name, context)
        return Acknowledgement(*go_answer({"embedding": []}))
    return SingleEmbeddingReply(name, [text], PoolingOptions(normalize=False), context, window, truncate=True)


def _read_common(fields: Fields, rules: OllamaRules, context: RequestContext) -> tuple[str, int | None]:
    """Return the model's name and the request's window in tokens. The other options have no effect on vectors.

    Raises BadRequest.
    """
    name = read_ollama_model_name(fields)
    check_keep_alive(fields, rules)
    window = read_options(fields, rules, context).context_limit
    if window is None and fields.free_object("options").get("num_ctx") is not None:  # 0: no room for any text
        raise invalid_member_error("options.num_ctx", NO_ROOM)
    return name, window


def _read_texts(fields: Fields) -> list[str]:
    """Return the texts. One alone is left out if it is empty; of several, some may be. Raises BadRequest."""
    value = fields.raw_value("input")
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise invalid_member_error("input", "invalid input type")
    return fields.array("input", cap=MAX_TEXTS)


class OllamaEmbedReply(UnstreamedReply):
    """A request for the vectors of texts. ``window``: tokens that a text may have, None: as many as for the model."""

    content_type = JSON_TYPE

    def __init__(
        self,
        name: str,
        texts: list[str],
        pooling: PoolingOptions,
        context: RequestContext,
        window: int | None,
        *,
        truncate: bool,
    ):
        self.name = name
        longest = min(window or context.context_length, context.context_length) or None
        self.request = Request(
            id=context.unique_id,
            model=name,
            prompts=[TextPrompt(text) for text in texts],
            pooling=pooling,
            max_prompt_tokens=longest if truncate else None,
            kept_side="head",
            context_limit=window,
        )
        self._vectors: dict[int, bytes] = {}

    def add_events(self, events: Sequence[Event]) -> None:
        """Keep the vectors of these events by text."""
        for event in events:
            if isinstance(event, PromptVector):
                self._vectors[event.prompt] = event.values

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return the errors that these routes word in their own way."""
        match error:
            case UnknownModel():
                return go_answer({"error": f'model "{error.name}" not found, try pulling it first'}, 404)
            case ContextLength():
                is_cut = self.request.max_prompt_tokens is not None
                return go_answer({"error": NO_ROOM if is_cut else INPUT_TOO_LONG}, 400)
            case UnsuitableModel():
                return go_answer({"error": f'"{self.name}" does not support embeddings'}, 400)
        return None

    def render_body(self, usage: Usage) -> bytes:
        """Return the vectors, whose numbers have as many digits as their 24 bits need."""
        answer: dict[str, Any] = {
            "model": self.name,
            "embeddings": [self.vector(number) for number in range(len(self._vectors))],
        }
        if self.timings is not None:
            answer["total_duration"] = duration_nanoseconds(self.timings.total)
            answer["load_duration"] = duration_nanoseconds(self.timings.validation + self.timings.queue)
        return encode_go(answer | {"prompt_eval_count": usage.prompt_tokens})

    def vector(self, number: int) -> list[float | None]:
        """Return the vector of a text."""
        return list(map(vectors.shortest_float32, vectors.vector_numbers(self._vectors[number])))


class SingleEmbeddingReply(OllamaEmbedReply):
    """A request for the vector of one text, in the older form."""

    def render_body(self, usage: Usage) -> bytes:
        """Return the vector."""
        return encode_go({"embedding": vectors.vector_numbers(self._vectors[0])})
