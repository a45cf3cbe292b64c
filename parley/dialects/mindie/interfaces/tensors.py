"""MindIE's variant of Triton's token interface: ``/v2/models/{model}/infer``, one tensor of ids in and one out."""

from __future__ import annotations

from typing import Any

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.interfaces.answers import SingleChoiceReply, StreamPiece, shared_request_members
from parley.dialects.mindie.interfaces.request_names import request_name
from parley.dialects.mindie.interfaces.triton import DEFAULT_TOKENS, read_label
from parley.dialects.mindie.members import inputs, parameters
from parley.dialects.mindie.refusal_wording import MINDIE_WORDING
from parley.dialects.request_context import RequestContext
from parley.errors import BadRequest
from parley.types import OutputOptions, Request, StopConditions, TokensPrompt, Usage

MAX_BY_DATATYPE = {"INT32": 2**31 - 1, "UINT32": 2**32 - 1, "INT64": 2**63 - 1, "UINT64": 2**64 - 1}
STRICT_DATATYPE = "UINT32"  # the only one that the original accepts
MAX_NAME = 256
DEFAULT_OUTPUT = "output0"


def read_mindie_tensors(rules: MindieRules, body: bytes, context: RequestContext) -> TensorReply:
    """Read a request. Raises BadRequest."""
    return TensorReply(rules, decode_fields(body, MINDIE_WORDING), context)


class TensorReply(SingleChoiceReply):
    """A reply in one tensor; never a stream."""

    def __init__(self, rules: MindieRules, body: Fields, context: RequestContext):
        tensor = _read_input_tensor(body)
        self._datatype, ids = _read_token_tensor(tensor, rules)
        self._answer_id = read_label(body) or request_name(context)
        self._output_name = _read_output_name(body) or DEFAULT_OUTPUT
        parameters_object = tensor.object("parameters")
        if parameters_object is None and (rules.old or not rules.strict):  # where the old manual documents them
            parameters_object = body.object("parameters")
        parameters_object = parameters_object or Fields({}, "parameters", MINDIE_WORDING)
        values = parameters.read_mindie_parameters(parameters_object, parameters.TRITON_TOKEN_TABLE.under_rules(rules))
        limit = values["max_new_tokens"] or DEFAULT_TOKENS
        super().__init__(rules, inputs.TRITON_INPUT, limit)
        self.request = Request(
            **shared_request_members(rules, context, self._answer_id),
            model=context.path_parts["model"],
            prompts=[TokensPrompt(ids)],
            sampling=parameters.mindie_sampling(values, rules),
            stop_conditions=StopConditions(max_tokens=limit, reserved_tokens=1),
            output_options=OutputOptions(ids=True),
            timeout=values["timeout"],
            priority=parameters.relative_priority(values),
        )

    def render_piece(self, piece: StreamPiece) -> bytes:
        """Return nothing: tensors are never streamed."""
        return b""

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer as JSON."""
        ids = [token.id for token in self.output_tokens]
        tensor = {"name": self._output_name, "shape": [1, len(ids)], "datatype": self._datatype, "data": ids}
        return encode_json({"id": self._answer_id, "outputs": [tensor]})


def _read_list(body: Fields, member: str) -> list[Any]:
    value = body.raw_value(member)
    if not isinstance(value, list):
        raise body.member_error(member, f"Req should contain '{member}' and the type should be array.")
    return value


def _read_input_tensor(body: Fields) -> Fields:
    tensors = _read_list(body, "inputs")
    if len(tensors) != 1:
        raise body.member_error("inputs", "Inputs count must be 1.")
    tensor = tensors[0] if isinstance(tensors[0], dict) else {}
    return Fields(tensor, "inputs[0]", MINDIE_WORDING)


def _read_token_tensor(tensor: Fields, rules: MindieRules) -> tuple[str, list[int]]:
    """Return a tensor's datatype and elements. Raises BadRequest."""
    tensor_name = tensor.raw_value("name")
    if not isinstance(tensor_name, str):
        raise _member_missing_error(tensor, "name", "string")
    if len(tensor_name) > MAX_NAME:
        raise tensor.member_error("name", f"The length of name set in inputs exceeds {MAX_NAME}.")
    count = _element_count(tensor)
    datatype = tensor.raw_value("datatype")
    if not isinstance(datatype, str):
        raise _member_missing_error(tensor, "datatype", "string")
    if datatype not in MAX_BY_DATATYPE or (rules.strict and datatype != STRICT_DATATYPE):
        raise tensor.member_error("datatype", f"Unsupported datatype, got {datatype[:60]}.")
    data = tensor.raw_value("data")
    if not isinstance(data, list):
        raise _member_missing_error(tensor, "data", "array")
    if len(data) != count:
        raise tensor.member_error("data", f"Data size should be {count}, got {len(data)}.")
    if set(map(type, data)) - {int} or min(data) < 0 or max(data) > MAX_BY_DATATYPE[datatype]:
        raise tensor.member_error("data", "Data element must be integer type.")
    return datatype, data


def _element_count(tensor: Fields) -> int:
    """Return the number of elements in the shape. Raises BadRequest."""
    shape = tensor.raw_value("shape")
    if not isinstance(shape, list):
        raise _member_missing_error(tensor, "shape", "array")
    if any(type(size) is not int for size in shape):
        raise tensor.member_error("shape", "Shape element must be integer type.")
    if not (len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)) or not 0 < shape[-1] <= inputs.MAX_INPUT_IDS:
        message = (
            "Shape must be at most two-dimensional, and the last element's value must be in "
            f"(0,{inputs.MAX_INPUT_IDS}]."
        )
        raise tensor.member_error("shape", message)
    result: int = shape[-1]
    return result


def _read_output_name(body: Fields) -> str:
    outputs = _read_list(body, "outputs")
    if len(outputs) != 1:
        raise body.member_error("outputs", f"Outputs size should be 1, got {len(outputs)}.")
    output_name = outputs[0].get("name") if isinstance(outputs[0], dict) else None
    if not isinstance(output_name, str):
        raise body.member_error("outputs", "Outputs name must be non-empty string.")
    return output_name


def _member_missing_error(tensor: Fields, member: str, type_name: str) -> BadRequest:
    return tensor.member_error(member, f"Cannot find {member} in inputs or its type is not {type_name}")
