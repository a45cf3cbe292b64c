"""``POST /score`` and ``/rerank`` as vLLM answers them: how well two texts fit together.

A single text on the first side is compared with each on the second; several are compared pairwise, in their order. A
classifier with one class, a cross-encoder, reads the two texts of a pair at once, and its score counts. With an
embedding model every text is embedded once, as in ``/v1/embeddings``, and the cosine of the two vectors counts. With a
late-interaction model, which makes a vector of each token, every token of the first text counts with the largest cosine
that it has with one of the second (ColBERT, arXiv 2004.12832, section 3.3).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from parley.dialects import vectors
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import vllm_members
from parley.dialects.openai.common_members import MAX_TOKENS, unsupported_member_error
from parley.dialects.openai.embeddings import MAX_EMBEDDING_INPUTS
from parley.dialects.openai.media_parts import media_reader
from parley.dialects.openai.messages import MAX_CONTENT_PARTS
from parley.dialects.openai.prompts import MAX_PROMPT_SIZE
from parley.dialects.reply import Answer, UnstreamedReply
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import requests
from parley.dialects.vllm.pooling import embeddings
from parley.dialects.vllm.pooling.content_parts import read_pooling_parts
from parley.dialects.vllm.token_usage import embedding_usage
from parley.errors import InvalidValue, UnsuitableModel
from parley.types import Event, PlacedMedia, PoolingOptions, Prompt, PromptVector, Request, TextPair, TextPrompt, Usage

MEMBER_PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
SCORE_MEMBERS = dict.fromkeys(name for pair in MEMBER_PAIRS for name in pair)
TOKEN_LIMITS = ("max_tokens_per_query", "max_tokens_per_doc")
UNEVEN_SENTENCE = "Input lengths must be either 1:1, 1:N or N:N"


class ScoreInput(NamedTuple):
    """One text to compare, and the items within it. ``parts``: as the client sent them; None for a plain text."""

    text: str
    media: list[PlacedMedia]
    parts: list[Any] | None = None


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


def pair_texts(first_side: list[TextPrompt], second_side: list[TextPrompt], context: RequestContext) -> list[Prompt]:
    """Return the pairs that a cross-encoder reads. Raises UnsuitableModel for a model with several classes."""
    if len(context.labels) != 1:
        raise UnsuitableModel(
            f"The model has {len(context.labels)} classes, but pairs of texts are scored by models with one.",
            field="model",
        )
    firsts = first_side if len(first_side) > 1 else first_side * len(second_side)
    return [TextPair(first, second) for first, second in zip(firsts, second_side, strict=True)]


class _TextPairReply(UnstreamedReply):
    """A request that compares ``first_side``, or the only input of it, with ``second_side``, pair by pair."""

    field_names: ClassVar[Mapping[str, str]] = {"prompt": "documents"}

    def __init__(
        self, body: Fields, context: RequestContext, first_side: list[ScoreInput], second_side: list[ScoreInput]
    ):
        _check_score_options(body)
        first_limit = _read_token_limit(body, TOKEN_LIMITS[0], context)
        second_limit = _read_token_limit(body, TOKEN_LIMITS[1], context)
        embeddings.check_pooling(body, context)
        extra_members = vllm_members.read_vllm_pooling_members(body, context)
        if len(first_side) not in (1, len(second_side)):
            raise InvalidValue(UNEVEN_SENTENCE)
        special, use_activation = body.boolean("add_special_tokens", True), body.boolean("use_activation", None)
        first_prompts, second_prompts = (
            [TextPrompt(item.text, special, max_tokens=limit, media=item.media) for item in side]
            for side, limit in ((first_side, first_limit), (second_side, second_limit))
        )
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
        self._first_count, self._second_side = len(first_side), second_side
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
        for index in range(len(self._second_side)):
            if 0 < index < self._first_count:
                first_vector = vectors.vector_numbers(self._vectors[index].values)
            second_vector = vectors.vector_numbers(self._vectors[self._first_count + index].values)
            scores.append(vectors.clamped_cosine(first_vector, second_vector))
        return scores

    def _first_vectors(self) -> list[PromptVector]:
        """Return the numbers of the first text of each pair."""
        count = len(self._second_side)
        return [self._vectors[0]] * count if self._first_count == 1 else [self._vectors[i] for i in range(count)]


class ScoreReply(_TextPairReply):
    """A score request, which has one of several pairs of member names."""

    def __init__(self, body: Fields, context: RequestContext):
        sides = {name: _read_side(body, name, context) for name in body.present_names(SCORE_MEMBERS)}
        pair = _member_pair(sides)
        if pair is None:
            raise body.missing_member(next((other for one, other in MEMBER_PAIRS if one in sides), MEMBER_PAIRS[0][0]))
        super().__init__(body, context, sides[pair[0]], sides[pair[1]])

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
                "usage": embedding_usage(usage),
            }
        )


class RerankReply(_TextPairReply):
    """A rerank request: a query and documents."""

    def __init__(self, body: Fields, context: RequestContext):
        if not body.has_value("query"):
            raise body.missing_member("query")
        if not isinstance(body.raw_value("query"), dict):
            body.string("query", None)  # a single text, not a list
        if not body.has_value("documents"):
            raise body.missing_member("documents")
        super().__init__(body, context, _read_side(body, "query", context), _read_side(body, "documents", context))
        self._top_n = body.integer("top_n", 0, 0)

    @property
    def document_count(self) -> int:
        """The number of documents."""
        return len(self._second_side)

    def document_text(self, index: int) -> str:
        """Return the text of a document."""
        return self._second_side[index].text

    def ranking(self) -> list[tuple[int, float]]:
        """Return the places of the documents with their scores, the highest first; at most ``top_n`` if positive."""
        ranked = sorted(enumerate(self.pair_scores()), key=lambda pair: pair[1], reverse=True)
        return ranked[: self._top_n if self._top_n > 0 else None]

    def render_body(self, usage: Usage) -> bytes:
        """Return the documents as JSON, those with the highest scores first."""
        documents = [
            {"text": item.text if item.parts is None else None, "multi_modal": item.parts} for item in self._second_side
        ]
        return encode_json(
            {
                "id": f"score-{self._answer_id}",
                "model": self.request.model,
                "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
                "results": [
                    {"index": index, "document": documents[index], "relevance_score": score}
                    for index, score in self.ranking()
                ],
            }
        )


def _read_token_limit(body: Fields, name: str, context: RequestContext) -> int | None:
    """Return the number of tokens that each text of a side is cut to; None for 0, which means no limit."""
    limit = body.integer(name, 0, 0, MAX_TOKENS)
    if context.context_length and limit >= context.context_length:
        raise InvalidValue(f"{name} ({limit}) must be less than max_model_len ({context.context_length}).")
    return limit or None


def _check_score_options(body: Fields) -> None:
    """Refuse members that no model here implements; an empty one asks for nothing."""
    if body.string("instruction", ""):
        raise unsupported_member_error(body, "instruction", "A model that takes an instruction is")


def _read_side(body: Fields, member: str, context: RequestContext) -> list[ScoreInput]:
    """Return the inputs of a side: texts, or objects with parts of a content. Raises BadRequest."""
    value = body.raw_value(member)
    if any(isinstance(item, dict) for item in (value if isinstance(value, list) else [value])):
        return _read_parts_side(body, member, context)
    try:
        texts = body.strings(member, cap=MAX_EMBEDDING_INPUTS, total=MAX_PROMPT_SIZE)
    except InvalidValue as error:
        error.field = error.field or member  # the original's sentence about an empty text does not say which
        raise
    if not texts:
        raise body.empty_member(member, "array")
    return [ScoreInput(text, []) for text in texts]


def _read_parts_side(body: Fields, member: str, context: RequestContext) -> list[ScoreInput]:
    """Return the inputs of a side with objects, which have their parts in ``content``. Raises BadRequest."""
    value = body.raw_value(member)
    items = value if isinstance(value, list) else [value]
    as_objects = [{"content": [{"type": "text", "text": item}]} if isinstance(item, str) else item for item in items]
    reader = media_reader(body, requests.VLLM_RULES, context)
    inputs = []
    fields = body.with_members({member: as_objects}).objects(member, cap=MAX_EMBEDDING_INPUTS)
    for item, item_fields in zip(items, fields, strict=True):
        if not item_fields.has_value("content"):
            raise item_fields.missing_member("content")
        content = read_pooling_parts(item_fields.objects("content", cap=MAX_CONTENT_PARTS), reader)
        if not content.text and not content.media:
            raise item_fields.empty_member("content", "array")
        if content.media and context.labels:
            raise unsupported_member_error(body, member, "Media in pairs that a cross-encoder reads are")
        if content.media and any(body.raw_value(name) for name in TOKEN_LIMITS):
            raise unsupported_member_error(body, member, "Media with a limit of tokens are")
        inputs.append(ScoreInput(content.text, content.media, item["content"] if isinstance(item, dict) else None))
    return inputs
