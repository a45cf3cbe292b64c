"""``/embed``, ``/embed_all``, ``/embed_sparse``, ``/similarity`` and the original's OpenAI routes: vectors, and cosines
of vectors.

The vectors of a sparse model have a number for each token of the vocabulary. ``/embed_sparse`` returns those that are
not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from parley.dialects import vectors
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.tei import inputs
from parley.dialects.tei.api_rules import TeiRules
from parley.dialects.tei.error_answers import EmptyInput, UnfitModel, tei_openai_error_answer
from parley.dialects.tei.inputs import TeiReply, check_batch_size
from parley.errors import InvalidValue, ParleyError
from parley.types import PoolingOptions, PromptVector, TextPrompt, Usage

MAX_DIMENSIONS = 2**31 - 1
NOT_EMBEDDING = "Model is not an embedding model"
NOT_SPARSE = "Model is not an embedding model with SPLADE pooling"
SPARSE_NOT_NORMALIZED = "`normalize` is not available for SPLADE models"
SPARSE_WITHOUT_TOKENS = "`embed_all` is not available for SPLADE models"


def read_tei_embed(rules: TeiRules, body: bytes, context: RequestContext) -> EmbedReply:
    """Read a request for vectors. Raises BadRequest."""
    return EmbedReply(rules, decode_fields(body, rules.wording), context)


def read_embed_all(rules: TeiRules, body: bytes, context: RequestContext) -> EmbedAllReply:
    """Read a request for vectors of tokens. Raises BadRequest."""
    return EmbedAllReply(rules, decode_fields(body, rules.wording), context)


def read_embed_sparse(rules: TeiRules, body: bytes, context: RequestContext) -> SparseReply:
    """Read a request for sparse vectors. Raises BadRequest."""
    return SparseReply(rules, decode_fields(body, rules.wording), context)


def read_similarity(rules: TeiRules, body: bytes, context: RequestContext) -> SimilarityReply:
    """Read a request for cosines. Raises BadRequest."""
    return SimilarityReply(rules, decode_fields(body, rules.wording), context)


def read_feature_extraction(rules: TeiRules, body: Fields, context: RequestContext) -> TeiEmbeddingReply:
    """Read a body that clients of Hugging Face send to ``/``: texts, or sentences to compare unless strict. Raises
    BadRequest."""
    if not rules.strict and isinstance(body.raw_value("inputs"), dict):
        return SimilarityReply(rules, body, context)
    if is_sparse_model(context):
        return SparseReply(rules, body, context)
    return (EmbedReply if rules.strict else FeatureReply)(rules, body, context)


def read_openai_embedding(rules: TeiRules, body: bytes, context: RequestContext) -> OpenAIEmbedReply | Answer:
    """Read a request of OpenAI's API. Its errors have a form of their own."""
    try:
        return OpenAIEmbedReply(rules, decode_fields(body, rules.wording), context)
    except ParleyError as error:
        return tei_openai_error_answer(error)


def is_sparse_model(context: RequestContext) -> bool:
    """Whether the model's vectors are sparse."""
    return "embed_sparse" in context.pooling_tasks


def _read_dimensions(body: Fields) -> int | None:
    """Return the number of dimensions of vectors. Raises BadRequest."""
    dimensions = body.integer("dimensions", None, 0, MAX_DIMENSIONS)
    if dimensions == 0:
        raise InvalidValue("`dimensions` should be positive", field="dimensions")
    return dimensions


class TeiEmbeddingReply(TeiReply):
    """A request for vectors, which a classifier does not make."""

    def check_model(self, context: RequestContext) -> None:
        """Check that the model makes vectors. Raises UnfitModel."""
        if context.labels:
            raise UnfitModel(NOT_EMBEDDING)


def _check_normalization(context: RequestContext, *, normalize: bool) -> None:
    """Check that the model's vectors can be normalized, if the request asks for it. Raises UnfitModel."""
    if normalize and is_sparse_model(context):
        raise UnfitModel(SPARSE_NOT_NORMALIZED)


class EmbedReply(TeiEmbeddingReply):
    """A request for one vector of each text."""

    def __init__(self, rules: TeiRules, body: Fields, context: RequestContext):
        prompts = inputs.read_tei_inputs(rules, body)
        dimensions, normalize = _read_dimensions(body), body.boolean("normalize", True)
        _check_normalization(context, normalize=normalize)
        pooling = PoolingOptions(dimensions, normalize, inputs.read_prompt_name(body, prompts))
        super().__init__(rules, body, context, prompts, pooling)

    def render_vectors(self, answers: list[PromptVector]) -> bytes:
        """Return a list of vectors, also for a single text."""
        return encode_json([vectors.vector_numbers(answer.values) for answer in answers])


class FeatureReply(EmbedReply):
    """Feature extraction as Hugging Face's other servers do it: a single text has a vector, not a list of one.

    ``encoding_format`` is that of OpenAI's embeddings.
    """

    def __init__(self, rules: TeiRules, body: Fields, context: RequestContext):
        super().__init__(rules, body, context)
        self._is_single = isinstance(body.raw_value("inputs"), str)
        self._encoding = body.string("encoding_format", "float", allowed=("float", "base64"))

    def render_vectors(self, answers: list[PromptVector]) -> bytes:
        """Return the vector or the vectors as JSON."""
        write = vectors.vector_base64 if self._encoding == "base64" else vectors.vector_numbers
        written = [write(answer.values) for answer in answers]
        return encode_json(written[0] if self._is_single else written)


class EmbedAllReply(TeiEmbeddingReply):
    """A request for one vector of each token."""

    def __init__(self, rules: TeiRules, body: Fields, context: RequestContext):
        prompts = inputs.read_tei_inputs(rules, body)
        prompt_name = inputs.read_prompt_name(body, prompts)
        pooling = PoolingOptions(normalize=False, prompt=prompt_name, task="token_embed")
        super().__init__(rules, body, context, prompts, pooling)

    def check_model(self, context: RequestContext) -> None:
        """Check that the model makes vectors of tokens. Raises UnfitModel."""
        if is_sparse_model(context):
            raise UnfitModel(SPARSE_WITHOUT_TOKENS)
        super().check_model(context)

    def render_vectors(self, answers: list[PromptVector]) -> bytes:
        """Return a list of vectors for each text."""
        return encode_json([vectors.vector_rows(answer.values, answer.rows) for answer in answers])


class SparseReply(TeiEmbeddingReply):
    """A request for the numbers that are not 0 of each text's vector."""

    def __init__(self, rules: TeiRules, body: Fields, context: RequestContext):
        prompts = inputs.read_tei_inputs(rules, body)
        pooling = PoolingOptions(prompt=inputs.read_prompt_name(body, prompts), task="embed_sparse")
        super().__init__(rules, body, context, prompts, pooling)

    def check_model(self, context: RequestContext) -> None:
        """Check that the model makes sparse vectors. Raises UnfitModel."""
        if not is_sparse_model(context):
            raise UnfitModel(NOT_SPARSE)

    def render_vectors(self, answers: list[PromptVector]) -> bytes:
        """Return a list of numbers for each text, with the ids of their tokens, in ascending order of these."""
        return encode_json([self._describe_weights(answer) for answer in answers])

    def _describe_weights(self, answer: PromptVector) -> list[dict[str, Any]]:
        pairs = vectors.sparse_pairs(answer.values)
        return [{"index": token, "value": vectors.shortest_float32(weight)} for token, weight in pairs]


class SimilarityReply(TeiEmbeddingReply):
    """A request for the cosine of one sentence with each of several."""

    def __init__(self, rules: TeiRules, body: Fields, context: RequestContext):
        sentences = body.object("inputs")
        if sentences is None:
            raise body.missing_member("inputs")
        source = sentences.string("source_sentence", None)
        if source is None:
            raise sentences.missing_member("source_sentence")
        other_texts = inputs.read_texts(rules, sentences, "sentences")
        check_batch_size(rules, 1 + len(other_texts), "inputs.sentences")
        if not all((source, *other_texts)):
            raise EmptyInput(inputs.EMPTY_SENTENCE, field="inputs")
        parameters = body.object("parameters")
        if parameters is None:
            parameters = body  # Hugging Face's clients send them there
        prompts = [TextPrompt(sentence) for sentence in (source, *other_texts)]
        prompt_name = parameters.string("prompt_name", None, cap=inputs.MAX_PROMPT_NAME)
        pooling = PoolingOptions(normalize=True, prompt=prompt_name)
        super().__init__(rules, body, context, prompts, pooling, parameters)

    def render_vectors(self, answers: list[PromptVector]) -> bytes:
        """Return the cosines, in the order of the sentences."""
        source, *other_vectors = (vectors.vector_numbers(answer.values) for answer in answers)
        return encode_json([vectors.shortest_float32(vectors.clamped_cosine(source, other)) for other in other_vectors])


class OpenAIEmbedReply(TeiEmbeddingReply):
    """An embedding request of OpenAI's API, with the original's answer and errors."""

    field_names: ClassVar[Mapping[str, str]] = {"prompt": "input"}

    def __init__(self, rules: TeiRules, body: Fields, context: RequestContext):
        prompts = inputs.read_tei_inputs(rules, body, "input")
        self._model = body.string("model", "", cap=256)
        self._encoding = body.string("encoding_format", "float", allowed=("float", "base64"))
        body.string("user", None)
        _check_normalization(context, normalize=True)
        pooling = PoolingOptions(dimensions=_read_dimensions(body), normalize=True)
        super().__init__(rules, body.without_members({"truncate", "truncation_direction"}), context, prompts, pooling)

    def render_refusal(self, error: ParleyError) -> Answer:
        """Return the answer to an error."""
        return tei_openai_error_answer(error)

    def render_body(self, usage: Usage) -> bytes:
        """Return the vectors in OpenAI's form."""
        self._tokens = usage.prompt_tokens
        write = vectors.vector_base64 if self._encoding == "base64" else vectors.vector_numbers
        data = [
            {"object": "embedding", "embedding": write(self._vectors[index].values), "index": index}
            for index in range(len(self._vectors))
        ]
        usage_object = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        model = self._model or next(iter(self._context.model_names), "")
        return encode_json({"object": "list", "data": data, "model": model, "usage": usage_object})
