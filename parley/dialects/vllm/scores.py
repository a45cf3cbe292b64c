"""``POST /score`` and ``/rerank`` as vLLM answers them for embedding models: the cosine of two texts' vectors.

A single text on the first side is compared with each on the second; several are compared pairwise, in their order.
Every text is embedded once, as in ``/v1/embeddings``. Features of models that read two texts at once are refused by
name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import mul
from typing import Any, ClassVar

from parley.dialects import vectors
from parley.dialects.dialect import Answer, Head, Whole
from parley.dialects.fields import Fields
from parley.dialects.openai import extras
from parley.dialects.openai.embeddings import MAX_INPUTS
from parley.dialects.openai.prompts import MAX_SIZE
from parley.dialects.openai.shared import MAX_TOKENS, unsupported
from parley.dialects.vllm import embeddings, requests, shared
from parley.errors import Invalid
from parley.types import Event, Pooling, Request, Text, Usage, Vector

SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
MEMBERS = dict.fromkeys(name for pair in SIDES for name in pair)
UNEVEN = "Input lengths must be either 1:1, 1:N or N:N"


def score(body: bytes, head: Head) -> ScoreReply | Answer:
    """Read a score request. Raises BadRequest."""
    return requests.read(ScoreReply, body, head)


def rerank(body: bytes, head: Head) -> RerankReply | Answer:
    """Read a rerank request. Raises BadRequest."""
    return requests.read(RerankReply, body, head)


def fits_score(body: Fields) -> bool:
    """True if a body has texts to score."""
    return _pair(body.among(MEMBERS)) is not None


def fits_rerank(body: Fields) -> bool:
    """True if a body has texts to rank."""
    return body.has("query") and body.has("documents")


def _pair(given: Collection[str]) -> tuple[str, str] | None:
    return next((pair for pair in SIDES if pair[0] in given and pair[1] in given), None)


class _Pairs(Whole):
    """A request that compares texts. ``ones`` and ``others``: the texts of the two sides."""

    names: ClassVar[Mapping[str, str]] = {"prompt": "documents"}

    def __init__(self, body: Fields, head: Head, ones: list[str], others: list[str]):
        _refuse(body)
        embeddings.check_cut(body, head)
        more = extras.pooling(body, head)
        if len(ones) not in (1, len(others)):
            raise Invalid(UNEVEN)
        special = body.boolean("add_special_tokens", True)
        self.request = Request(
            id=head.id,
            model=body.string("model", "", cap=256),
            prompts=[Text(text, special) for text in ones + others],
            **more.members,
            pooling=Pooling(normalize=True),
        )
        self._ones, self._others = len(ones), others
        self._name = requests.name(head, more.name or head.id)
        self._head = head
        self._vectors: dict[int, bytes] = {}  # as lists of Python floats they would take eight times the memory

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Vector):
                self._vectors[event.prompt] = event.values

    def scores(self) -> list[float]:
        """Return one score for each text of the second side."""
        made, one = [], vectors.numbers(self._vectors[0])
        for index in range(len(self._others)):
            if 0 < index < self._ones:
                one = vectors.numbers(self._vectors[index])
            made.append(_cosine(one, vectors.numbers(self._vectors[self._ones + index])))
        return made


class ScoreReply(_Pairs):
    """A score request, which has one of several pairs of member names."""

    def __init__(self, body: Fields, head: Head):
        given = {name: _texts(body, name) for name in body.among(MEMBERS)}
        pair = _pair(given)
        if pair is None:
            raise body.missing(next((other for one, other in SIDES if one in given), SIDES[0][0]))
        super().__init__(body, head, given[pair[0]], given[pair[1]])

    def body(self, usage: Usage) -> bytes:
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(self.scores())]
        return shared.encode(
            {
                "id": f"score-{self._name}",
                "object": "list",
                "created": self._head.created,
                "model": self.request.model,
                "data": data,
                "usage": shared.embedded(usage),
            }
        )


class RerankReply(_Pairs):
    """A rerank request: a query and documents."""

    def __init__(self, body: Fields, head: Head):
        if body.string("query", None) is None:  # a single text, not a list
            raise body.missing("query")
        if not body.has("documents"):
            raise body.missing("documents")
        super().__init__(body, head, _texts(body, "query"), _texts(body, "documents"))
        self._top = body.integer("top_n", 0)

    def body(self, usage: Usage) -> bytes:
        results = [
            {"index": index, "document": {"text": text, "multi_modal": None}, "relevance_score": score}
            for index, (text, score) in enumerate(zip(self._others, self.scores(), strict=True))
        ]
        results.sort(key=_relevance, reverse=True)
        return shared.encode(
            {
                "id": f"score-{self._name}",
                "model": self.request.model,
                "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
                "results": results[: self._top if self._top > 0 else None],
            }
        )


def _cosine(one: list[float], other: list[float]) -> float:
    """Return the cosine of two vectors of length 1, clamped against rounding errors."""
    return max(-1.0, min(1.0, sum(map(mul, one, other))))


def _relevance(result: dict[str, Any]) -> float:
    relevance: float = result["relevance_score"]
    return relevance


def _refuse(body: Fields) -> None:
    """Refuse members that a comparison of embeddings cannot implement; empty and 0 ask for nothing."""
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        if body.integer(name, 0, 0, MAX_TOKENS):
            raise unsupported(body, name, "Cutting the texts of one side is")
    if body.string("instruction", ""):
        raise unsupported(body, "instruction", "A model that takes an instruction is")
    body.boolean("use_activation", None)  # a cosine has none


def _texts(body: Fields, member: str) -> list[str]:
    texts = body.strings(member, cap=MAX_INPUTS, total=MAX_SIZE)
    if not texts:
        raise body.empty(member, "array")
    return texts
