"""A gRPC call in the form of an HTTP request: the message as body, the answers as one message or as frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from google.protobuf.message import DecodeError

from parley.dialects.dialect import Answer, Head, Reply
from parley.dialects.facts import Facts
from parley.dialects.triton.errors import Internal
from parley.dialects.triton.errors import error as answered
from parley.dialects.triton.rpc import control, infer
from parley.dialects.triton.rpc.frames import failure, frame
from parley.dialects.triton.rpc.messages import Message
from parley.errors import NotFound, ParleyError, UnknownModel
from parley.types import Event, Usage

TYPE = b"application/x-protobuf"
UNREADABLE = "The message could not be read."
UNNAMED = "Request for unknown model: '' is not found"


class InferenceReply(Reply):
    """A reply in protobuf messages: frames in a stream, else one message."""

    type = TYPE
    media_type: ClassVar[str] = TYPE.decode()
    ping: ClassVar[bytes] = b""

    def __init__(self, inference: infer.Inference, *, stream: bool):
        self.request = inference.request
        self.request.stream = stream
        self._inference = inference
        self._answer: Message = None

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Return the frame that these events produce, if any."""
        answer = self._inference.answer(events)
        if answer is None:
            return b""
        return frame(infer.streamed(answer, final=self._inference.ended).SerializeToString())

    def end(self, usage: Usage) -> bytes:
        """Return nothing: the last answer is marked as final."""
        return b""

    def fail(self, error: ParleyError) -> bytes:
        """Return the error frame that ends the answers."""
        answer = answered(error)
        return failure(answer.status, msgspec.json.decode(answer.body)["error"])

    def add(self, events: Sequence[Event]) -> None:
        """Keep the message that these events complete."""
        self._answer = self._answer or self._inference.answer(events)

    def body(self, usage: Usage) -> bytes:
        """Return the message."""
        return bytes(self._answer.SerializeToString())


def read(body: bytes, head: Head, *, stream: bool) -> InferenceReply:
    """Read a request message. Raises BadRequest, NotFound."""
    message = _parsed(infer.REQUEST, body)
    if not message.model_name:
        raise UnknownModel(UNNAMED)
    head = replace(head, path=infer.path(message))
    return InferenceReply(infer.read(message, head, whole=not stream), stream=stream)


def ask(body: bytes, head: Head, facts: Facts) -> Answer:
    """Answer the method that the path names. Raises ParleyError."""
    method = head.path["method"]
    if method not in control.CALLS:
        raise NotFound("There is no such method.")
    message = _parsed(control.question(method), body)
    return Answer(200, control.CALLS[method](message, head, facts).SerializeToString(), TYPE)


def _parsed(kind: Any, body: bytes) -> Message:
    """Parse a message of this class. Raises UnreadableInput."""
    try:
        return kind.FromString(body)
    except DecodeError:
        raise Internal(UNREADABLE) from None
