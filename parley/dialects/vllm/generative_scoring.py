"""``POST /generative_scoring``: how probable the first of some tokens, the labels, is right after a query and an item.

The form is that of ``vllm/entrypoints/generate/generative_scoring/serving.py``. Query and item are tokenized on their
own. A prompt that leaves no room for one token loses its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import vllm_members
from parley.dialects.openai.completions import MAX_PROMPTS
from parley.dialects.reply import Answer, UnstreamedReply
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_LISTED_IDS, MAX_TOKEN_ID
from parley.dialects.vllm import requests
from parley.dialects.vllm.token_usage import embedding_usage
from parley.errors import InvalidValue
from parley.types import (
    ChoiceDelta,
    Event,
    JoinedPrompt,
    OutputOptions,
    Request,
    SamplingOptions,
    StopConditions,
    TextPrompt,
    TokensPrompt,
    Usage,
)

NO_LABELS = "label_token_ids must contain at least one token ID."
NO_ITEMS = "items must contain at least one item."
FOREIGN_LABEL = (
    "label_token_id {token_id} is out of vocabulary range [0, {size}). Please provide valid token IDs."  # as vLLM's
)


def read_scoring_request(body: bytes, context: RequestContext) -> GenerativeScoringReply | Answer:
    """Read a query, items and labels. Raises BadRequest."""
    return requests.read_vllm_request(GenerativeScoringReply, body, context)


class GenerativeScoringReply(UnstreamedReply):
    """A request for the probability of a label after each item."""

    field_names: ClassVar[Mapping[str, str]] = {"prompt": "items", "logprob_token_ids": "label_token_ids"}

    def __init__(self, body: Fields, context: RequestContext):
        salt_error = next(requests.salt_faults(body), None)
        if salt_error is not None:
            raise salt_error
        special = body.boolean("add_special_tokens", True)
        query, items = _read_text(body, "query", special=special), _read_items(body)
        self._labels = _read_labels(body, context)
        if not items:
            raise InvalidValue(NO_ITEMS)
        item_first = body.boolean("item_first", False)
        self._among_labels = body.boolean("apply_softmax", True)
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=256),
            prompts=[JoinedPrompt([item, query] if item_first else [query, item]) for item in items],
            sampling=SamplingOptions(temperature=0.0),
            stop_conditions=StopConditions(max_tokens=1, ignore_eos=True),
            output_options=OutputOptions(logprobs=0, logprob_ids=self._labels, ids=True),
            on_overflow="head",
            cache_salt=vllm_members.read_salt(body, context.headers),
            priority=vllm_members.read_priority(body, context.headers),
        )
        answer_id = requests.choose_answer_id(context, vllm_members.read_request_id(body) or context.unique_id)
        self._answer_id, self._created = f"generative-scoring-{answer_id}", context.created
        self._scores: dict[int, float] = {}

    def add_events(self, events: Sequence[Event]) -> None:
        """Keep the score of each item, by its place."""
        for event in events:
            if isinstance(event, ChoiceDelta):
                for token in event.tokens:
                    logprobs = {label.id: label.logprob for label in token.top_tokens}
                    self._scores[event.index] = self._score_labels([logprobs.get(label) for label in self._labels])

    def _score_labels(self, logprobs: list[float | None]) -> float:
        """Return the first label's probability: among the labels, or in the whole vocabulary."""
        values = [-math.inf if value is None else value for value in logprobs]
        if not self._among_labels:
            return math.exp(values[0])
        max_logprob = max(values)
        weights = [1.0 if value == max_logprob else math.exp(value - max_logprob) for value in values]
        return weights[0] / sum(weights)

    def render_body(self, usage: Usage) -> bytes:
        """Return the scores as JSON, in the order of the items."""
        data = [{"index": index, "object": "score", "score": score} for index, score in sorted(self._scores.items())]
        counts: dict[str, Any] = {
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "completion_tokens": usage.completion_tokens,
        }
        return encode_json(
            {
                "id": self._answer_id,
                "object": "list",
                "created": self._created,
                "model": self.request.model,
                "data": data,
                "usage": embedding_usage(usage) | counts,
            }
        )


def _read_labels(body: Fields, context: RequestContext) -> list[int]:
    """Return the ids of the labels without duplicates; the first one's probability is the score. Raises BadRequest."""
    name = "label_token_ids"
    if not body.has_value(name):
        raise body.missing_member(name)
    labels = body.integers(name, cap=vllm_members.MAX_LOGPROB_IDS, low=None, high=None)
    size = context.vocabulary_size or MAX_TOKEN_ID + 1
    for token_id in labels:
        if not 0 <= token_id < size:
            raise InvalidValue(FOREIGN_LABEL.format(token_id=token_id, size=size))
    if not labels:
        raise InvalidValue(NO_LABELS)
    return list(dict.fromkeys(labels))


def _read_items(body: Fields) -> list[TextPrompt | TokensPrompt]:
    """Return the items, which are all texts or all tokens. Raises BadRequest."""
    if not body.has_value("items"):
        raise body.missing_member("items")
    values, items = body.array("items", cap=MAX_PROMPTS), []
    for index, value in enumerate(values):
        member_path = f"items[{index}]"
        item = body.with_moved_member("items", value, member_path)
        if isinstance(value, str) != isinstance(values[0], str):
            raise item.mistyped_member("items", "a string" if isinstance(values[0], str) else "an array")
        items.append(_read_text(item, "items", special=False))
    return items


def _read_text(body: Fields, name: str, *, special: bool) -> TextPrompt | TokensPrompt:
    """Return a text or tokens, which may be empty. Raises BadRequest."""
    value = body.raw_value(name)
    if value is None:
        raise body.missing_member(name)
    if isinstance(value, str):
        return TextPrompt(value, special)
    if not isinstance(value, list):
        raise body.mistyped_member(name, "a string or an array of integers")
    return TokensPrompt(body.integers(name, cap=MAX_LISTED_IDS, low=0, high=MAX_TOKEN_ID))
