"""MindIE's variant of Triton's text interface: ``/v2/models/{model}/generate`` and ``…/generate_stream``.

With ``details`` it reports how many choices shared each token's step, and how many microseconds the token waited for
the step. Events have no space after ``data:``. The client's ``id`` is a label: the answer repeats it, and ``stopInfer``
accepts it.
"""

from __future__ import annotations

import re
from typing import Any

from parley.dialects.admin_requests import AbortRequest
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.error_answers import mindie_json_error_answer
from parley.dialects.mindie.interfaces.answers import (
    SingleChoiceReply,
    StreamPiece,
    elapsed_milliseconds,
    shared_request_members,
    waited_microseconds,
)
from parley.dialects.mindie.interfaces.request_names import request_name
from parley.dialects.mindie.members import constraints, inputs, parameters
from parley.dialects.mindie.refusal_wording import MINDIE_WORDING, MindieErrorWording
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.types import OutputOptions, Request, StopConditions, Usage

LABEL_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,256}")
STOP_WORDING = MindieErrorWording("Failed to parse context to json body.")
DEFAULT_TOKENS = 20  # default of max_new_tokens


def read_mindie_triton(rules: MindieRules, body: bytes, context: RequestContext, *, stream: bool) -> MindieTritonReply:
    """Read a generate request. Raises BadRequest."""
    return MindieTritonReply(rules, decode_fields(body, MINDIE_WORDING), context, stream=stream)


def read_stop_infer(body: bytes, context: RequestContext) -> AbortRequest:
    """Read which request to cancel; the answer repeats the body. Raises BadRequest."""
    fields = decode_fields(body, STOP_WORDING)
    if "id" not in fields.member_names:
        raise fields.member_error("id", "Not found id.")
    if fields.is_null("id"):
        raise fields.member_error("id", "id must not be null.")
    request_label = read_label(fields)
    assert request_label is not None
    return AbortRequest(
        request_label,
        Answer(200, body),
        mindie_json_error_answer(404, f"RequestId is {request_label} not found.", "NotFoundError"),
    )


def read_label(body: Fields) -> str | None:
    """Return the client's label of its request. Raises BadRequest."""
    request_label = body.string("id", None)
    if request_label is not None and not LABEL_PATTERN.fullmatch(request_label):
        message = (
            "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 words in length."
        )
        raise body.member_error("id", message)
    return request_label


class MindieTritonReply(SingleChoiceReply):
    """A reply in Triton's format, as a stream of tokens or in one piece."""

    def __init__(self, rules: MindieRules, body: Fields, context: RequestContext, *, stream: bool):
        self._answer_id = read_label(body) or request_name(context)
        prompt = inputs.read_prompt_text(body, inputs.TRITON_INPUT, rules, context, self._answer_id)
        parameters_object = body.object("parameters") or Fields({}, "parameters", MINDIE_WORDING)
        values = parameters.read_mindie_parameters(parameters_object, parameters.TRITON_TEXT_TABLE.under_rules(rules))
        limit = values["max_new_tokens"] or DEFAULT_TOKENS
        super().__init__(rules, inputs.TRITON_INPUT, limit)
        self._details = bool(values["details"])
        self._first_sent = False
        self._sent_tokens = 0  # tokens sent in the frames of a stream
        self.request = Request(
            **shared_request_members(rules, context, self._answer_id),
            model=context.path_parts["model"],
            prompts=[prompt],
            sampling=parameters.mindie_sampling(values, rules),
            grammar=None if rules.strict else constraints.read_mindie_format(parameters_object),
            stop_conditions=StopConditions(max_tokens=limit, reserved_tokens=1),
            output_options=OutputOptions(ids=True, token_costs=self._details),
            stream=stream,
            timeout=values["timeout"],
            priority=parameters.relative_priority(values),
        )

    def render_piece(self, piece: StreamPiece) -> bytes:
        """Return a piece as an event."""
        text = self.whole_text if self._rules.full_text else piece.text
        event = self._name_members() | {"text_output": text}
        if self._details:
            cost = piece.last_token.cost if piece.last_token is not None else None
            self._sent_tokens += len(piece.tokens)
            event["details"] = (self._end_members() if piece.is_last else {"generated_tokens": self._sent_tokens}) | {
                "first_token_cost": None,
                "decode_cost": None,
                "batch_size": cost.batch_rows if cost is not None else None,
                "queue_wait_time": waited_microseconds(cost) if cost is not None else None,
            }
            time = piece.elapsed_ms if cost is not None else None
            event |= {
                "prefill_time": None if self._first_sent else time,
                "decode_time": time if self._first_sent else None,
            }
            self._first_sent = True
        return b"data:" + encode_json(event) + b"\n\n"

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        answer = self._name_members() | {"text_output": self.whole_text}
        if self._details:
            # Tokens of an instance that is not parley have no costs here.
            costs = [token.cost for token in self.output_tokens if token.cost is not None]
            times = [elapsed_milliseconds(token.cost) for token in self.output_tokens]
            with_times = not self._rules.strict and bool(times)
            answer["details"] = self._end_members() | {
                "first_token_cost": times[0] if with_times else None,
                "decode_cost": times[1:] if with_times else None,
                "batch_size": [cost.batch_rows for cost in costs],
                "queue_wait_time": [waited_microseconds(cost) for cost in costs],
            }
        return encode_json(answer)

    def _name_members(self) -> dict[str, Any]:
        return {"id": self._answer_id, "model_name": self.request.model, "model_version": None}

    def _end_members(self) -> dict[str, Any]:
        assert self.done_event is not None
        return {"finish_reason": self.finish_reason, "generated_tokens": self.done_event.usage.completion_tokens}
