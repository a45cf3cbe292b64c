"""``…/infer``: tensors in, tensors out, each as JSON or as bytes that follow the JSON.

``Inference-Header-Content-Length`` gives the size of the JSON part, in requests and in answers; 0 in a request means
that the whole body is the prompt. Answers are compressed for clients that accept gzip or deflate. The original refuses
this endpoint for models that may give several responses; here there is always one, with the whole output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from parley.dialects.dialect import Head, Headers, Timings
from parley.dialects.triton import versions
from parley.dialects.triton.document import parse
from parley.dialects.triton.errors import Internal, about, encode, mistaken, quoted
from parley.dialects.triton.generate import GenerateReply
from parley.dialects.triton.model import INPUTS, OUTPUTS, VERSION, Input
from parley.dialects.triton.sampling import KNOWN, Asked
from parley.dialects.triton.sampling import read as ask
from parley.dialects.triton.tensors import FORMATS, NUMBERS, extent, flatten, from_bytes, from_json, to_bytes, to_json
from parley.errors import Invalid, Unsupported
from parley.types import Usage

LENGTH = b"inference-header-content-length"
OCTETS = b"application/octet-stream"
MAX_ELEMENTS = 4096  # per input
MAX_CODINGS = 16  # read of a client's accept-encoding
WEIGHT = re.compile(rb"q\s*=\s*([01](?:\.\d{0,3})?)")
TYPES = frozenset({"BYTES", *FORMATS})


@dataclass(slots=True)
class Form:
    """The requested form of the outputs. ``binary``: by output name; ``default_binary``: for all other outputs."""

    names: list[str] = field(default_factory=list)  # in the requested order; empty: all outputs
    binary: dict[str, bool] = field(default_factory=dict)
    rest: bool = False


class InferReply(GenerateReply):
    """A reply in tensors; never a stream."""

    def __init__(self, asked: Asked, form: Form, coding: bytes = b""):
        super().__init__(asked, stream=False)
        self.coding = coding
        self._form = form
        self._length = 0

    def body(self, usage: Usage) -> bytes:
        """Return JSON, or JSON and bytes; in that case ``content_type`` and ``answer_headers`` say so."""
        made = {tensor.name: tensor for tensor in self._outputs.take()}
        outputs, tail = [], []
        for name in self._form.names or made:
            tensor = made[name]
            output: dict[str, Any] = {"name": name, "datatype": tensor.datatype, "shape": tensor.shape}
            if self._form.binary.get(name, self._form.rest):
                tail.append(to_bytes(tensor))
                output["parameters"] = {"binary_data_size": len(tail[-1])}
            else:
                output["data"] = to_json(tensor)
            outputs.append(output)
        response: dict[str, Any] = {"id": self._asked.id} if self._asked.id else {}
        response |= {"model_name": self.request.model, "model_version": VERSION, "outputs": outputs}
        document, rest = encode(response), b"".join(tail)
        if rest:
            self.type = OCTETS
            self._length = len(document)
        return document + rest

    def headers(self, timings: Timings | None) -> Headers:
        """Return the size of the JSON part, if bytes follow it."""
        return [(LENGTH, b"%d" % self._length)] if self._length else ()


def read(body: bytes, head: Head) -> InferReply:
    """Read an infer request. Raises BadRequest, NotFound."""
    versions.check(head.path)
    size = _split(head.headers, len(body))
    if size == 0 and LENGTH in head.headers:
        asked, form = ask({"text_input": _text(body)}, "", head), Form(rest=True)
    else:
        asked, form = understand(parse(body[:size]), memoryview(body)[size:], head)
    return InferReply(asked, form, _coding(head.headers.get(b"accept-encoding", b"")))


def understand(document: dict[str, Any], tail: memoryview, head: Head) -> tuple[Asked, Form]:
    """Read a request's document and the binary tensors in ``tail``. Raises BadRequest."""
    model = head.path["model"]
    id = document.get("id", "")
    if not isinstance(id, str):
        raise mistaken("string", "'id'")
    form = _form(document, id, model)
    values = _inputs(document, id, model, tail)
    return ask(values, id, head, set(form.names) or None), form


def _split(headers: Mapping[bytes, bytes], length: int) -> int:
    """Return how many bytes of the body are JSON. Raises Invalid."""
    value = headers.get(LENGTH)
    if value is None:
        return length
    shown = value.decode("latin-1")
    if not value.removeprefix(b"-").isdigit() or len(value) > 18:
        raise Invalid(f"Unable to parse Inference-Header-Content-Length, got: {quoted(shown)}")
    if not 0 <= int(value) <= length:
        raise Invalid(f"inference header size should be in range (0, {length}), got: {shown}")
    return int(value)


def _coding(accepted: bytes) -> bytes:
    """Return the coding that the client prefers, the first of equals; empty for none, also without the header."""
    best, chosen = 0.0, b""
    for part in accepted.lower().split(b",")[:MAX_CODINGS]:
        name, _, weight = (piece.strip() for piece in part.partition(b";"))
        quality = _quality(weight)
        if name in (b"gzip", b"deflate", b"identity") and quality > best:
            best, chosen = quality, name
    return chosen if chosen != b"identity" else b""


def _quality(weight: bytes) -> float:
    """Return the weight of a coding such as ``q=0.5``: 1 if absent, 0 if unreadable."""
    if not weight:
        return 1.0
    found = WEIGHT.fullmatch(weight)
    return float(found[1]) if found else 0.0


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Invalid(f"input 'text_input' is not UTF-8 text (at byte {error.start})", field="text_input") from None


# -- requested outputs


def _form(document: dict[str, Any], id: str, model: str) -> Form:
    parameters = _object(document, "parameters")
    for name, value in parameters.items():
        if name.startswith("triton_"):
            raise Invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        if not isinstance(value, str | int | float):
            raise Invalid(
                f"parameter {quoted(name)} has invalid type. It should be either 'int', 'bool', or 'string'.",
                field=name,
            )
    _sequence(parameters)
    form = Form(rest=_flag(parameters, "binary_data_output", False))
    for output in _objects(document, "outputs", required=False):
        name = _string(output, "name")
        if name not in OUTPUTS:
            raise about(id, f"unexpected inference output {quoted(name)} for model '{model}'")
        if name in form.binary:
            raise Invalid(f"Duplicate output name '{name}' is not allowed in a request")
        options = _object(output, "parameters")
        if options.get("classification"):
            raise Unsupported(f"'classification': Classes are not available for output '{name}'.", field=name)
        if "shared_memory_region" in options:
            raise Unsupported(f"'shared_memory_region': Shared memory is not available (output '{name}').", field=name)
        form.names.append(name)
        form.binary[name] = _flag(options, "binary_data", form.rest)
    return form


def _sequence(parameters: dict[str, Any]) -> None:
    """Check the members for sequences. They have no effect, as with any model that is stateless between requests."""
    _flag(parameters, "sequence_start", False)
    _flag(parameters, "sequence_end", False)
    given = parameters.get("sequence_id", 0)
    if not isinstance(given, str) and (type(given) is not int or given < 0):
        raise mistaken("string", "'sequence_id'")


# -- inputs


def _inputs(document: dict[str, Any], id: str, model: str, tail: memoryview) -> dict[str, Any]:
    """Return the values of all inputs and of the request's own parameters, by name."""
    values: dict[str, Any] = {}
    for entry in _objects(document, "inputs", required=True):
        name = _string(entry, "name")
        datatype = _string(entry, "datatype")
        shape = extent(entry.get("shape"))
        if name in values:
            raise about(id, f"input {quoted(name)} already exists in request")
        tensor = INPUTS.get(name) or _loose(name, datatype, model, id)
        _check(tensor, datatype, shape, id, model)
        count = prod(shape)
        size = _source(entry)
        if size is None:
            elements = from_json(name, datatype, flatten(name, entry["data"], count))
        else:
            if size > len(tail):
                raise Invalid(
                    f"unexpected size for input '{name}', expecting {size - len(tail)} additional bytes for model "
                    f"'{model}'"
                )
            elements = from_bytes(name, datatype, count, tail[:size], model)
            tail = tail[size:]
        values[name] = elements if tensor.many else elements[0]
    if len(tail):
        raise Invalid(f"unexpected additional input data for model '{model}'")
    for name, value in _object(document, "parameters").items():
        if name not in INPUTS or INPUTS[name].loose:
            values.setdefault(name, value)
    return values


def _loose(name: str, datatype: str, model: str, id: str) -> Input:
    """Return a request parameter without a declared tensor as an input."""
    if name not in KNOWN:
        raise about(id, f"unexpected inference input {quoted(name)} for model '{model}'")
    return Input(name, datatype, many=name in ("stop", "stop_token_ids"))


def _check(tensor: Input, datatype: str, shape: list[int], id: str, model: str) -> None:
    allowed = NUMBERS if tensor.loose else (tensor.datatype,)
    if datatype not in allowed or datatype not in TYPES:
        raise about(
            id,
            f"inference input '{tensor.name}' data-type is {quoted(datatype)}, but model '{model}' expects "
            f"'{tensor.datatype}'",
        )
    count = prod(shape)
    if count > MAX_ELEMENTS or (count != 1 and not tensor.many):
        expected = ",".join(map(str, tensor.dims))
        got = ",".join(map(str, shape)) if len(shape) <= 8 else "…"
        raise about(
            id, f"unexpected shape for input '{tensor.name}' for model '{model}'. Expected [{expected}], got [{got}]. "
        )


def _source(entry: dict[str, Any]) -> int | None:
    """Return how many bytes of the tail an input takes, or None if its data is JSON."""
    options = _object(entry, "parameters")
    given: list[str] = [name for name in ("binary_data_size", "shared_memory_region") if name in options]
    if "data" in entry:
        given.append("data")
    if len(given) != 1:
        raise Invalid(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. But {len(given)} of them are set for input "
            f"{quoted(entry['name'])}."
        )
    if given == ["shared_memory_region"]:
        raise Unsupported(
            f"'shared_memory_region': Shared memory is not available (input {quoted(entry['name'])}).",
            field=entry["name"],
        )
    if given == ["data"]:
        return None
    size = options["binary_data_size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise mistaken("unsigned-integer", "'binary_data_size'")
    return size


# -- members of the document


def _object(parent: dict[str, Any], name: str) -> dict[str, Any]:
    value = parent.get(name, {})
    if not isinstance(value, dict):
        raise mistaken("object", f"'{name}'")
    return value


def _objects(parent: dict[str, Any], name: str, *, required: bool) -> list[dict[str, Any]]:
    if required and name not in parent:
        raise Internal(f"Unable to parse '{name}': attempt to access non-existing object member '{name}'")
    value = parent.get(name, [])
    if not isinstance(value, list):
        raise mistaken("array", f"'{name}'")
    if any(not isinstance(item, dict) for item in value):
        raise mistaken("object", f"'{name}'")
    return value


def _string(parent: dict[str, Any], name: str) -> str:
    if name not in parent:
        raise Internal(f"Unable to parse '{name}': attempt to access non-existing object member '{name}'")
    value = parent[name]
    if not isinstance(value, str):
        raise mistaken("string", f"'{name}'")
    return value


def _flag(parent: dict[str, Any], name: str, default: bool) -> bool:
    value = parent.get(name, default)
    if not isinstance(value, bool):
        raise mistaken("boolean", f"'{name}'")
    return value
