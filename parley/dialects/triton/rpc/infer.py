"""Inference over gRPC: turns a request message into the document that HTTP's ``infer`` reads, and answers to messages.

Input tensors are typed values in the message or separate raw bytes; output tensors are always raw bytes. Every answer
in a stream says whether it is the last one of its request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects.dialect import Head
from parley.dialects.triton import infer, versions
from parley.dialects.triton.errors import quoted
from parley.dialects.triton.infer import TYPES, Form
from parley.dialects.triton.model import VERSION
from parley.dialects.triton.outputs import Outputs
from parley.dialects.triton.rpc.messages import INFERENCE, Message, values
from parley.dialects.triton.sampling import Asked
from parley.dialects.triton.tensors import Element, to_bytes
from parley.errors import Invalid
from parley.types import Event

REQUEST = INFERENCE("ModelInferRequest")
RESPONSE = INFERENCE("ModelInferResponse")
STREAMED = INFERENCE("ModelStreamInferResponse")

FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"

# The field that holds the elements of each type: 8 and 16 bits are sent as 32; half floats only as raw bytes.
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class Inference:
    """One request and its answers: a single message with ``whole`` or if the client wants no stream, else several."""

    def __init__(self, asked: Asked, form: Form, *, whole: bool):
        self.request = asked.request
        self._asked = asked
        self._form = form
        self._whole = whole or not asked.stream
        self._outputs = Outputs(asked)

    def answer(self, events: Sequence[Event]) -> Message | None:
        """Return the message that these events produce, or None."""
        fresh = self._outputs.add(events)
        if not (self._outputs.ended if self._whole else fresh):
            return None
        response = RESPONSE(model_name=self.request.model, model_version=VERSION, id=self._asked.id)
        made = {tensor.name: tensor for tensor in self._outputs.take()}
        for name in self._form.names or made:
            tensor = made[name]
            response.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
            response.raw_output_contents.append(to_bytes(tensor))
        return response

    @property
    def ended(self) -> bool:
        """True if all sequences have ended."""
        return self._outputs.ended


def read(message: Message, head: Head, *, whole: bool) -> Inference:
    """Read a request. ``head`` holds the path that ``path_parts_of`` returns. Raises BadRequest, NotFound."""
    versions.check(head.path)
    parameters = values(message.parameters)
    if not isinstance(parameters.pop(EMPTY_FINAL, False), bool):  # no effect: the last answer is never empty here
        raise Invalid(f"the parameter '{EMPTY_FINAL}' must be a bool_param", field=EMPTY_FINAL)
    model = head.path["model"]
    document = {
        "id": message.id,
        "parameters": parameters,
        "inputs": _inputs(message, model),
        "outputs": [{"name": output.name, "parameters": values(output.parameters)} for output in message.outputs],
    }
    tail = b"".join(message.raw_input_contents)
    return Inference(*infer.understand(document, memoryview(tail), head), whole=whole)


def path(message: Message) -> dict[str, str]:
    """Return the path parts that a request over HTTP would have."""
    version = {"version": message.model_version} if message.model_version else {}
    return {"model": message.model_name} | version


def streamed(response: Message, *, final: bool) -> Message:
    """Wrap an answer as a message of a stream."""
    response.parameters[FINAL].bool_param = final
    return STREAMED(infer_response=response)


def failed(message: Message, sentence: str) -> Message:
    """Return the error message that ends one request of a stream; the stream itself continues."""
    response = RESPONSE(model_name=message.model_name, model_version=message.model_version, id=message.id)
    response.parameters[FINAL].bool_param = True
    return STREAMED(error_message=sentence, infer_response=response)


def _inputs(message: Message, model: str) -> list[dict[str, Any]]:
    raw = list(message.raw_input_contents)
    entries = []
    for tensor in message.inputs:
        if any(size < 0 for size in tensor.shape):
            raise Invalid(f"the dimensions of input {quoted(tensor.name)} must not be negative", field=tensor.name)
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if "shared_memory_region" in tensor.parameters:
            entry["parameters"] = values(tensor.parameters)
        elif not message.raw_input_contents:
            entry["data"] = _elements(tensor, model)
        elif tensor.HasField("contents"):
            raise Invalid(
                "contents field must not be specified when using raw_input_contents for "
                f"{quoted(tensor.name)} for model '{model}'"
            )
        elif not raw:
            raise Invalid(f"raw_input_contents has no entry for input {quoted(tensor.name)} for model '{model}'")
        else:
            entry["parameters"] = {"binary_data_size": len(raw.pop(0))}
        entries.append(entry)
    if raw:
        raise Invalid(f"unexpected additional input data for model '{model}'")
    return entries


def _elements(tensor: Message, model: str) -> list[Element]:
    """Return the elements of a tensor whose values are in the message itself. Raises Invalid."""
    member = CONTENTS.get(tensor.datatype, "")
    if tensor.datatype in TYPES and any(field.name != member for field, _ in tensor.contents.ListFields()):
        raise Invalid(
            f"unexpected explicit tensor data for input {quoted(tensor.name)} for model '{model}': elements of "
            f"datatype '{tensor.datatype}' belong in {member or 'raw_input_contents'}"
        )
    elements = list(getattr(tensor.contents, member)) if member else []
    return [_text(element, tensor.name) for element in elements] if tensor.datatype == "BYTES" else elements


def _text(element: bytes, name: str) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise Invalid(f"input {quoted(name)} is not UTF-8 text (at byte {error.start})", field=name) from None
