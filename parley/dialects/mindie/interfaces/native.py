"""MindIE's own interface: ``POST /infer`` and ``/infer_token``, both for text and for token ids.

A stream reports with each token the time since the previous one; for the first token, this is the prefill time.
"""

from __future__ import annotations

from typing import Any

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces.answers import SingleChoiceReply, StreamPiece, shared_request_members
from parley.dialects.mindie.members import constraints, inputs, parameters
from parley.dialects.mindie.refusal_wording import MINDIE_WORDING
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import data_event
from parley.types import OutputOptions, Prompt, Request, StopConditions, TokensPrompt, Usage

DEFAULT_TOKENS = 20  # default of max_new_tokens


def read_mindie_native(rules: MindieRules, body: bytes, context: RequestContext) -> NativeReply:
    """Read a request. Raises BadRequest."""
    return NativeReply(rules, decode_fields(body, MINDIE_WORDING), context)


class NativeReply(SingleChoiceReply):
    """A reply of MindIE's own interface."""

    def __init__(self, rules: MindieRules, body: Fields, context: RequestContext):
        prompt = _read_native_prompt(body, rules, context)
        parameters_object = body.object("parameters") or Fields({}, "parameters", MINDIE_WORDING)
        values = parameters.read_mindie_parameters(parameters_object, parameters.NATIVE_TABLE.under_rules(rules))
        stream = body.boolean("stream", False)
        limit = values["max_new_tokens"] or DEFAULT_TOKENS
        super().__init__(rules, inputs.NATIVE_INPUT, limit)
        self._details = bool(values["details"])
        self._first_sent = False
        self.request = Request(
            **shared_request_members(rules, context),
            model="",
            prompts=[prompt],
            sampling=parameters.mindie_sampling(values, rules),
            grammar=None if rules.strict else constraints.read_mindie_format(parameters_object),
            stop_conditions=StopConditions(max_tokens=limit, reserved_tokens=1),
            output_options=OutputOptions(ids=True, token_costs=stream),
            stream=stream,
            timeout=values["timeout"],
            priority=parameters.relative_priority(values),
        )

    def render_piece(self, piece: StreamPiece) -> bytes:
        """Return a piece as an event."""
        time = piece.elapsed_ms if piece.tokens else None
        answer: dict[str, Any] = {
            "prefill_time": None if self._first_sent else time,
            "decode_time": time if self._first_sent else None,
        }
        self._first_sent = True
        if piece.is_last:
            answer |= {"generated_text": self.whole_text, "details": self._native_details() if self._details else None}
        token_text = None if piece.is_last else piece.text
        answer["token"] = {"id": piece.token_ids, "text": token_text}
        return data_event(answer)

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        answer: dict[str, Any] = {"generated_text": self.whole_text}
        if self._details:
            details = self._native_details()
            seed = details.pop("seed")
            answer["details"] = details | {
                "generated_token_ids": [token.id for token in self.output_tokens],
                "seed": seed,
            }
        return encode_json(answer)

    def _native_details(self) -> dict[str, Any]:
        assert self.done_event is not None
        return {
            "finish_reason": self.finish_reason,
            "generated_tokens": self.done_event.usage.completion_tokens,
            "seed": self.seed,
        }


def _read_native_prompt(body: Fields, rules: MindieRules, context: RequestContext) -> Prompt:
    """Read the text or the token ids; the member's name alone decides, even if its value is null. Raises BadRequest."""
    names = [name for name in ("inputs", "input_id") if body.has_value(name) or body.is_null(name)]
    if len(names) == 2:
        raise body.member_error("inputs", "Input conflict.")
    if not names:
        raise body.member_error("inputs", inputs.NATIVE_INPUT.missing)
    if "inputs" in names:
        if body.is_null("inputs"):
            raise body.member_error("inputs", "Inputs must not be null")
        return inputs.read_prompt_text(body, inputs.NATIVE_INPUT, rules, context)
    return TokensPrompt(_read_input_ids(body))


def _read_input_ids(body: Fields) -> list[int]:
    value = body.raw_value("input_id")
    if value is None:
        raise body.member_error("input_id", "Input_id should not be empty")
    if not isinstance(value, list):
        raise body.member_error("input_id", "Parameter input_id must be an array")
    if set(map(type, value)) - {int}:
        raise body.member_error("input_id", "Parameter input_id must be integer")
    if not value or len(value) > inputs.MAX_INPUT_IDS:
        raise body.member_error(
            "input_id", f"Inputs token length must be in (0, {inputs.MAX_INPUT_IDS}], but got {len(value)}"
        )
    if min(value) < 0 or max(value) > inputs.MAX_INPUT_IDS:
        raise body.member_error("input_id", "Data element in param input_id is invalid")
    return value
