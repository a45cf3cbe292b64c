"""A gRPC call in the form of an HTTP request: the message as body, the answers as one message or as frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from google.protobuf.message import DecodeError

from parley.dialects.facts import ServerFacts
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.triton.error_answers import UnreadableInput, triton_error_answer
from parley.dialects.triton.rpc import control, infer
from parley.dialects.triton.rpc.frames import grpc_failure_frame, message_frame
from parley.dialects.triton.rpc.messages import ProtoMessage
from parley.dialects.triton.rpc.parsing import parse_message
from parley.dialects.triton.sampling import TRITON_FIELD_NAMES
from parley.errors import NotFound, ParleyError, UnknownModel
from parley.types import Event, Usage

PROTOBUF_TYPE = b"application/x-protobuf"
UNREADABLE_MESSAGE = "The message could not be read."
UNNAMED_MODEL = "Request for unknown model: '' is not found"


class GrpcInferReply(Reply):
    """A reply in protobuf messages: frames in a stream, else one message."""

    content_type = PROTOBUF_TYPE
    media_type: ClassVar[str] = PROTOBUF_TYPE.decode()
    field_names: ClassVar[Mapping[str, str]] = TRITON_FIELD_NAMES
    ping_bytes: ClassVar[bytes] = b""

    def __init__(self, inference: infer.GrpcInference, *, stream: bool):
        self.request = inference.request
        self.request.stream = stream
        self._inference = inference
        self._response: ProtoMessage = None

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return the frame that these events produce, if any."""
        answer = self._inference.make_response(events)
        if answer is None:
            return b""
        return message_frame(infer.stream_response(answer, final=self._inference.all_ended).SerializeToString())

    def finish_stream(self, usage: Usage) -> bytes:
        """Return nothing: the last answer is marked as final."""
        return b""

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the error frame that ends the answers."""
        answer = triton_error_answer(error)
        return grpc_failure_frame(answer.status, msgspec.json.decode(answer.body)["error"])

    def add_events(self, events: Sequence[Event]) -> None:
        """Keep the message that these events complete."""
        self._response = self._response or self._inference.make_response(events)

    def render_body(self, usage: Usage) -> bytes:
        """Return the message."""
        return bytes(self._response.SerializeToString())


def read_infer_message(body: bytes, context: RequestContext, *, stream: bool) -> GrpcInferReply:
    """Read a request message. Raises BadRequest, NotFound."""
    message = _parse_message(infer.INFER_REQUEST, body)
    if not message.model_name:
        raise UnknownModel(UNNAMED_MODEL)
    context = replace(context, path_parts=infer.path_parts_of(message))
    return GrpcInferReply(infer.read_grpc_infer(message, context, whole=not stream), stream=stream)


def answer_grpc_method(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Answer the method that the path names. Raises ParleyError."""
    method = context.path_parts["method"]
    if method not in control.GRPC_METHODS:
        raise NotFound("There is no such method.")
    message = _parse_message(control.request_class(method), body)
    return Answer(200, control.GRPC_METHODS[method](message, context, facts).SerializeToString(), PROTOBUF_TYPE)


def _parse_message(message_class: Any, body: bytes) -> ProtoMessage:
    """Parse a message of this class. Raises UnreadableInput, InvalidValue."""
    try:
        return parse_message(message_class, body)
    except DecodeError:
        raise UnreadableInput(UNREADABLE_MESSAGE) from None
