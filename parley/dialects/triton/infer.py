"""``…/infer``: tensors in, tensors out, each as JSON or as bytes that follow the JSON.

``Inference-Header-Content-Length`` gives the size of the JSON part, in requests and in answers; 0 in a request means
that the whole body is the prompt, which strict rules refuse: the model has more inputs. Answers are compressed for
clients that accept gzip or deflate. The original refuses this endpoint for models that may give several responses; here
there is always one, with the whole output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from parley.dialects.json_answer import encode_json
from parley.dialects.reply import HeaderList, RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.triton import versions
from parley.dialects.triton.document import parse_document
from parley.dialects.triton.error_answers import UnreadableInput, inputs_error, quote_name, wrong_type_error
from parley.dialects.triton.generate import TritonReply
from parley.dialects.triton.model import INPUTS, MODEL_VERSION, OUTPUTS, InputTensor
from parley.dialects.triton.sampling import KNOWN_PARAMETERS, TritonRequest
from parley.dialects.triton.sampling import read_triton_request as read_triton_request
from parley.dialects.triton.tensors import (
    NUMBER_TYPES,
    STRUCT_FORMATS,
    check_shape,
    elements_from_bytes,
    elements_from_json,
    flatten_json,
    tensor_to_bytes,
    tensor_to_json,
)
from parley.errors import InvalidValue, Unsupported
from parley.types import Usage

JSON_LENGTH_HEADER = b"inference-header-content-length"
OCTET_STREAM = b"application/octet-stream"
RAW_REQUEST_MESSAGE = (
    "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got {inputs} inputs in "
    "'{model}' model configuration"
)
MAX_ELEMENTS = 4096  # per input
MAX_CODINGS = 16  # read of a client's accept-encoding
CODING_WEIGHT = re.compile(rb"q\s*=\s*([01](?:\.\d{0,3})?)")
DATATYPES = frozenset({"BYTES", *STRUCT_FORMATS})


@dataclass(slots=True)
class TensorOutputForm:
    """The requested form of the outputs. ``binary``: by output name; ``default_binary``: for all other outputs."""

    names: list[str] = field(default_factory=list)  # in the requested order; empty: all outputs
    binary: dict[str, bool] = field(default_factory=dict)
    default_binary: bool = False


class InferReply(TritonReply):
    """A reply in tensors; never a stream."""

    def __init__(self, triton_request: TritonRequest, form: TensorOutputForm, coding: bytes = b""):
        super().__init__(triton_request, stream=False)
        self.content_coding = coding
        self._output_form = form
        self._json_length = 0

    def render_body(self, usage: Usage) -> bytes:
        """Return JSON, or JSON and bytes; in that case ``content_type`` and ``answer_headers`` say so."""
        tensors = {tensor.name: tensor for tensor in self._outputs.take_tensors()}
        outputs, tail = [], []
        for name in self._output_form.names or tensors:
            tensor = tensors[name]
            output: dict[str, Any] = {"name": name, "datatype": tensor.datatype, "shape": tensor.shape}
            if self._output_form.binary.get(name, self._output_form.default_binary):
                tail.append(tensor_to_bytes(tensor))
                output["parameters"] = {"binary_data_size": len(tail[-1])}
            else:
                output["data"] = tensor_to_json(tensor)
            outputs.append(output)
        response: dict[str, Any] = {"id": self._triton_request.client_id} if self._triton_request.client_id else {}
        response |= {"model_name": self.request.model, "model_version": MODEL_VERSION, "outputs": outputs}
        document, binary_tail = encode_json(response), b"".join(tail)
        if binary_tail:
            self.content_type = OCTET_STREAM
            self._json_length = len(document)
        return document + binary_tail

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the size of the JSON part, if bytes follow it."""
        return [(JSON_LENGTH_HEADER, b"%d" % self._json_length)] if self._json_length else ()


def read_triton_infer(body: bytes, context: RequestContext, *, strict: bool = False) -> InferReply:
    """Read an infer request. Raises BadRequest, NotFound."""
    versions.check_model_version(context.path_parts)
    size = _json_size(context.headers, len(body))
    if size == 0 and JSON_LENGTH_HEADER in context.headers:
        if strict:
            raise InvalidValue(RAW_REQUEST_MESSAGE.format(inputs=len(INPUTS), model=context.path_parts["model"]))
        triton_request = read_triton_request({"text_input": _decode_prompt(body)}, "", context)
        form = TensorOutputForm(default_binary=True)
    else:
        triton_request, form = read_infer_document(parse_document(body[:size]), memoryview(body)[size:], context)
    return InferReply(triton_request, form, _preferred_coding(context.headers.get(b"accept-encoding", b"")))


def read_infer_document(
    document: dict[str, Any], tail: memoryview, context: RequestContext
) -> tuple[TritonRequest, TensorOutputForm]:
    """Read a request's document and the binary tensors in ``tail``. Raises BadRequest."""
    model = context.path_parts["model"]
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise wrong_type_error("string", "'id'")
    output_form = _read_output_form(document, request_id, model)
    values = _read_inputs(document, request_id, model, tail)
    return read_triton_request(values, request_id, context, set(output_form.names) or None), output_form


def _json_size(headers: Mapping[bytes, bytes], length: int) -> int:
    """Return how many bytes of the body are JSON. Raises InvalidValue."""
    value = headers.get(JSON_LENGTH_HEADER)
    if value is None:
        return length
    length_text = value.decode("latin-1")
    if not value.removeprefix(b"-").isdigit() or len(value) > 18:
        raise InvalidValue(f"Unable to parse Inference-Header-Content-Length, got: {quote_name(length_text)}")
    if not 0 <= int(value) <= length:
        raise InvalidValue(f"inference header size should be in range (0, {length}), got: {length_text}")
    return int(value)


def _preferred_coding(accepted: bytes) -> bytes:
    """Return the coding that the client prefers, the first of equals; empty for none, also without the header."""
    best, preferred = 0.0, b""
    for part in accepted.lower().split(b",")[:MAX_CODINGS]:
        name, _, weight = (piece.strip() for piece in part.partition(b";"))
        quality = _read_quality(weight)
        if name in (b"gzip", b"deflate", b"identity") and quality > best:
            best, preferred = quality, name
    return preferred if preferred != b"identity" else b""


def _read_quality(weight: bytes) -> float:
    """Return the weight of a coding such as ``q=0.5``: 1 if absent, 0 if unreadable."""
    if not weight:
        return 1.0
    match = CODING_WEIGHT.fullmatch(weight)
    return float(match[1]) if match else 0.0


def _decode_prompt(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(
            f"input 'text_input' is not UTF-8 text (at byte {error.start})", field="text_input"
        ) from None


# -- requested outputs


def _read_output_form(document: dict[str, Any], request_id: str, model: str) -> TensorOutputForm:
    parameters = _object_member(document, "parameters")
    for name, value in parameters.items():
        if name.startswith("triton_"):
            raise InvalidValue(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        if not isinstance(value, str | int | float):
            raise InvalidValue(
                f"parameter {quote_name(name)} has invalid type. It should be either 'int', 'bool', or 'string'.",
                field=name,
            )
    _check_sequence_members(parameters)
    form = TensorOutputForm(default_binary=_boolean_member(parameters, "binary_data_output", False))
    for output in _array_member(document, "outputs", required=False):
        name = _string_member(output, "name")
        if name in form.binary:
            raise inputs_error(request_id, f"output {quote_name(name)} already exists in request")
        options = _object_member(output, "parameters")
        if options.get("classification"):
            raise Unsupported(f"'classification': Classes are not available for output '{name}'.", field=name)
        if "shared_memory_region" in options:
            raise Unsupported(f"'shared_memory_region': Shared memory is not available (output '{name}').", field=name)
        form.names.append(name)
        form.binary[name] = _boolean_member(options, "binary_data", form.default_binary)
    for name in form.names:
        if name not in OUTPUTS:
            raise inputs_error(request_id, f"unexpected inference output {quote_name(name)} for model '{model}'")
    return form


def _check_sequence_members(parameters: dict[str, Any]) -> None:
    """Check the members for sequences. They have no effect, as with any model that is stateless between requests."""
    _boolean_member(parameters, "sequence_start", False)
    _boolean_member(parameters, "sequence_end", False)
    sequence_id = parameters.get("sequence_id", 0)
    if not isinstance(sequence_id, str) and (type(sequence_id) is not int or sequence_id < 0):
        raise wrong_type_error("string", "'sequence_id'")


# -- inputs


def _read_inputs(document: dict[str, Any], request_id: str, model: str, tail: memoryview) -> dict[str, Any]:
    """Return the values of all inputs and of the request's own parameters, by name."""
    values: dict[str, Any] = {}
    for entry in _array_member(document, "inputs", required=True):
        name = _string_member(entry, "name")
        datatype = _string_member(entry, "datatype")
        shape = check_shape(entry.get("shape"))
        if name in values:
            raise inputs_error(request_id, f"input {quote_name(name)} already exists in request")
        tensor = INPUTS.get(name) or _parameter_as_input(name, datatype, model, request_id)
        _check_input(tensor, datatype, shape, request_id, model)
        count = prod(shape)
        size = _binary_size(entry)
        if size is None:
            elements = elements_from_json(name, datatype, flatten_json(name, entry["data"], count))
        else:
            if size > len(tail):
                raise InvalidValue(
                    f"unexpected size for input '{name}', expecting {size - len(tail)} additional bytes for model "
                    f"'{model}'"
                )
            elements = elements_from_bytes(name, datatype, count, tail[:size], model)
            tail = tail[size:]
        values[name] = elements if tensor.is_list else elements[0]
    if len(tail):
        raise InvalidValue(f"unexpected additional input data for model '{model}'")
    for name, value in _object_member(document, "parameters").items():
        if name not in INPUTS or INPUTS[name].any_number_type:
            values.setdefault(name, value)
    return values


def _parameter_as_input(name: str, datatype: str, model: str, request_id: str) -> InputTensor:
    """Return a request parameter without a declared tensor as an input."""
    if name not in KNOWN_PARAMETERS:
        raise inputs_error(request_id, f"unexpected inference input {quote_name(name)} for model '{model}'")
    return InputTensor(name, datatype, is_list=name in ("stop", "stop_token_ids"))


def _check_input(tensor: InputTensor, datatype: str, shape: list[int], request_id: str, model: str) -> None:
    allowed = NUMBER_TYPES if tensor.any_number_type else (tensor.datatype,)
    if datatype not in allowed or datatype not in DATATYPES:
        raise inputs_error(
            request_id,
            f"inference input '{tensor.name}' data-type is {quote_name(datatype)}, but model '{model}' expects "
            f"'{tensor.datatype}'",
        )
    count = prod(shape)
    if count > MAX_ELEMENTS or (count != 1 and not tensor.is_list):
        expected = ",".join(map(str, tensor.declared_shape))
        actual = ",".join(map(str, shape)) if len(shape) <= 8 else "…"
        raise inputs_error(
            request_id,
            f"unexpected shape for input '{tensor.name}' for model '{model}'. Expected [{expected}], got [{actual}]. ",
        )


def _binary_size(entry: dict[str, Any]) -> int | None:
    """Return how many bytes of the tail an input takes, or None if its data is JSON."""
    options = _object_member(entry, "parameters")
    sources: list[str] = [name for name in ("binary_data_size", "shared_memory_region") if name in options]
    if "data" in entry:
        sources.append("data")
    if len(sources) != 1:
        raise InvalidValue(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But {len(sources)} of them are set for input "
            f"{quote_name(entry['name'])}."
        )
    if sources == ["shared_memory_region"]:
        raise Unsupported(
            f"'shared_memory_region': Shared memory is not available (input {quote_name(entry['name'])}).",
            field=entry["name"],
        )
    if sources == ["data"]:
        return None
    size = options["binary_data_size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise wrong_type_error("unsigned-integer", "'binary_data_size'")
    return size


# -- members of the document


def _object_member(parent: dict[str, Any], name: str) -> dict[str, Any]:
    value = parent.get(name, {})
    if not isinstance(value, dict):
        raise wrong_type_error("object", f"'{name}'")
    return value


def _array_member(parent: dict[str, Any], name: str, *, required: bool) -> list[dict[str, Any]]:
    if required and name not in parent:
        raise UnreadableInput(f"Unable to parse '{name}': attempt to access non-existing object member '{name}'")
    value = parent.get(name, [])
    if not isinstance(value, list):
        raise wrong_type_error("array", f"'{name}'")
    if any(not isinstance(item, dict) for item in value):
        raise wrong_type_error("object", f"'{name}'")
    return value


def _string_member(parent: dict[str, Any], name: str) -> str:
    if name not in parent:
        raise UnreadableInput(f"Unable to parse '{name}': attempt to access non-existing object member '{name}'")
    value = parent[name]
    if not isinstance(value, str):
        raise wrong_type_error("string", f"'{name}'")
    return value


def _boolean_member(parent: dict[str, Any], name: str, default: bool) -> bool:
    value = parent.get(name, default)
    if not isinstance(value, bool):
        raise wrong_type_error("boolean", f"'{name}'")
    return value
