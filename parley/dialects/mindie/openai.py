"""Shared by MindIE's two OpenAI routes: model names, usage with the cost of each token, and the list of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from parley.dialects.dialect import Answer, Head
from parley.dialects.facts import Card
from parley.dialects.fields import Fields
from parley.dialects.mindie import shared
from parley.dialects.mindie.answers import MindieReply, microseconds, milliseconds
from parley.dialects.mindie.inputs import Input
from parley.dialects.mindie.parameters import Values
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import encode
from parley.errors import ParleyError, UnknownModel
from parley.types import Cost, Done, Stop, Token, Usage

DONE = b"data: [DONE]\n\n"
OWNER = "MindIE Server"


class Choice:
    """The output of one choice so far."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[Token] = []
        self.costs: list[Cost] = []
        self.done: Done | None = None

    def take(self, tokens: Sequence[Token]) -> None:
        """Collect these tokens and their costs."""
        self.tokens += tokens
        for token in tokens:
            if token.cost is not None:
                self.costs.append(token.cost)


class OpenAIReply(MindieReply):
    """A reply of an OpenAI route. ``unknown_model_text``: for a name that is not served. ``model_name``: the body's."""

    unknown: str
    model: str

    def __init__(self, rules: Rules, head: Head, known: Input, count: int):
        super().__init__(rules, known)
        self._head = head
        self._choices = [Choice() for _ in range(count)]

    def end(self, usage: Usage) -> bytes:
        """Return the mark that ends a stream."""
        return DONE

    def refusal(self, error: ParleyError) -> Answer | None:
        """Return the refusal of an unknown model, or of a prompt without tokens; None for other errors."""
        if isinstance(error, UnknownModel):
            return shared.refused(self.unknown.format(self.model))
        return super().refusal(error)

    def _envelope(self, object: str) -> dict[str, Any]:
        return {
            "id": shared.name(self._head),
            "object": object,
            "created": self._head.created,
            "model": self.request.model,
        }

    def _usage(self, usage: Usage, costs: Sequence[Cost]) -> dict[str, Any]:
        told: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens": usage.completion_tokens,
        }
        if usage.reasoning_tokens:
            told["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        told["total_tokens"] = usage.prompt_tokens + usage.completion_tokens
        if self._rules.figures:
            told["batch_size"] = [cost.rows for cost in costs]
            told["queue_wait_time"] = [microseconds(cost) for cost in costs]
        return told

    @property
    def _costs(self) -> list[Cost]:
        """The costs of the engine's steps: those of the longest choice."""
        return max((choice.costs for choice in self._choices), key=len)


def times(costs: Sequence[Cost]) -> dict[str, Any]:
    """Return the milliseconds to the first token, and between each two tokens."""
    if not costs:
        return {"prefill_time": 0, "decode_time_arr": []}
    return {"prefill_time": milliseconds(costs[0]), "decode_time_arr": [milliseconds(cost) for cost in costs[1:]]}


def model(body: Fields, rules: Rules) -> str:
    """Return the body's model name. Raises BadRequest."""
    value = body.raw("model")
    if value is None:
        if not rules.strict:
            return ""
        raise body.fail("model", "Request contains not model or model null")
    if not isinstance(value, str):
        raise body.fail("model", "Request param model must be string")
    if not value:
        raise body.fail("model", "Request param model must be not empty")
    return value


def stop(values: Values) -> Stop:
    """Return the stop conditions that the parameters ask for."""
    return Stop(
        strings=values["stop"],
        ids=values["stop_token_ids"],
        include=bool(values["include_stop_str_in_output"]),
        ignore_eos=bool(values["ignore_eos"]),
        max_tokens=values["max_tokens"],
        reserve=1,
    )


def frame(chunk: dict[str, Any]) -> bytes:
    """Encode one event of a stream."""
    return b"data: " + encode(chunk) + b"\n\n"


# -- models


def models(rules: Rules, cards: list[Card]) -> bytes:
    """Return the list of models, formatted like the original: four spaces, and "null" as the parent of base models."""
    data = []
    for card in cards:
        told = {"id": card.name, "object": "model", "owned_by": OWNER, "parent": card.root if card.folder else "null"}
        told["root"] = card.folder or rules.weights or card.name
        data.append(told if rules.strict else {"created": card.created, **told})
    return msgspec.json.format(encode({"data": data, "object": "list"}), indent=4)


def card(card: Card) -> bytes:
    """Return one model as JSON."""
    told = {"id": card.name, "object": "model", "created": card.created, "owned_by": OWNER}
    return encode(told | ({"parent": card.root} if card.folder else {}))
