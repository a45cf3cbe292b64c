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
from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer, HeaderList, Reply, RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import data_event
from parley.dialects.triton import versions
from parley.dialects.triton.document import parse_document, repeated_names
from parley.dialects.triton.error_answers import (
    UnreadableInput,
    inputs_error,
    quote_name,
    triton_error_answer,
    triton_error_body,
    triton_failure_event,
    wrong_type_error,
)
from parley.dialects.triton.model import INPUTS, MODEL_VERSION, InputTensor
from parley.dialects.triton.outputs import TritonOutputs
from parley.dialects.triton.sampling import STRUCTURED_NAMES, TRITON_FIELD_NAMES, TritonRequest, require_inputs
from parley.dialects.triton.sampling import read_triton_request as read_triton_request
from parley.dialects.triton.tensors import TritonTensor, elements_from_json, tensor_to_json
from parley.errors import BadRequest, EngineError, InvalidValue, ParleyError, UnknownCoding, UnknownModel
from parley.types import Event, Usage

IDENTITY_ONLY = "Unsupported content-encoding, only 'identity' is supported."
NESTED_PREFIX = "Converting keyword: 'parameters': "
SEVERAL_RESPONSES = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class TritonReply(Reply):
    """A reply in flat JSON, as events or in one piece."""

    field_names: ClassVar[Mapping[str, str]] = TRITON_FIELD_NAMES

    def __init__(
        self, triton_request: TritonRequest, *, stream: bool, strict: bool = False, load_report: HeaderList = ()
    ):
        self.request = triton_request.request
        self.request.stream = stream
        self._triton_request = triton_request
        self._strict = strict
        self._load_report = load_report
        self._outputs = TritonOutputs(triton_request)

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return an event with the new output, if any; the last event alone if the client wants one response."""
        has_new_output = self._outputs.collect_events(events)
        if has_new_output if self._triton_request.stream else self._outputs.all_ended:
            return data_event(self._take_response())
        return b""

    def finish_stream(self, usage: Usage) -> bytes:
        """Return nothing: the last event ends the stream."""
        return b""

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the error event that ends the stream."""
        return triton_failure_event(error)

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return an error of the model as the first event of a stream, with the error's status."""
        is_models = isinstance(error, BadRequest | EngineError | UnknownModel)  # the last one means an adapter here
        return model_error_event(error) if self.request.stream and is_models else None

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect these events in the outputs."""
        self._outputs.collect_events(events)

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        if self._strict and self._triton_request.stream and self._outputs.longest_ended != 1:
            return triton_error_body(SEVERAL_RESPONSES)  # with status 200, which the original has sent by then
        return encode_json(self._take_response())

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the load report of an answer in one piece."""
        return self._load_report if timings is not None else ()

    def _take_response(self) -> dict[str, Any]:
        response: dict[str, Any] = {tensor.name: _flat_value(tensor) for tensor in self._outputs.take_tensors()}
        response |= {"model_name": self.request.model, "model_version": MODEL_VERSION}
        if self._triton_request.client_id:
            response["id"] = self._triton_request.client_id
        return dict(sorted(response.items()))


def model_error_event(error: ParleyError) -> Answer:
    """Return an error of the model as the only event of a stream, with the error's status."""
    return Answer(triton_error_answer(error).status, triton_failure_event(error), TritonReply.media_type.encode())


def strict_generate_error(error: ParleyError) -> Answer:
    """Return an error as a whole answer. Unlike elsewhere, no coding of bodies is known."""
    if isinstance(error, UnknownCoding):
        return Answer(400, triton_error_body(IDENTITY_ONLY))
    return triton_error_answer(error)


def read_triton_generate(data: bytes, context: RequestContext, *, stream: bool, strict: bool) -> TritonReply | Answer:
    """Read a generate request. As in the original, a stream reports refusals of the model as events.

    Raises BadRequest, NotFound.
    """
    versions.check_model_version(context.path_parts)
    if strict and context.headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise InvalidValue(IDENTITY_ONLY)
    document = parse_document(data)
    request_id = document.pop("id", "")
    if request_id is None and not strict:
        request_id = ""
    if not isinstance(request_id, str):
        raise wrong_type_error("string", "'id'")
    if strict:
        _refuse_repeated_inputs(data, request_id)
    values: dict[str, Any] = {}
    for name, value in document.items():
        if name == "parameters":
            _add_nested_members(values, value, request_id, strict)
        else:
            _add_member(values, name, value, request_id, strict)
    require_inputs(values, request_id, context.path_parts["model"])
    try:
        triton_request = read_triton_request(values, request_id, context)
        if strict and triton_request.stream and triton_request.echo:
            raise UnreadableInput(
                "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed.",
                field="exclude_input_in_output",
            )
    except BadRequest as error:
        if stream:
            return model_error_event(error)
        raise
    return TritonReply(triton_request, stream=stream, strict=strict, load_report=_orca_load_report(context))


def _orca_load_report(context: RequestContext) -> HeaderList:
    """Return the ORCA load report, if the client asks for one: how full the KV cache is."""
    cache_usage = context.cached_tokens / context.cache_capacity if context.cache_capacity else 0.0
    metrics = {"kv_cache_utilization": cache_usage, "max_token_capacity": context.cache_capacity}
    return orca.orca_header(context, metrics, number_format="%f", encode=encode_json)


def _refuse_repeated_inputs(data: bytes, request_id: str) -> None:
    """Refuse an input given twice. Of repeated request parameters the last one counts."""
    for prefix, names in zip(("", NESTED_PREFIX), repeated_names(data), strict=True):
        for name in names:
            if name in INPUTS and not INPUTS[name].any_number_type:
                error = _repeated_input_error(name, request_id)
                error.message = prefix + error.message
                raise error


def _repeated_input_error(name: str, request_id: str) -> BadRequest:
    return inputs_error(request_id, f"input {quote_name(name)} already exists in request")


def _add_nested_members(values: dict[str, Any], parameters: Any, request_id: str, strict: bool) -> None:
    if parameters is None and not strict:
        return
    if not isinstance(parameters, dict):
        raise UnreadableInput(
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"
        )
    try:
        for name, value in parameters.items():
            _add_member(values, name, value, request_id, strict)
    except ParleyError as error:
        error.message = NESTED_PREFIX + error.message
        raise


def _add_member(values: dict[str, Any], name: str, value: Any, request_id: str, strict: bool) -> None:
    """Add a member as an input of the model, or as a request parameter, where the last one counts."""
    if value is None and not strict:
        return
    tensor = INPUTS.get(name)
    if tensor is None or tensor.any_number_type:
        structured = not strict and name in STRUCTURED_NAMES and isinstance(value, list | dict)
        if not structured and not isinstance(value, str | int | float):
            raise InvalidValue(
                f"parameter {quote_name(name)} has invalid type. It should be either 'int', 'bool', or 'string'.",
                field=name,
            )
        values[name] = value
        return
    if name in values:
        raise _repeated_input_error(name, request_id)
    values[name] = _tensor_elements(tensor, value)


def _tensor_elements(tensor: InputTensor, value: Any) -> Any:
    """Return a scalar or a flat array as the elements of an input."""
    json_values = value if isinstance(value, list) else [value]
    elements = elements_from_json(tensor.name, tensor.datatype, json_values)
    if tensor.is_list:
        return elements
    if len(elements) != 1:
        raise InvalidValue(
            f"The schema can not convert input '{tensor.name}' to tensor with proper shape", field=tensor.name
        )
    return elements[0]


def _flat_value(tensor: TritonTensor) -> Any:
    """Return a single element by itself, several as a flat array."""
    elements = tensor_to_json(tensor)
    return elements[0] if len(elements) == 1 else elements
