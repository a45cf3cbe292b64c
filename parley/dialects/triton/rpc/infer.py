"""Inference over gRPC: turns a request message into the document that HTTP's ``infer`` reads, and answers to messages.

Input tensors are typed values in the message or separate raw bytes; output tensors are always raw bytes. Every answer
in a stream says whether it is the last one of its request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects.request_context import RequestContext
from parley.dialects.triton import infer, versions
from parley.dialects.triton.error_answers import quote_name
from parley.dialects.triton.infer import DATATYPES, TensorOutputForm
from parley.dialects.triton.model import MODEL_VERSION
from parley.dialects.triton.outputs import TritonOutputs
from parley.dialects.triton.rpc.messages import INFERENCE_SCHEMA, ProtoMessage, parameter_values
from parley.dialects.triton.sampling import TritonRequest
from parley.dialects.triton.tensors import TensorElement, tensor_to_bytes
from parley.errors import InvalidValue
from parley.types import Event

INFER_REQUEST = INFERENCE_SCHEMA("ModelInferRequest")
INFER_RESPONSE = INFERENCE_SCHEMA("ModelInferResponse")
STREAM_RESPONSE = INFERENCE_SCHEMA("ModelStreamInferResponse")

FINAL_PARAMETER = "triton_final_response"
EMPTY_FINAL_PARAMETER = "triton_enable_empty_final_response"

# The field that holds the elements of each type: 8 and 16 bits are sent as 32; half floats only as raw bytes.
CONTENTS_FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class GrpcInference:
    """One request and its answers: a single message with ``whole`` or if the client wants no stream, else several."""

    def __init__(self, triton_request: TritonRequest, form: TensorOutputForm, *, whole: bool):
        self.request = triton_request.request
        self._triton_request = triton_request
        self._output_form = form
        self._single_answer = whole or not triton_request.stream
        self._outputs = TritonOutputs(triton_request)

    def make_response(self, events: Sequence[Event]) -> ProtoMessage | None:
        """Return the message that these events produce, or None."""
        has_new_output = self._outputs.collect_events(events)
        if not (self._outputs.all_ended if self._single_answer else has_new_output):
            return None
        response = INFER_RESPONSE(
            model_name=self.request.model, model_version=MODEL_VERSION, id=self._triton_request.client_id
        )
        tensors = {tensor.name: tensor for tensor in self._outputs.take_tensors()}
        for name in self._output_form.names or tensors:
            tensor = tensors[name]
            response.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
            response.raw_output_contents.append(tensor_to_bytes(tensor))
        return response

    @property
    def all_ended(self) -> bool:
        """True if all sequences have ended."""
        return self._outputs.all_ended


def read_grpc_infer(message: ProtoMessage, context: RequestContext, *, whole: bool) -> GrpcInference:
    """Read a request. ``context`` holds the path that ``path_parts_of`` returns. Raises BadRequest, NotFound."""
    versions.check_model_version(context.path_parts)
    parameters = parameter_values(message.parameters)
    if not isinstance(
        parameters.pop(EMPTY_FINAL_PARAMETER, False), bool
    ):  # no effect: the last answer is never empty here
        raise InvalidValue(f"the parameter '{EMPTY_FINAL_PARAMETER}' must be a bool_param", field=EMPTY_FINAL_PARAMETER)
    model = context.path_parts["model"]
    document = {
        "id": message.id,
        "parameters": parameters,
        "inputs": _input_entries(message, model),
        "outputs": [
            {"name": output.name, "parameters": parameter_values(output.parameters)} for output in message.outputs
        ],
    }
    tail = b"".join(message.raw_input_contents)
    return GrpcInference(*infer.read_infer_document(document, memoryview(tail), context), whole=whole)


def path_parts_of(message: ProtoMessage) -> dict[str, str]:
    """Return the path parts that a request over HTTP would have."""
    version = {"version": message.model_version} if message.model_version else {}
    return {"model": message.model_name} | version


def stream_response(response: ProtoMessage, *, final: bool) -> ProtoMessage:
    """Wrap an answer as a message of a stream."""
    response.parameters[FINAL_PARAMETER].bool_param = final
    return STREAM_RESPONSE(infer_response=response)


def stream_error(message: ProtoMessage, sentence: str) -> ProtoMessage:
    """Return the error message that ends one request of a stream; the stream itself continues."""
    response = INFER_RESPONSE(model_name=message.model_name, model_version=message.model_version, id=message.id)
    response.parameters[FINAL_PARAMETER].bool_param = True
    return STREAM_RESPONSE(error_message=sentence, infer_response=response)


def _input_entries(message: ProtoMessage, model: str) -> list[dict[str, Any]]:
    raw = list(message.raw_input_contents)
    entries = []
    for tensor in message.inputs:
        if any(size < 0 for size in tensor.shape):
            raise InvalidValue(
                f"the dimensions of input {quote_name(tensor.name)} must not be negative", field=tensor.name
            )
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if "shared_memory_region" in tensor.parameters:
            entry["parameters"] = parameter_values(tensor.parameters)
        elif not message.raw_input_contents:
            entry["data"] = _typed_elements(tensor, model)
        elif tensor.HasField("contents"):
            raise InvalidValue(
                "contents field must not be specified when using raw_input_contents for "
                f"{quote_name(tensor.name)} for model '{model}'"
            )
        elif not raw:
            raise InvalidValue(
                f"raw_input_contents has no entry for input {quote_name(tensor.name)} for model '{model}'"
            )
        else:
            entry["parameters"] = {"binary_data_size": len(raw.pop(0))}
        entries.append(entry)
    if raw:
        raise InvalidValue(f"unexpected additional input data for model '{model}'")
    return entries


def _typed_elements(tensor: ProtoMessage, model: str) -> list[TensorElement]:
    """Return the elements of a tensor whose values are in the message itself. Raises InvalidValue."""
    member = CONTENTS_FIELDS.get(tensor.datatype, "")
    if tensor.datatype in DATATYPES and any(field.name != member for field, _ in tensor.contents.ListFields()):
        raise InvalidValue(
            f"unexpected explicit tensor data for input {quote_name(tensor.name)} for model '{model}': elements of "
            f"datatype '{tensor.datatype}' belong in {member or 'raw_input_contents'}"
        )
    elements = list(getattr(tensor.contents, member)) if member else []
    return [_decode_element(element, tensor.name) for element in elements] if tensor.datatype == "BYTES" else elements


def _decode_element(element: bytes, name: str) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"input {quote_name(name)} is not UTF-8 text (at byte {error.start})", field=name) from None
