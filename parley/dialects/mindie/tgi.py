"""MindIE's variant of TGI's interface: ``POST /``, ``/generate`` and ``/generate_stream``.

It follows version 0.9.4: 20 tokens by default, and either of two members asks for all details. Strict MindIE has
neither log-probabilities nor the text of tokens and writes null.
"""

from __future__ import annotations

from typing import Any

from parley.dialects.dialect import Head
from parley.dialects.fields import Fields, decode
from parley.dialects.mindie import constraints, inputs, parameters
from parley.dialects.mindie.answers import Piece, Single, common
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import NEITHER, Words, encode
from parley.types import Request, Stop, Text, Token, Usage, Want

ROOT = Words("Failed to parse context to json body")
EITHER = Words(NEITHER)
STREAM = Words("Failed to parse request context to json")
TOKENS = 20  # default of max_new_tokens
NO_ORIGIN = "Failed to get parameter `origin_inputs` in json body"  # refuses a recompute body without it


def either(rules: Rules, body: bytes, head: Head) -> TextReply:
    """Read a body whose member ``stream`` selects a stream or one answer, a list of one. Raises BadRequest."""
    fields = decode(body, ROOT)
    if fields.has("stream") and not isinstance(fields.raw("stream"), bool):
        raise fields.fail("stream", "Stream must be boolean type.")
    return TextReply(rules, fields, head, stream=fields.boolean("stream", False), listed=True)


def whole(rules: Rules, body: bytes, head: Head) -> TextReply:
    """Read a request for an answer in one piece. Raises BadRequest."""
    fields = decode(body, EITHER)
    if not fields.has("inputs"):
        raise fields.fail("inputs", NEITHER)
    return TextReply(rules, fields, head, stream=False)


def stream(rules: Rules, body: bytes, head: Head) -> TextReply:
    """Read a request for a stream. Raises BadRequest."""
    return TextReply(rules, decode(body, STREAM), head, stream=True)


class TextReply(Single):
    """A reply in TGI's format, as a stream of tokens or in one piece."""

    def __init__(self, rules: Rules, body: Fields, head: Head, *, stream: bool, listed: bool = False):
        text = inputs.text(body, inputs.TGI, rules)
        given = body.object("parameters") or Fields({}, "parameters", ROOT)
        values = parameters.read(given, parameters.TGI.under(rules))
        prefilled = bool(values["decoder_input_details"])
        if stream and prefilled and rules.strict:
            raise given.fail("decoder_input_details", "The decoder_input_details must not be true when stream is true.")
        limit = values["max_new_tokens"] or TOKENS
        super().__init__(rules, inputs.TGI, limit)
        self._details = bool(values["details"] or prefilled)
        self._prefilled = prefilled
        self._listed = listed
        self._before = text + " " if values["return_full_text"] else ""
        scores = 0 if self._details and not rules.strict else None
        self.request = Request(
            **common(rules, head),
            model="",
            prompts=[Text(text)],
            sampling=parameters.sampling(values, rules),
            grammar=None if rules.strict else constraints.read(given),
            stop=Stop(strings=values["stop"], max_tokens=limit, reserve=1),
            # A frame can hold several ids, but only one log-probability.
            want=Want(
                ids=True,
                logprobs=scores,
                prompt_logprobs=scores if prefilled else None,
                costs=stream and scores is None,
            ),
            stream=stream,
            truncate=values["truncate"],
            adapter=values["adapter_id"],
        )

    def frame(self, piece: Piece) -> bytes:
        """Return a piece as an event."""
        token = piece.token
        answer: dict[str, Any] = {
            "token": {
                "id": piece.ids,
                "text": self.text if self._rules.full_text else piece.text,
                "logprob": None if token is None or self._rules.strict else token.logprob,
                "special": None if token is None or self._rules.strict else token.special,
            },
            "generated_text": None,
            "details": None,
        }
        if piece.last:
            answer["generated_text"] = self._before + self.text
            if self._details:
                answer["details"] = self._told()
                if self._prefilled:
                    answer["details"]["prefill"] = self._prefill()
        return b"data: " + encode(answer) + b"\n\n"

    def body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        answer: dict[str, Any] = {}
        if self._details:
            told = self._told()
            seed = told.pop("seed")
            prefill = self._prefill() if self._prefilled else []
            tokens = [self._token(token) for token in self.tokens]
            answer["details"] = told | {"prefill": prefill, "seed": seed, "tokens": tokens}
        answer["generated_text"] = self._before + self.text
        return encode([answer] if self._listed else answer)

    def _told(self) -> dict[str, Any]:
        assert self.done is not None
        return {
            "prompt_tokens": len(self.prompt),
            "finish_reason": self.reason,
            "generated_tokens": self.done.usage.completion_tokens,
            "seed": self.seed,
        }

    def _prefill(self) -> list[dict[str, Any]]:
        if self.scored is None:
            return [_bare(id) for id in self.prompt]
        return [self._token(token) for token in self.scored.tokens]

    def _token(self, token: Token) -> dict[str, Any]:
        if self._rules.strict:
            return _bare(token.id)
        return {"id": token.id, "logprob": token.logprob, "special": token.special, "text": token.text}


def _bare(id: int) -> dict[str, Any]:
    return {"id": id, "logprob": None, "special": None, "text": None}
