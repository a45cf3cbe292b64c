"""MindIE's variant of Triton's text interface: ``/v2/models/{model}/generate`` and ``…/generate_stream``.

With ``details`` it reports how many choices shared each token's step, and how many microseconds the token waited for
the step. Events have no space after ``data:``. The client's ``id`` is a label: the answer repeats it, and ``stopInfer``
accepts it.
"""

from __future__ import annotations

import re
from typing import Any

from parley.dialects.dialect import Answer, Head
from parley.dialects.fields import Fields, decode
from parley.dialects.mindie import constraints, inputs, parameters
from parley.dialects.mindie.answers import Piece, Single, common, microseconds, milliseconds
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import UNREAD, Words, answer, encode, name
from parley.dialects.wishes import Halt
from parley.types import Request, Stop, Text, Usage, Want

ID = re.compile(r"[a-zA-Z0-9_-]{1,256}")
UNSTOPPED = Words("Failed to parse context to json body.")
TOKENS = 20  # default of max_new_tokens


def read(rules: Rules, body: bytes, head: Head, *, stream: bool) -> TextReply:
    """Read a generate request. Raises BadRequest."""
    return TextReply(rules, decode(body, UNREAD), head, stream=stream)


def stop(body: bytes, head: Head) -> Halt:
    """Read which request to cancel; the answer repeats the body. Raises BadRequest."""
    fields = decode(body, UNSTOPPED)
    if "id" not in fields.names:
        raise fields.fail("id", "Not found id.")
    if fields.null("id"):
        raise fields.fail("id", "id must not be null.")
    id = label(fields)
    assert id is not None
    return Halt(id, Answer(200, body), answer(404, f"RequestId is {id} not found.", "NotFoundError"))


def label(body: Fields) -> str | None:
    """Return the client's label of its request. Raises BadRequest."""
    id = body.string("id", None)
    if id is not None and not ID.fullmatch(id):
        told = (
            "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 words in length."
        )
        raise body.fail("id", told)
    return id


class TextReply(Single):
    """A reply in Triton's format, as a stream of tokens or in one piece."""

    def __init__(self, rules: Rules, body: Fields, head: Head, *, stream: bool):
        self._id = label(body) or name(head)
        text = inputs.text(body, inputs.TRITON, rules, self._id)
        given = body.object("parameters") or Fields({}, "parameters", UNREAD)
        values = parameters.read(given, parameters.TRITON_TEXT.under(rules))
        limit = values["max_new_tokens"] or TOKENS
        super().__init__(rules, inputs.TRITON, limit)
        self._details = bool(values["details"])
        self._begun = False
        self._told = 0  # tokens sent in the frames of a stream
        self.request = Request(
            **common(rules, head, self._id),
            model=head.path["model"],
            prompts=[Text(text)],
            sampling=parameters.sampling(values, rules),
            grammar=None if rules.strict else constraints.read(given),
            stop=Stop(max_tokens=limit, reserve=1),
            want=Want(ids=True, costs=self._details),
            stream=stream,
            timeout=values["timeout"],
            priority=parameters.priority(values),
        )

    def frame(self, piece: Piece) -> bytes:
        """Return a piece as an event."""
        text = self.text if self._rules.full_text else piece.text
        told = self._named() | {"text_output": text}
        if self._details:
            cost = piece.token.cost if piece.token is not None else None
            self._told += len(piece.tokens)
            told["details"] = (self._ended() if piece.last else {"generated_tokens": self._told}) | {
                "first_token_cost": None,
                "decode_cost": None,
                "batch_size": cost.rows if cost is not None else None,
                "queue_wait_time": microseconds(cost) if cost is not None else None,
            }
            time = piece.milliseconds if cost is not None else None
            told |= {"prefill_time": None if self._begun else time, "decode_time": time if self._begun else None}
            self._begun = True
        return b"data:" + encode(told) + b"\n\n"

    def body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        told = self._named() | {"text_output": self.text}
        if self._details:
            costs = [token.cost for token in self.tokens]
            times = [milliseconds(cost) for cost in costs]
            lax = not self._rules.strict and bool(times)
            told["details"] = self._ended() | {
                "first_token_cost": times[0] if lax else None,
                "decode_cost": times[1:] if lax else None,
                "batch_size": [cost.rows for cost in costs if cost is not None],
                "queue_wait_time": [microseconds(cost) for cost in costs],
            }
        return encode(told)

    def _named(self) -> dict[str, Any]:
        return {"id": self._id, "model_name": self.request.model, "model_version": None}

    def _ended(self) -> dict[str, Any]:
        assert self.done is not None
        return {"finish_reason": self.reason, "generated_tokens": self.done.usage.completion_tokens}
