"""``POST /`` of a server whose model is an encoder: vectors of texts, and the similarity of sentences.

The bodies are those that Hugging Face's clients send for the tasks "feature extraction" and "sentence similarity". TGI
itself serves no encoders; the members besides ``inputs`` are those of Text Embeddings Inference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects import vectors
from parley.dialects.dialect import RequestContext, UnstreamedReply
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.types import Event, PoolingOptions, PromptVector, Request, Text, TruncationSide, Usage

MAX_TEXTS = 2048
MAX_CHARACTERS = 1 << 25  # of all texts together
MAX_PROMPT_NAME = 256  # characters
MAX_DIMENSIONS = 2**31 - 1
VECTOR_WRITERS: dict[str, Callable[[bytes], Any]] = {  # by encoding_format
    "float": vectors.vector_numbers,
    "base64": vectors.vector_base64,
}
KEPT_SIDES: dict[str, TruncationSide] = {"left": "tail", "right": "head"}  # by the side that is cut off


def read_feature_request(body: Fields, context: RequestContext) -> FeatureReply | SimilarityReply:
    """Read a text, texts, or sentences to compare. Raises BadRequest."""
    sentences = body.object("inputs") if isinstance(body.raw_value("inputs"), dict) else None
    return FeatureReply(body, context) if sentences is None else SimilarityReply(body, sentences, context)


class _VectorReply(UnstreamedReply):
    """A request for the vectors of texts. ``pooling``: how they are computed."""

    field_names: ClassVar[Mapping[str, str]] = {"prompt": "inputs"}

    def __init__(self, body: Fields, context: RequestContext, texts: list[str], pooling: PoolingOptions):
        direction = body.string("truncation_direction", "right").lower()
        if direction not in KEPT_SIDES:
            raise body.member_error("truncation_direction", f"must be one of {', '.join(KEPT_SIDES)}.")
        self.request = Request(
            id=context.unique_id,
            model="",
            prompts=[Text(text) for text in texts],
            pooling=pooling,
            max_prompt_tokens=context.context_length or None if body.boolean("truncate", False) else None,
            truncation_side=KEPT_SIDES[direction],
        )
        self._vectors: dict[int, bytes] = {}

    def add_events(self, events: Sequence[Event]) -> None:
        """Keep the vectors of these events by text."""
        for event in events:
            if isinstance(event, PromptVector):
                self._vectors[event.prompt] = event.values

    def text_vectors(self) -> list[bytes]:
        """Return the vectors in the order of the texts."""
        return [self._vectors[index] for index in range(len(self._vectors))]


class FeatureReply(_VectorReply):
    """Feature extraction: a vector for a text, a list of vectors for a list of texts."""

    def __init__(self, body: Fields, context: RequestContext):
        self._is_single = isinstance(body.raw_value("inputs"), str)
        self._write_vector = VECTOR_WRITERS[body.string("encoding_format", "float", allowed=tuple(VECTOR_WRITERS))]
        options = PoolingOptions(
            dimensions=body.integer("dimensions", None, 1, MAX_DIMENSIONS),
            normalize=body.boolean("normalize", True),
            prompt=body.string("prompt_name", None, cap=MAX_PROMPT_NAME),
        )
        super().__init__(body, context, _read_texts(body, "inputs"), options)

    def render_body(self, usage: Usage) -> bytes:
        """Return the vector or the vectors as JSON."""
        answers = [self._write_vector(values) for values in self.text_vectors()]
        return encode_json(answers[0] if self._is_single else answers)


class SimilarityReply(_VectorReply):
    """Sentence similarity: the cosine of one sentence with each of several."""

    def __init__(self, body: Fields, inputs: Fields, context: RequestContext):
        source = inputs.string("source_sentence", None)
        if source is None:
            raise inputs.missing_member("source_sentence")
        options = PoolingOptions(normalize=True, prompt=body.string("prompt_name", None, cap=MAX_PROMPT_NAME))
        super().__init__(body, context, [source, *_read_texts(inputs, "sentences")], options)

    def render_body(self, usage: Usage) -> bytes:
        """Return the cosines as JSON, in the order of the sentences."""
        source, *others = map(vectors.vector_numbers, self.text_vectors())
        return encode_json([vectors.clamped_cosine(source, other) for other in others])


def _read_texts(body: Fields, name: str) -> list[str]:
    texts = body.strings(name, cap=MAX_TEXTS, total=MAX_CHARACTERS)
    if not texts:
        raise body.empty_member(name, "array") if body.has_value(name) else body.missing_member(name)
    return texts
