"""MindIE's variant of TGI's interface: ``POST /``, ``/generate`` and ``/generate_stream``.

It follows version 0.9.4: 20 tokens by default, and either of two members asks for all details. Strict MindIE has
neither log-probabilities nor the text of tokens and writes null.
"""

from __future__ import annotations

from typing import Any

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces.answers import SingleChoiceReply, StreamPiece, shared_request_members
from parley.dialects.mindie.members import constraints, inputs, parameters
from parley.dialects.mindie.refusal_wording import NO_PROMPT_MESSAGE, MindieErrorWording
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import data_event
from parley.types import OutputOptions, Request, StopConditions, TokenInfo, Usage

ROOT_WORDING = MindieErrorWording("Failed to parse context to json body")
GENERATE_WORDING = MindieErrorWording(NO_PROMPT_MESSAGE)
STREAM_WORDING = MindieErrorWording("Failed to parse request context to json")
DEFAULT_TOKENS = 20  # default of max_new_tokens
NO_ORIGIN_INPUTS = "Failed to get parameter `origin_inputs` in json body"  # refuses a recompute body without it


def read_mindie_any(rules: MindieRules, body: bytes, context: RequestContext) -> MindieTgiReply:
    """Read a body whose member ``stream`` selects a stream or one answer, a list of one. Raises BadRequest."""
    fields = decode_fields(body, ROOT_WORDING)
    if fields.has_value("stream") and not isinstance(fields.raw_value("stream"), bool):
        raise fields.member_error("stream", "Stream must be boolean type.")
    return MindieTgiReply(rules, fields, context, stream=fields.boolean("stream", False), as_list=True)


def read_mindie_whole(rules: MindieRules, body: bytes, context: RequestContext) -> MindieTgiReply:
    """Read a request for an answer in one piece. Raises BadRequest."""
    fields = decode_fields(body, GENERATE_WORDING)
    if not fields.has_value("inputs"):
        raise fields.member_error("inputs", NO_PROMPT_MESSAGE)
    return MindieTgiReply(rules, fields, context, stream=False)


def read_mindie_stream(rules: MindieRules, body: bytes, context: RequestContext) -> MindieTgiReply:
    """Read a request for a stream. Raises BadRequest."""
    return MindieTgiReply(rules, decode_fields(body, STREAM_WORDING), context, stream=True)


class MindieTgiReply(SingleChoiceReply):
    """A reply in TGI's format, as a stream of tokens or in one piece."""

    def __init__(
        self, rules: MindieRules, body: Fields, context: RequestContext, *, stream: bool, as_list: bool = False
    ):
        prompt = inputs.read_prompt_text(body, inputs.TGI_INPUT, rules, context)
        parameters_object = body.object("parameters") or Fields({}, "parameters", ROOT_WORDING)
        values = parameters.read_mindie_parameters(parameters_object, parameters.TGI_TABLE.under_rules(rules))
        with_prefill = bool(values["decoder_input_details"])
        if stream and with_prefill and rules.strict:
            raise parameters_object.member_error(
                "decoder_input_details", "The decoder_input_details must not be true when stream is true."
            )
        limit = values["max_new_tokens"] or DEFAULT_TOKENS
        super().__init__(rules, inputs.TGI_INPUT, limit)
        self._details = bool(values["details"] or with_prefill)
        self._with_prefill = with_prefill
        self._as_list = as_list
        self._text_start = prompt.text + " " if values["return_full_text"] else ""
        logprobs = 0 if self._details and not rules.strict else None
        self.request = Request(
            **shared_request_members(rules, context),
            model="",
            prompts=[prompt],
            sampling=parameters.mindie_sampling(values, rules),
            grammar=None if rules.strict else constraints.read_mindie_format(parameters_object),
            stop_conditions=StopConditions(strings=values["stop"], max_tokens=limit, reserved_tokens=1),
            # A frame can hold several ids, but only one log-probability.
            output_options=OutputOptions(
                ids=True,
                logprobs=logprobs,
                prompt_logprobs=logprobs if with_prefill else None,
                token_costs=stream and logprobs is None,
            ),
            stream=stream,
            max_prompt_tokens=values["truncate"],
            adapter=values["adapter_id"],
        )

    def render_piece(self, piece: StreamPiece) -> bytes:
        """Return a piece as an event."""
        token = piece.last_token
        answer: dict[str, Any] = {
            "token": {
                "id": piece.token_ids,
                "text": self.whole_text if self._rules.full_text else piece.text,
                "logprob": None if token is None or self._rules.strict else token.logprob,
                "special": None if token is None or self._rules.strict else token.is_special,
            },
            "generated_text": None,
            "details": None,
        }
        if piece.is_last:
            answer["generated_text"] = self._text_start + self.whole_text
            if self._details:
                answer["details"] = self._text_details()
                if self._with_prefill:
                    answer["details"]["prefill"] = self._prefill_objects()
        return data_event(answer)

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        answer: dict[str, Any] = {}
        if self._details:
            details = self._text_details()
            seed = details.pop("seed")
            prefill = self._prefill_objects() if self._with_prefill else []
            tokens = [self._token_member(token) for token in self.output_tokens]
            answer["details"] = details | {"prefill": prefill, "seed": seed, "tokens": tokens}
        answer["generated_text"] = self._text_start + self.whole_text
        return encode_json([answer] if self._as_list else answer)

    def _text_details(self) -> dict[str, Any]:
        assert self.done_event is not None
        return {
            "prompt_tokens": len(self.prompt_ids),
            "finish_reason": self.finish_reason,
            "generated_tokens": self.done_event.usage.completion_tokens,
            "seed": self.seed,
        }

    def _prefill_objects(self) -> list[dict[str, Any]]:
        if self.scored_prompt is None:
            return [_bare_token(token_id) for token_id in self.prompt_ids]
        return [self._token_member(token) for token in self.scored_prompt.tokens]

    def _token_member(self, token: TokenInfo) -> dict[str, Any]:
        if self._rules.strict:
            return _bare_token(token.id)
        return {"id": token.id, "logprob": token.logprob, "special": token.is_special, "text": token.text}


def _bare_token(token_id: int) -> dict[str, Any]:
    return {"id": token_id, "logprob": None, "special": None, "text": None}
