"""MindIE's variant of Triton's token interface: ``/v2/models/{model}/infer``, one tensor of ids in and one out."""

from __future__ import annotations

from typing import Any

from parley.dialects.dialect import Head
from parley.dialects.fields import Fields, decode
from parley.dialects.mindie import inputs, parameters
from parley.dialects.mindie.answers import Piece, Single, common
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import UNREAD, encode, name
from parley.dialects.mindie.triton import TOKENS, label
from parley.errors import BadRequest
from parley.types import Request, Stop, Tokens, Usage, Want

DATATYPES = {"INT32": 2**31 - 1, "UINT32": 2**32 - 1, "INT64": 2**63 - 1, "UINT64": 2**64 - 1}
STRICT = "UINT32"  # the only one that the original accepts
MAX_NAME = 256
OUTPUT = "output0"


def read(rules: Rules, body: bytes, head: Head) -> TensorReply:
    """Read a request. Raises BadRequest."""
    return TensorReply(rules, decode(body, UNREAD), head)


class TensorReply(Single):
    """A reply in one tensor; never a stream."""

    def __init__(self, rules: Rules, body: Fields, head: Head):
        tensor = _input(body)
        self._datatype, ids = _tensor(tensor, rules)
        self._id = label(body) or name(head)
        self._output = _output(body) or OUTPUT
        given = tensor.object("parameters")
        if given is None and (rules.old or not rules.strict):  # where the old manual documents them
            given = body.object("parameters")
        given = given or Fields({}, "parameters", UNREAD)
        values = parameters.read(given, parameters.TRITON_TOKEN.under(rules))
        limit = values["max_new_tokens"] or TOKENS
        super().__init__(rules, inputs.TRITON, limit)
        self.request = Request(
            **common(rules, head, self._id),
            model=head.path["model"],
            prompts=[Tokens(ids)],
            sampling=parameters.sampling(values, rules),
            stop=Stop(max_tokens=limit, reserve=1),
            want=Want(ids=True),
            timeout=values["timeout"],
            priority=parameters.priority(values),
        )

    def frame(self, piece: Piece) -> bytes:
        """Return nothing: tensors are never streamed."""
        return b""

    def body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        ids = [token.id for token in self.tokens]
        tensor = {"name": self._output, "shape": [1, len(ids)], "datatype": self._datatype, "data": ids}
        return encode({"id": self._id, "outputs": [tensor]})


def _listed(body: Fields, member: str) -> list[Any]:
    value = body.raw(member)
    if not isinstance(value, list):
        raise body.fail(member, f"Req should contain '{member}' and the type should be array.")
    return value


def _input(body: Fields) -> Fields:
    listed = _listed(body, "inputs")
    if len(listed) != 1:
        raise body.fail("inputs", "Inputs count must be 1.")
    tensor = listed[0] if isinstance(listed[0], dict) else {}
    return Fields(tensor, "inputs[0]", UNREAD)


def _tensor(tensor: Fields, rules: Rules) -> tuple[str, list[int]]:
    """Return a tensor's datatype and elements. Raises BadRequest."""
    called = tensor.raw("name")
    if not isinstance(called, str):
        raise _absent(tensor, "name", "string")
    if len(called) > MAX_NAME:
        raise tensor.fail("name", f"The length of name set in inputs exceeds {MAX_NAME}.")
    count = _count(tensor)
    datatype = tensor.raw("datatype")
    if not isinstance(datatype, str):
        raise _absent(tensor, "datatype", "string")
    if datatype not in DATATYPES or (rules.strict and datatype != STRICT):
        raise tensor.fail("datatype", f"Unsupported datatype, got {datatype[:60]}.")
    data = tensor.raw("data")
    if not isinstance(data, list):
        raise _absent(tensor, "data", "array")
    if len(data) != count:
        raise tensor.fail("data", f"Data size should be {count}, got {len(data)}.")
    if set(map(type, data)) - {int} or min(data) < 0 or max(data) > DATATYPES[datatype]:
        raise tensor.fail("data", "Data element must be integer type.")
    return datatype, data


def _count(tensor: Fields) -> int:
    """Return the number of elements in the shape. Raises BadRequest."""
    shape = tensor.raw("shape")
    if not isinstance(shape, list):
        raise _absent(tensor, "shape", "array")
    if any(type(each) is not int for each in shape):
        raise tensor.fail("shape", "Shape element must be integer type.")
    if not (len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)) or not 0 < shape[-1] <= inputs.IDS:
        told = f"Shape must be at most two-dimensional, and the last element's value must be in (0,{inputs.IDS}]."
        raise tensor.fail("shape", told)
    return shape[-1]


def _output(body: Fields) -> str:
    listed = _listed(body, "outputs")
    if len(listed) != 1:
        raise body.fail("outputs", f"Outputs size should be 1, got {len(listed)}.")
    called = listed[0].get("name") if isinstance(listed[0], dict) else None
    if not isinstance(called, str):
        raise body.fail("outputs", "Outputs name must be non-empty string.")
    return called


def _absent(tensor: Fields, member: str, type: str) -> BadRequest:
    return tensor.fail(member, f"Cannot find {member} in inputs or its type is not {type}")
