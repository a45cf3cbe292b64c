"""``/predict`` and ``/rerank``: scores of classes, and of texts by how well they fit a query.

Scores are the original's for every model: a sigmoid of one class, a softmax of several. ``raw_scores`` asks for the
logits.
"""

from __future__ import annotations

from math import exp
from typing import Any

from parley.dialects import vectors
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.request_context import RequestContext
from parley.dialects.tei import inputs
from parley.dialects.tei.api_rules import TeiRules
from parley.dialects.tei.error_answers import EmptyInput, UnfitModel
from parley.dialects.tei.inputs import TeiReply
from parley.types import PoolingOptions, PromptVector, TextPair, TextPrompt

NOT_CLASSIFIER = "Model is not a classifier model"
NOT_RERANKER = "model is not a re-ranker model"
LOGITS = PoolingOptions(normalize=False, task="classify")


def read_predict(rules: TeiRules, body: bytes, context: RequestContext) -> PredictReply:
    """Read a classification request. Raises BadRequest."""
    return PredictReply(rules, decode_fields(body, rules.wording), context)


def read_tei_rerank(rules: TeiRules, body: bytes, context: RequestContext) -> TeiRerankReply:
    """Read a rerank request. Raises BadRequest."""
    return TeiRerankReply(rules, decode_fields(body, rules.wording), context)


def _score_logits(logits: list[float], *, raw: bool) -> list[float]:
    """Return the scores of a model's logits."""
    if raw:
        return logits
    if len(logits) == 1:
        logit = logits[0]
        return [1 / (1 + exp(-logit)) if logit >= 0 else exp(logit) / (1 + exp(logit))]
    largest = max(logits)
    powers = [exp(logit - largest) for logit in logits]
    return [power / sum(powers) for power in powers]


def _best_first(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items by score; of equal ones the last is first, as in the original."""
    return sorted(items, key=lambda item: item["score"])[::-1]


class PredictReply(TeiReply):
    """A request for the scores of all classes of each text or pair of texts."""

    def __init__(self, rules: TeiRules, body: Fields, context: RequestContext):
        sequences, self._is_batch = inputs.read_sequences(rules, body)
        if not context.labels:
            raise UnfitModel(NOT_CLASSIFIER)
        self._is_raw = body.boolean("raw_scores", False)
        super().__init__(rules, body, context, sequences, LOGITS)

    def render_vectors(self, answers: list[PromptVector]) -> bytes:
        """Return the classes of each text, those with the highest scores first."""
        predictions = [self._predict_classes(vectors.vector_numbers(answer.values)) for answer in answers]
        return encode_json(predictions if self._is_batch else predictions[0])

    def _predict_classes(self, logits: list[float]) -> list[dict[str, Any]]:
        scores = _score_logits(logits, raw=self._is_raw)
        labelled = zip(scores, self._context.labels, strict=True)
        return _best_first([{"score": vectors.shortest_float32(score), "label": label} for score, label in labelled])


class TextClassificationReply(PredictReply):
    """Text classification as Hugging Face's other servers do it: a single text has a list in a list."""

    def __init__(self, rules: TeiRules, body: Fields, context: RequestContext):
        super().__init__(rules, body, context)
        self._is_batch = True


class TeiRerankReply(TeiReply):
    """A request for the scores of texts, given a query."""

    def __init__(self, rules: TeiRules, body: Fields, context: RequestContext):
        query = body.string("query", None)
        if query is None:
            raise body.missing_member("query")
        self._texts = inputs.read_texts(rules, body, "texts")
        if len(context.labels) != 1:
            raise UnfitModel(NOT_RERANKER)
        if not query and not all(self._texts):
            raise EmptyInput(inputs.EMPTY_SENTENCE, field="texts")
        self._is_raw, self._with_text = body.boolean("raw_scores", False), body.boolean("return_text", False)
        pairs = [TextPair(TextPrompt(query), TextPrompt(text)) for text in self._texts]
        super().__init__(rules, body, context, pairs, LOGITS)

    def render_vectors(self, answers: list[PromptVector]) -> bytes:
        """Return the texts, those with the highest scores first."""
        ranks: list[dict[str, Any]] = []
        for index, answer in enumerate(answers):
            (score,) = _score_logits(vectors.vector_numbers(answer.values), raw=self._is_raw)
            text = {"text": self._texts[index]} if self._with_text else {}
            ranks.append({"index": index, **text, "score": vectors.shortest_float32(score)})
        return encode_json(_best_first(ranks))
