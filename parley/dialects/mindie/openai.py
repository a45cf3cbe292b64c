"""What MindIE's two OpenAI routes have in common: which model is meant, usage with what each token took, models."""

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
    """What one choice has said so far."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[Token] = []
        self.costs: list[Cost] = []
        self.done: Done | None = None

    def take(self, tokens: Sequence[Token]) -> None:
        """Put down what is told of these tokens."""
        self.tokens += tokens
        for token in tokens:
            if token.cost is not None:
                self.costs.append(token.cost)


class OpenAIReply(MindieReply):
    """``unknown``: what is said of a model that is not there. ``model`` is the name that the body has."""

    unknown: str
    model: str

    def __init__(self, rules: Rules, head: Head, known: Input, count: int):
        super().__init__(rules, known)
        self._head = head
        self._choices = [Choice() for _ in range(count)]

    def end(self, usage: Usage) -> bytes:
        return DONE

    def refusal(self, error: ParleyError) -> Answer | None:
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
        """Of the steps of the engine: those of the longest choice."""
        return max((choice.costs for choice in self._choices), key=len)


def times(costs: Sequence[Cost]) -> dict[str, Any]:
    """Milliseconds to the first token, and between each two."""
    if not costs:
        return {"prefill_time": 0, "decode_time_arr": []}
    return {"prefill_time": milliseconds(costs[0]), "decode_time_arr": [milliseconds(cost) for cost in costs[1:]]}


def model(body: Fields, rules: Rules) -> str:
    """The name of the model that is meant. Raises BadRequest."""
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
    return Stop(
        strings=values["stop"],
        ids=values["stop_token_ids"],
        include=bool(values["include_stop_str_in_output"]),
        ignore_eos=bool(values["ignore_eos"]),
        max_tokens=values["max_tokens"],
        reserve=1,
    )


def frame(chunk: dict[str, Any]) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


# -- models


def models(rules: Rules, cards: list[Card]) -> bytes:
    """In the original's spelling: sorted members, four blanks, the word null as the parent of those that have none."""
    data = []
    for card in cards:
        told = {"id": card.name, "object": "model", "owned_by": OWNER, "parent": card.root if card.folder else "null"}
        told["root"] = card.folder or rules.weights or card.name
        data.append(told if rules.strict else {"created": card.created, **told})
    return msgspec.json.format(encode({"data": data, "object": "list"}), indent=4)


def card(card: Card) -> bytes:
    told = {"id": card.name, "object": "model", "created": card.created, "owned_by": OWNER}
    return encode(told | ({"parent": card.root} if card.folder else {}))
