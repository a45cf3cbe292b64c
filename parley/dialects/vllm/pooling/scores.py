"""``POST /score`` and ``/rerank`` as vLLM answers them: how well two texts fit together.

A single text on the first side is compared with each on the second; several are compared pairwise, in their order. A
classifier with one class, a cross-encoder, reads the two texts of a pair at once, and its score counts. With an
embedding model every text is embedded once, as in ``/v1/embeddings``, and the cosine of the two vectors counts. With a
late-interaction model, which makes a vector of each token, every token of the first text counts with the largest cosine
that it has with one of the second (ColBERT, arXiv 2004.12832, section 3.3).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from parley.dialects import vectors
from parley.dialects.dialect import Answer, RequestContext, UnstreamedReply
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import extras
from parley.dialects.openai.embeddings import MAX_EMBEDDING_INPUTS
from parley.dialects.openai.prompts import MAX_PROMPT_SIZE
from parley.dialects.openai.shared import MAX_TOKENS, unsupported_member
from parley.dialects.vllm import requests, shared
from parley.dialects.vllm.pooling import embeddings
from parley.errors import Incapable, Invalid
from parley.types import Event, PoolingOptions, Prompt, PromptVector, Request, Text, TextPair, Usage

MEMBER_PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
SCORE_MEMBERS = dict.fromkeys(name for pair in MEMBER_PAIRS for name in pair)
UNEVEN_SENTENCE = "Input lengths must be either 1:1, 1:N or N:N"


def read_score_request(body: bytes, context: RequestContext) -> ScoreReply | Answer:
    """Read a score request. Raises BadRequest."""
    return requests.read_vllm_request(ScoreReply, body, context)


def read_rerank_request(body: bytes, context: RequestContext) -> RerankReply | Answer:
    """Read a rerank request. Raises BadRequest."""
    return requests.read_vllm_request(RerankReply, body, context)


def fits_score(body: Fields) -> bool:
    """True if a body has texts to score."""
    return _member_pair(body.present_names(SCORE_MEMBERS)) is not None


def fits_rerank(body: Fields) -> bool:
    """True if a body has texts to rank."""
    return body.has_value("query") and body.has_value("documents")


def _member_pair(names: Collection[str]) -> tuple[str, str] | None:
    return next((pair for pair in MEMBER_PAIRS if pair[0] in names and pair[1] in names), None)


def pair_texts(first_side: list[Text], second_side: list[Text], context: RequestContext) -> list[Prompt]:
    """Return the pairs that a cross-encoder reads. Raises Incapable for a model with several classes."""
    if len(context.labels) != 1:
        raise Incapable(
            f"The model has {len(context.labels)} classes, but pairs of texts are scored by models with one.",
            field="model",
        )
    firsts = first_side if len(first_side) > 1 else first_side * len(second_side)
    return [TextPair(first, second) for first, second in zip(firsts, second_side, strict=True)]


class _TextPairReply(UnstreamedReply):
    """A request that compares ``first_texts``, or the only one of them, with ``second_texts``, pair by pair."""

    field_names: ClassVar[Mapping[str, str]] = {"prompt": "documents"}

    def __init__(self, body: Fields, context: RequestContext, first_texts: list[str], second_texts: list[str]):
        _check_score_options(body)
        first_limit = _read_token_limit(body, "max_tokens_per_query", context)
        second_limit = _read_token_limit(body, "max_tokens_per_doc", context)
        embeddings.check_pooling(body, context)
        extra_members = extras.read_pooling_extras(body, context)
        if len(first_texts) not in (1, len(second_texts)):
            raise Invalid(UNEVEN_SENTENCE)
        special, use_activation = body.boolean("add_special_tokens", True), body.boolean("use_activation", None)
        first_prompts = [Text(text, special, max_tokens=first_limit) for text in first_texts]
        second_prompts = [Text(text, special, max_tokens=second_limit) for text in second_texts]
        self._reads_pairs = bool(context.labels)
        self._compares_tokens = "token_embed" in context.pooling_tasks and "embed" not in context.pooling_tasks
        prompts: list[Prompt] = [*first_prompts, *second_prompts]
        if self._reads_pairs:
            prompts = pair_texts(first_prompts, second_prompts, context)
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=prompts,
            **extra_members.request_members,
            pooling=PoolingOptions(normalize=use_activation, task="classify")
            if self._reads_pairs
            # a cosine has no activation
            else PoolingOptions(normalize=True, task="token_embed" if self._compares_tokens else "embed"),
        )
        self._first_count, self._second_texts = len(first_texts), second_texts
        self._answer_id = requests.choose_answer_id(context, extra_members.client_id or context.unique_id)
        self._context = context
        self._vectors: dict[int, PromptVector] = {}  # as lists of Python floats they would take eight times the memory

    def add_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, PromptVector):
                self._vectors[event.prompt] = event

    def pair_scores(self) -> list[float]:
        """Return one score for each text of the second side."""
        if self._reads_pairs:
            return [vectors.vector_numbers(answer.values)[0] for _, answer in sorted(self._vectors.items())]
        if self._compares_tokens:
            return [
                vectors.max_similarity(first, self._vectors[self._first_count + index])
                for index, first in enumerate(self._first_vectors())
            ]
        scores, first_vector = [], vectors.vector_numbers(self._vectors[0].values)
        for index in range(len(self._second_texts)):
            if 0 < index < self._first_count:
                first_vector = vectors.vector_numbers(self._vectors[index].values)
            second_vector = vectors.vector_numbers(self._vectors[self._first_count + index].values)
            scores.append(vectors.clamped_cosine(first_vector, second_vector))
        return scores

    def _first_vectors(self) -> list[PromptVector]:
        """Return the numbers of the first text of each pair."""
        count = len(self._second_texts)
        return [self._vectors[0]] * count if self._first_count == 1 else [self._vectors[i] for i in range(count)]


class ScoreReply(_TextPairReply):
    """A score request, which has one of several pairs of member names."""

    def __init__(self, body: Fields, context: RequestContext):
        texts = {name: _read_side(body, name) for name in body.present_names(SCORE_MEMBERS)}
        pair = _member_pair(texts)
        if pair is None:
            raise body.missing_member(next((other for one, other in MEMBER_PAIRS if one in texts), MEMBER_PAIRS[0][0]))
        super().__init__(body, context, texts[pair[0]], texts[pair[1]])

    def render_body(self, usage: Usage) -> bytes:
        """Return the scores as JSON, in the order of the second side's texts."""
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(self.pair_scores())]
        return encode_json(
            {
                "id": f"score-{self._answer_id}",
                "object": "list",
                "created": self._context.created,
                "model": self.request.model,
                "data": data,
                "usage": shared.embedding_usage(usage),
            }
        )


class RerankReply(_TextPairReply):
    """A rerank request: a query and documents."""

    def __init__(self, body: Fields, context: RequestContext):
        if body.string("query", None) is None:  # a single text, not a list
            raise body.missing_member("query")
        if not body.has_value("documents"):
            raise body.missing_member("documents")
        super().__init__(body, context, _read_side(body, "query"), _read_side(body, "documents"))
        self._top_n = body.integer("top_n", 0, 0)

    @property
    def document_count(self) -> int:
        """The number of documents."""
        return len(self._second_texts)

    def ranking(self) -> list[tuple[int, float]]:
        """Return the places of the documents with their scores, the highest first; at most ``top_n`` if positive."""
        ranked = sorted(enumerate(self.pair_scores()), key=lambda place: place[1], reverse=True)
        return ranked[: self._top_n if self._top_n > 0 else None]

    def render_body(self, usage: Usage) -> bytes:
        """Return the documents as JSON, those with the highest scores first."""
        texts = self._second_texts
        return encode_json(
            {
                "id": f"score-{self._answer_id}",
                "model": self.request.model,
                "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
                "results": [
                    {"index": index, "document": {"text": texts[index], "multi_modal": None}, "relevance_score": score}
                    for index, score in self.ranking()
                ],
            }
        )


def _read_token_limit(body: Fields, name: str, context: RequestContext) -> int | None:
    """Return the number of tokens that each text of a side is cut to; None for 0, which means no limit."""
    limit = body.integer(name, 0, 0, MAX_TOKENS)
    if context.context_length and limit >= context.context_length:
        raise Invalid(f"{name} ({limit}) must be less than max_model_len ({context.context_length}).")
    return limit or None


def _check_score_options(body: Fields) -> None:
    """Refuse members that no model here implements; an empty one asks for nothing."""
    if body.string("instruction", ""):
        raise unsupported_member(body, "instruction", "A model that takes an instruction is")


def _read_side(body: Fields, member: str) -> list[str]:
    try:
        texts = body.strings(member, cap=MAX_EMBEDDING_INPUTS, total=MAX_PROMPT_SIZE)
    except Invalid as error:
        error.field = error.field or member  # the original's sentence about an empty text does not say which
        raise
    if not texts:
        raise body.empty_member(member, "array")
    return texts
