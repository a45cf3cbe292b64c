"""Shared by MindIE's two OpenAI routes: model names, usage with the cost of each token, and the list of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from parley.dialects.facts import ModelCard
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.error_answers import body_refusal_answer
from parley.dialects.mindie.interfaces.answers import MindieReply, elapsed_milliseconds, waited_microseconds
from parley.dialects.mindie.interfaces.request_names import request_name
from parley.dialects.mindie.members.inputs import PromptInput
from parley.dialects.mindie.members.parameters import ParameterValues
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import STREAM_DONE
from parley.errors import ParleyError, UnknownModel
from parley.types import ChoiceDone, StopConditions, TokenCost, TokenInfo, Usage

MODEL_OWNER = "MindIE Server"


class MindieChoice:
    """The output of one choice so far."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[TokenInfo] = []
        self.costs: list[TokenCost] = []
        self.done_event: ChoiceDone | None = None

    def take_tokens(self, tokens: Sequence[TokenInfo]) -> None:
        """Collect these tokens and their costs."""
        self.tokens += tokens
        for token in tokens:
            if token.cost is not None:
                self.costs.append(token.cost)


class MindieOpenAIReply(MindieReply):
    """A reply of an OpenAI route. ``unknown_model_text``: for a name that is not served. ``model_name``: the body's."""

    unknown_model_text: str
    model_name: str

    def __init__(self, rules: MindieRules, context: RequestContext, prompt_input: PromptInput, count: int):
        super().__init__(rules, prompt_input)
        self._context = context
        self._choices = [MindieChoice() for _ in range(count)]

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the mark that ends a stream."""
        return STREAM_DONE

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return the refusal of an unknown model, or of a prompt without tokens; None for other errors."""
        if isinstance(error, UnknownModel):
            return body_refusal_answer(self.unknown_model_text.format(self.model_name))
        return super().render_refusal(error)

    def _mindie_envelope(self, object_type: str) -> dict[str, Any]:
        return {
            "id": request_name(self._context),
            "object": object_type,
            "created": self._context.created,
            "model": self.request.model,
        }

    def _usage_object(self, usage: Usage, costs: Sequence[TokenCost]) -> dict[str, Any]:
        usage_object: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens": usage.completion_tokens,
        }
        if usage.reasoning_tokens:
            usage_object["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        usage_object["total_tokens"] = usage.prompt_tokens + usage.completion_tokens
        if self._rules.token_costs:
            usage_object["batch_size"] = [cost.batch_rows for cost in costs]
            usage_object["queue_wait_time"] = [waited_microseconds(cost) for cost in costs]
        return usage_object

    @property
    def _longest_costs(self) -> list[TokenCost]:
        """The costs of the engine's steps: those of the longest choice."""
        return max((choice.costs for choice in self._choices), key=len)


def token_times(costs: Sequence[TokenCost]) -> dict[str, Any]:
    """Return the milliseconds to the first token, and between each two tokens."""
    if not costs:
        return {"prefill_time": 0, "decode_time_arr": []}
    return {
        "prefill_time": elapsed_milliseconds(costs[0]),
        "decode_time_arr": [elapsed_milliseconds(cost) for cost in costs[1:]],
    }


def read_mindie_model_name(body: Fields, rules: MindieRules) -> str:
    """Return the body's model name. Raises BadRequest."""
    value = body.raw_value("model")
    if value is None:
        if not rules.strict:
            return ""
        raise body.member_error("model", "Request contains not model or model null")
    if not isinstance(value, str):
        raise body.member_error("model", "Request param model must be string")
    if not value:
        raise body.member_error("model", "Request param model must be not empty")
    return value


def mindie_stop_conditions(values: ParameterValues) -> StopConditions:
    """Return the stop conditions that the parameters ask for."""
    return StopConditions(
        strings=values["stop"],
        ids=values["stop_token_ids"],
        include_in_output=bool(values["include_stop_str_in_output"]),
        ignore_eos=bool(values["ignore_eos"]),
        max_tokens=values["max_tokens"],
        reserved_tokens=1,
    )


# -- models


def write_mindie_models(rules: MindieRules, cards: list[ModelCard]) -> bytes:
    """Return the list of models, formatted like the original: four spaces, and "null" as the parent of base models."""
    data = []
    for card in cards:
        model_object = {
            "id": card.name,
            "object": "model",
            "owned_by": MODEL_OWNER,
            "parent": card.root if card.adapter_folder else "null",
        }
        model_object["root"] = card.adapter_folder or rules.model_folder_name or card.name
        data.append(model_object if rules.strict else {"created": card.created, **model_object})
    return msgspec.json.format(encode_json({"data": data, "object": "list"}), indent=4)


def write_mindie_model(card: ModelCard) -> bytes:
    """Return one model as JSON."""
    model_object = {"id": card.name, "object": "model", "created": card.created, "owned_by": MODEL_OWNER}
    return encode_json(model_object | ({"parent": card.root} if card.adapter_folder else {}))
