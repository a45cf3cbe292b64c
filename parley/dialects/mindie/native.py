"""MindIE's own interface: ``POST /infer`` and ``/infer_token``, both for text and for token ids.

A stream reports with each token the time since the previous one; for the first token, this is the prefill time.
"""

from __future__ import annotations

from typing import Any

from parley.dialects.dialect import Head
from parley.dialects.fields import Fields, decode
from parley.dialects.mindie import constraints, inputs, parameters
from parley.dialects.mindie.answers import Piece, Single, common
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import UNREAD, encode
from parley.types import Prompt, Request, Stop, Text, Tokens, Usage, Want

TOKENS = 20  # default of max_new_tokens


def read(rules: Rules, body: bytes, head: Head) -> NativeReply:
    """Read a request. Raises BadRequest."""
    return NativeReply(rules, decode(body, UNREAD), head)


class NativeReply(Single):
    """A reply of MindIE's own interface."""

    def __init__(self, rules: Rules, body: Fields, head: Head):
        prompt = _prompt(body, rules)
        given = body.object("parameters") or Fields({}, "parameters", UNREAD)
        values = parameters.read(given, parameters.NATIVE.under(rules))
        stream = body.boolean("stream", False)
        limit = values["max_new_tokens"] or TOKENS
        super().__init__(rules, inputs.NATIVE, limit)
        self._details = bool(values["details"])
        self._begun = False
        self.request = Request(
            **common(rules, head),
            model="",
            prompts=[prompt],
            sampling=parameters.sampling(values, rules),
            grammar=None if rules.strict else constraints.read(given),
            stop=Stop(max_tokens=limit, reserve=1),
            want=Want(ids=True, costs=stream),
            stream=stream,
            timeout=values["timeout"],
            priority=parameters.priority(values),
        )

    def frame(self, piece: Piece) -> bytes:
        """Return a piece as an event."""
        time = piece.milliseconds if piece.tokens else None
        answer: dict[str, Any] = {
            "prefill_time": None if self._begun else time,
            "decode_time": time if self._begun else None,
        }
        self._begun = True
        if piece.last:
            answer |= {"generated_text": self.text, "details": self._told() if self._details else None}
        said = None if piece.last else piece.text
        answer["token"] = {"id": piece.ids, "text": said}
        return b"data: " + encode(answer) + b"\n\n"

    def body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        answer: dict[str, Any] = {"generated_text": self.text}
        if self._details:
            told = self._told()
            seed = told.pop("seed")
            answer["details"] = told | {"generated_token_ids": [token.id for token in self.tokens], "seed": seed}
        return encode(answer)

    def _told(self) -> dict[str, Any]:
        assert self.done is not None
        return {
            "finish_reason": self.reason,
            "generated_tokens": self.done.usage.completion_tokens,
            "seed": self.seed,
        }


def _prompt(body: Fields, rules: Rules) -> Prompt:
    """Read the text or the token ids; the member's name alone decides, even if its value is null. Raises BadRequest."""
    names = [name for name in ("inputs", "input_id") if body.has(name) or body.null(name)]
    if len(names) == 2:
        raise body.fail("inputs", "Input conflict.")
    if not names:
        raise body.fail("inputs", inputs.NATIVE.missing)
    if "inputs" in names:
        if body.null("inputs"):
            raise body.fail("inputs", "Inputs must not be null")
        return Text(inputs.text(body, inputs.NATIVE, rules))
    return Tokens(_ids(body))


def _ids(body: Fields) -> list[int]:
    value = body.raw("input_id")
    if value is None:
        raise body.fail("input_id", "Input_id should not be empty")
    if not isinstance(value, list):
        raise body.fail("input_id", "Parameter input_id must be an array")
    if set(map(type, value)) - {int}:
        raise body.fail("input_id", "Parameter input_id must be integer")
    if not value or len(value) > inputs.IDS:
        raise body.fail("input_id", f"Inputs token length must be in (0, {inputs.IDS}], but got {len(value)}")
    if min(value) < 0 or max(value) > inputs.IDS:
        raise body.fail("input_id", "Data element in param input_id is invalid")
    return value
