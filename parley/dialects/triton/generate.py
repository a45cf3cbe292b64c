"""The generate extension: ``…/generate`` and ``…/generate_stream``. Flat JSON objects both ways.

Members of the body, and of its member ``parameters``, are inputs if the model has an input of that name, else request
parameters. The endpoint decides the framing; the input ``stream`` decides how many responses there are, so a stream may
have a single response. ``strict`` adds the original's refusals: several responses on ``generate`` (joined into one
otherwise), the prompt in a stream, null members, parameters that are lists or objects, compressed bodies, and an input
given twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects import orca
from parley.dialects.dialect import Answer, Head, Headers, Reply, Timings
from parley.dialects.triton import versions
from parley.dialects.triton.document import parse, repeated
from parley.dialects.triton.errors import Internal, about, body, encode, failure, mistaken, quoted
from parley.dialects.triton.errors import error as refuse
from parley.dialects.triton.model import INPUTS, VERSION, Input
from parley.dialects.triton.outputs import Outputs
from parley.dialects.triton.sampling import STRUCTURES, Asked
from parley.dialects.triton.sampling import read as ask
from parley.dialects.triton.tensors import Tensor, from_json, to_json
from parley.errors import BadRequest, EngineError, Invalid, ParleyError
from parley.types import Event, Usage

NESTED = "Converting keyword: 'parameters': "
MANY = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class GenerateReply(Reply):
    """A reply in flat JSON, as events or in one piece."""

    names: ClassVar[Mapping[str, str]] = {"prompt": "text_input", "stop_ids": "stop_token_ids"}

    def __init__(self, asked: Asked, *, stream: bool, strict: bool = False, load: Headers = ()):
        self.request = asked.request
        self.request.stream = stream
        self._asked = asked
        self._strict = strict
        self._load = load
        self._outputs = Outputs(asked)

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Return an event with the new output, if any; the last event alone if the client wants one response."""
        fresh = self._outputs.add(events)
        if fresh if self._asked.stream else self._outputs.ended:
            return b"data: " + encode(self._response()) + b"\n\n"
        return b""

    def end(self, usage: Usage) -> bytes:
        """Return nothing: the last event ends the stream."""
        return b""

    def fail(self, error: ParleyError) -> bytes:
        """Return the error event that ends the stream."""
        return failure(error)

    def refusal(self, error: ParleyError) -> Answer | None:
        """Return an error of the model as the first event of a stream, with the error's status."""
        if not self.request.stream or not isinstance(error, BadRequest | EngineError):
            return None
        return Answer(refuse(error).status, failure(error), self.media_type.encode())

    def add(self, events: Sequence[Event]) -> None:
        """Collect these events in the outputs."""
        self._outputs.add(events)

    def body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        if self._strict and self._asked.stream and self._outputs.length != 1:
            return body(MANY)  # with status 200, which the original has sent by then
        return encode(self._response())

    def headers(self, timings: Timings | None) -> Headers:
        """Return the load report of an answer in one piece."""
        return self._load if timings is not None else ()

    def _response(self) -> dict[str, Any]:
        response: dict[str, Any] = {tensor.name: _bare(tensor) for tensor in self._outputs.take()}
        response |= {"model_name": self.request.model, "model_version": VERSION}
        if self._asked.id:
            response["id"] = self._asked.id
        return dict(sorted(response.items()))


def read(data: bytes, head: Head, *, stream: bool, strict: bool) -> GenerateReply:
    """Read a generate request. Raises BadRequest, NotFound."""
    versions.check(head.path)
    if strict and head.headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise Invalid("Unsupported content-encoding, only 'identity' is supported.")
    document = parse(data)
    id = document.pop("id", "")
    if id is None and not strict:
        id = ""
    if not isinstance(id, str):
        raise mistaken("string", "'id'")
    if strict:
        _once(data, id)
    values: dict[str, Any] = {}
    for name, value in document.items():
        if name == "parameters":
            _nested(values, value, id, strict)
        else:
            _take(values, name, value, id, strict)
    asked = ask(values, id, head)
    if strict and asked.stream and asked.echo:
        raise Internal(
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
            field="exclude_input_in_output",
        )
    return GenerateReply(asked, stream=stream, strict=strict, load=_load(head))


def _load(head: Head) -> Headers:
    """Return the ORCA load report, if the client asks for one: how full the KV cache is."""
    share = head.cached / head.capacity if head.capacity else 0.0
    metrics = {"kv_cache_utilization": share, "max_token_capacity": head.capacity}
    return orca.report(head, metrics, number="%f", encode=encode)


def _once(data: bytes, id: str) -> None:
    """Refuse an input given twice. Of repeated request parameters the last one counts."""
    for prefix, names in zip(("", NESTED), repeated(data), strict=True):
        for name in names:
            if name in INPUTS and not INPUTS[name].loose:
                error = _given(name, id)
                error.message = prefix + error.message
                raise error


def _given(name: str, id: str) -> BadRequest:
    return about(id, f"input {quoted(name)} already exists in request")


def _nested(values: dict[str, Any], parameters: Any, id: str, strict: bool) -> None:
    if parameters is None and not strict:
        return
    if not isinstance(parameters, dict):
        raise Internal("Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object")
    try:
        for name, value in parameters.items():
            _take(values, name, value, id, strict)
    except ParleyError as error:
        error.message = NESTED + error.message
        raise


def _take(values: dict[str, Any], name: str, value: Any, id: str, strict: bool) -> None:
    """Add a member as an input of the model, or as a request parameter, where the last one counts."""
    if value is None and not strict:
        return
    tensor = INPUTS.get(name)
    if tensor is None or tensor.loose:
        structured = not strict and name in STRUCTURES and isinstance(value, list | dict)
        if not structured and not isinstance(value, str | int | float):
            raise Invalid(
                f"parameter {quoted(name)} has invalid type. It should be either 'int', 'bool', or 'string'.",
                field=name,
            )
        values[name] = value
        return
    if name in values:
        raise _given(name, id)
    values[name] = _tensor(tensor, value)


def _tensor(tensor: Input, value: Any) -> Any:
    """Return a scalar or a flat array as the elements of an input."""
    given = value if isinstance(value, list) else [value]
    elements = from_json(tensor.name, tensor.datatype, given)
    if tensor.many:
        return elements
    if len(elements) != 1:
        raise Invalid(
            f"The schema can not convert input '{tensor.name}' to tensor with proper shape", field=tensor.name
        )
    return elements[0]


def _bare(tensor: Tensor) -> Any:
    """Return a single element by itself, several as a flat array."""
    elements = to_json(tensor)
    return elements[0] if len(elements) == 1 else elements
