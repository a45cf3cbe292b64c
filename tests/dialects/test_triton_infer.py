"""Triton's infer: input and output tensors as JSON and as binary data, to the byte."""

import json
import struct
from functools import partial
from typing import Any

import pytest

from parley.dialects.request_context import RequestContext
from parley.dialects.triton import error_answers, infer, tensors
from parley.errors import ParleyError
from parley.types import (
    ChoiceDelta,
    ChoiceDone,
    PromptAccepted,
    SamplingOptions,
    StopConditions,
    TextPrompt,
    TokenInfo,
    Usage,
)

LENGTH = b"inference-header-content-length"
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hi"]}
stop_with_reserve = partial(StopConditions, reserved_tokens=1)
OPENING = b'{"id":"7","model_name":"m","model_version":"1","outputs":['


def make_context(length: int | bytes | None = None) -> RequestContext:
    value = b"%d" % length if isinstance(length, int) else length
    return RequestContext("0f", 1, "fp_1", path_parts={"model": "m"}, headers={} if value is None else {LENGTH: value})


def read(*inputs: dict[str, Any], **members: Any) -> infer.InferReply:
    return infer.read_triton_infer(json.dumps({"inputs": [TEXT, *inputs]} | members).encode(), make_context())


def binary_body(entries: list[tuple[str, str, list[int], bytes]], **members: Any) -> tuple[bytes, RequestContext]:
    """Build a body with its inputs as binary data."""
    described = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, datatype, shape, data in entries
    ]
    document = json.dumps({"inputs": described} | members).encode()
    return document + b"".join(data for *_, data in entries), make_context(len(document))


def pack_texts(*values: str) -> bytes:
    return b"".join(struct.pack("<I", len(value.encode())) + value.encode() for value in values)


def refusal(body: bytes, context: RequestContext | None = None) -> tuple[int, str]:
    with pytest.raises(ParleyError) as caught:
        infer.read_triton_infer(body, context or make_context())
    status, data, _ = error_answers.triton_error_answer(caught.value)
    return status, json.loads(data)["error"]


def tensor(name: str, datatype: str, data: Any, shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or [1], "data": [data]}


def answer_body(reply: infer.InferReply) -> bytes:
    tokens = [TokenInfo(5, " é", " é".encode(), -0.5, 1)]
    reply.add_events(
        [PromptAccepted(0, [1, 2, 3]), ChoiceDelta(0, " é", tokens=tokens), ChoiceDone(0, "stop", Usage(3, 1))]
    )
    return reply.render_body(Usage())


# -- compression


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("", ""),
        ("gzip", "gzip"),
        ("deflate, gzip", "deflate"),
        ("deflate;q=0.5, GZIP;q=0.75, br", "gzip"),
        ("gzip;q=0, deflate;q=0", ""),
        ("identity, gzip;q=0.9", ""),
        ("gzip;q=x, *, br", ""),
    ],
)
def test_triton_infer_chooses_content_coding_by_quality(accepted, coding):
    context = RequestContext(
        "0f", 1, "fp_1", path_parts={"model": "m"}, headers={b"accept-encoding": accepted.encode()}
    )
    reply = infer.read_triton_infer(json.dumps({"inputs": [TEXT]}).encode(), context)
    assert reply.content_coding == coding.encode()
    assert answer_body(reply).startswith(b'{"model_name"')  # the server compresses, not the dialect


# -- JSON


def test_triton_infer_reads_and_writes_json():
    reply = read(id="7")
    assert reply.request.prompts == [TextPrompt("Hi")] and not reply.request.stream
    assert answer_body(reply) == (
        OPENING + '{"name":"text_output","datatype":"BYTES","shape":[1],"data":["Hi é"]}]}'.encode()
    )
    assert (reply.content_type, reply.answer_headers(None)) == (b"application/json", ())


def test_triton_infer_writes_outputs_in_requested_order():
    outputs = [
        {"name": name} for name in ("num_input_tokens", "output_log_probs", "finish_reason", "num_output_tokens")
    ]
    assert answer_body(read(id="7", outputs=outputs)) == (
        OPENING + b'{"name":"num_input_tokens","datatype":"UINT32","shape":[],"data":[3]},'
        b'{"name":"output_log_probs","datatype":"FP32","shape":[1,1],"data":[-0.5]},'
        b'{"name":"finish_reason","datatype":"BYTES","shape":[1],"data":["stop"]},'
        b'{"name":"num_output_tokens","datatype":"UINT32","shape":[1],"data":[1]}]}'
    )


@pytest.mark.parametrize("shape", [[1], [1, 1], []])
def test_triton_infer_accepts_one_element_of_any_rank(shape):
    text = TEXT | {"shape": shape, "data": [["Hi"]] if len(shape) == 2 else ["Hi"]}
    flag = {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": shape, "data": [True]}
    reply = infer.read_triton_infer(json.dumps({"inputs": [text, flag]}).encode(), make_context())
    assert json.loads(answer_body(reply))["outputs"][0]["data"] == [" é"]


def test_triton_infer_joins_streamed_responses():
    reply = read(tensor("stream", "BOOL", True))
    assert not reply.request.stream
    assert json.loads(answer_body(reply))["outputs"][0]["data"] == [" é"]


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        ([tensor("max_tokens", "INT32", 9)], stop_with_reserve(max_tokens=9)),
        ([tensor("max_tokens", "FP32", 9.0, [1, 1])], stop_with_reserve(max_tokens=9)),
        ([tensor("stop", "BYTES", "x")], stop_with_reserve(["x"], max_tokens=16)),
        (
            [{"name": "stop_words", "datatype": "BYTES", "shape": [1, 2], "data": ["x", "y"]}],
            stop_with_reserve(["x", "y"], max_tokens=16),
        ),
        (
            [
                {"name": "stop_words", "datatype": "BYTES", "shape": [1, 1], "data": [[""]]},
                tensor("bad_words", "BYTES", ""),
            ],
            stop_with_reserve(max_tokens=16),
        ),
        (
            [{"name": "stop_token_ids", "datatype": "INT64", "shape": [2], "data": [5, 6]}],
            stop_with_reserve(ids=[5, 6], max_tokens=16),
        ),
        ([tensor("ignore_eos", "BOOL", True)], stop_with_reserve(max_tokens=16, ignore_eos=True)),
        ([tensor("temperature", "FP32", 0.5), tensor("top_k", "INT64", 3)], SamplingOptions(temperature=0.5, top_k=3)),
        ([tensor("temperature", "INT32", 0)], SamplingOptions(temperature=0.0)),
        ([tensor("random_seed", "UINT64", 2**64 - 1)], SamplingOptions(seed=2**64 - 1)),
        ([tensor("sampling_parameters", "BYTES", '{"top_p":0.5}')], SamplingOptions(top_p=0.5)),
    ],
    ids=str,
)
def test_triton_infer_inputs_reach_the_request(inputs, part):
    request = read(*inputs).request
    assert part in (request.sampling, request.stop_conditions)


def test_triton_infer_request_parameters_set_sampling():
    parameters = {"temperature": 0.5, "nobody_knows": "x", "priority": 1, "timeout": 5, "sequence_id": 0}
    request = read(parameters=parameters).request
    assert request.sampling.temperature == 0.5 and request.priority == -4 and request.timeout == 5e-6
    assert read(parameters={"priority": 0, "timeout": 0}).request.timeout is None
    for sequence in (7, "seven"):
        marks = {"sequence_id": sequence, "sequence_start": True, "sequence_end": False}
        assert read(parameters=marks).request == read().request
    assert read(parameters={"text_input": "no"}).request.prompts == [TextPrompt("Hi")]
    request = read(parameters={"lora_name": "a", "typical_p": "0.5", "watermark": "true"}).request
    assert request.adapter == "a" and request.sampling.typical_p == 0.5 and request.sampling.watermark
    assert read(tensor("lora_name", "BYTES", "a")).request.adapter == "a"


# -- binary data


def test_triton_infer_reads_binary_and_writes_json():
    body, context = binary_body(
        [
            ("text_input", "BYTES", [1], pack_texts("Hé")),
            ("exclude_input_in_output", "BOOL", [1], b"\x01"),
            ("max_tokens", "INT32", [1], struct.pack("<i", 9)),
            ("temperature", "FP32", [1], struct.pack("<f", 0.5)),
            ("top_p", "BF16", [1], b"\x00\x3f"),
            ("min_p", "FP16", [1], struct.pack("<e", 0.25)),
            ("stop_words", "BYTES", [1, 2], pack_texts("x", "y")),
        ],
        id="7",
    )
    reply = infer.read_triton_infer(body, context)
    assert reply.request.prompts == [TextPrompt("Hé")]
    assert reply.request.sampling == SamplingOptions(temperature=0.5, top_p=0.5, min_p=0.25)
    assert reply.request.stop_conditions == stop_with_reserve(["x", "y"], max_tokens=9)
    assert (
        answer_body(reply) == OPENING + '{"name":"text_output","datatype":"BYTES","shape":[1],"data":[" é"]}]}'.encode()
    )


def test_triton_infer_reads_json_and_binary_inputs_together():
    flag = {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [True]}
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}}
    document = json.dumps({"inputs": [flag, text]}).encode()
    assert infer.read_triton_infer(document + pack_texts("Hi"), make_context(len(document))).request.prompts == [
        TextPrompt("Hi")
    ]


def test_triton_infer_writes_binary():
    reply = read(id="7", parameters={"binary_data_output": True})
    document = OPENING + b'{"name":"text_output","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":9}}]}'
    assert answer_body(reply) == document + pack_texts("Hi é")
    assert reply.content_type == b"application/octet-stream"
    assert reply.answer_headers(None) == [(LENGTH, b"%d" % len(document))]


def test_triton_infer_writes_each_output_in_its_own_encoding():
    outputs = [
        {"name": "text_output", "parameters": {"binary_data": False}},
        {"name": "cumulative_logprob"},
        {"name": "num_input_tokens", "parameters": {"binary_data": True}},
    ]
    document = (
        OPENING
        + '{"name":"text_output","datatype":"BYTES","shape":[1],"data":["Hi é"]},'.encode()
        + b'{"name":"cumulative_logprob","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}},'
        b'{"name":"num_input_tokens","datatype":"UINT32","shape":[],"parameters":{"binary_data_size":4}}]}'
    )
    body = answer_body(read(id="7", outputs=outputs, parameters={"binary_data_output": True}))
    assert body == document + struct.pack("<fI", -0.5, 3)


def test_triton_infer_reads_raw_body_as_text():
    reply = infer.read_triton_infer("Hé".encode(), make_context(0))
    assert reply.request.prompts == [TextPrompt("Hé")]
    assert answer_body(reply).endswith(pack_texts("Hé é"))
    assert reply.content_type == b"application/octet-stream"


# -- refusals

ONE_OF = "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
ONE_OF += "'shared_memory_region' in 'parameters'. But {} of them are set for input 'text_input'."
ID = "[request id: <id_unknown>] "


def body_with_input(**members: Any) -> bytes:
    """Build a body whose only input has these members."""
    return json.dumps({"inputs": [{k: v for k, v in (TEXT | members).items() if v is not None}]}).encode()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (b"{}", 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (b'{"inputs":{}}', 500, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        (b'{"inputs":[5]}', 500, "Unable to parse 'inputs': attempt to access JSON non-object as object"),
        (b'{"inputs":[],"id":5}', 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        (
            b'{"inputs":[],"parameters":[]}',
            500,
            "Unable to parse 'parameters': attempt to access JSON non-object as object",
        ),
        (b'{"inputs":[],"outputs":5}', 500, "Unable to parse 'outputs': attempt to access JSON non-array as array"),
        (
            b'{"inputs":[]}',
            400,
            ID + "expected number of inputs between 1 and 50 but got 0 inputs for model 'm'. Got "
            "input(s) [], but missing required input(s) ['text_input']. Please provide all required input(s).",
        ),
        (
            body_with_input(name=None),
            500,
            "Unable to parse 'name': attempt to access non-existing object member 'name'",
        ),
        (body_with_input(name=5), 500, "Unable to parse 'name': attempt to access JSON non-string as string"),
        (
            body_with_input(datatype=None),
            500,
            "Unable to parse 'datatype': attempt to access non-existing object member 'datatype'",
        ),
        (body_with_input(shape=None), 500, "Unable to parse 'shape': attempt to access JSON non-array as array"),
        *(
            (
                body_with_input(shape=[size]),
                500,
                "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
            )
            for size in ("1", 1.0, -1, 2**63)
        ),
        (body_with_input(name="x"), 400, ID + "unexpected inference input 'x' for model 'm'"),
        (
            body_with_input(datatype="FP32"),
            400,
            ID + "inference input 'text_input' data-type is 'FP32', but model 'm' expects 'BYTES'",
        ),
        (
            body_with_input(datatype="X"),
            400,
            ID + "inference input 'text_input' data-type is 'X', but model 'm' expects 'BYTES'",
        ),
        (
            body_with_input(shape=[2], data=["a", "b"]),
            400,
            ID + "unexpected shape for input 'text_input' for model 'm'. Expected [1], got [2]. ",
        ),
        (
            body_with_input(name="stop_words", shape=[4097]),
            400,
            ID + "unexpected shape for input 'stop_words' for model 'm'. Expected [-1], got [4097]. ",
        ),
        (
            body_with_input(shape=[0], data=[]),
            400,
            ID + "unexpected shape for input 'text_input' for model 'm'. Expected [1], got [0]. ",
        ),
        (
            body_with_input(data=["a", "b"]),
            400,
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
        ),
        (
            body_with_input(data=["a", ["b"]]),
            400,
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
        ),
        (body_with_input(data="a"), 500, "Unable to parse 'data': attempt to access JSON non-array as array"),
        (
            body_with_input(data=[5]),
            500,
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
        ),
        (
            body_with_input(name="stream", datatype="BOOL", data=[1]),
            500,
            "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
        ),
        (
            body_with_input(name="seed", datatype="UINT64", data=[-1]),
            500,
            "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            body_with_input(name="top_k", datatype="INT32", data=[0.5]),
            500,
            "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
        ),
        (
            body_with_input(name="top_p", datatype="FP32", data=["x"]),
            500,
            "Unable to parse 'data': attempt to access JSON non-number as double",
        ),
        (
            body_with_input(name="top_p", datatype="FP16", data=[0.5]),
            400,
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input top_p",
        ),
        (body_with_input(data=None), 400, ONE_OF.format(0)),
        (body_with_input(parameters={"binary_data_size": 2}), 400, ONE_OF.format(2)),
        (
            body_with_input(data=None, parameters={"shared_memory_region": "r"}),
            400,
            "'shared_memory_region': Shared memory is not available (input 'text_input').",
        ),
        (
            body_with_input(data=None, parameters={"binary_data_size": "x"}),
            500,
            "Unable to parse 'binary_data_size': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            body_with_input(data=None, parameters={"binary_data_size": 6}),
            400,
            "unexpected size for input 'text_input', expecting 6 additional bytes for model 'm'",
        ),
        (json.dumps({"inputs": [TEXT, TEXT]}).encode(), 400, ID + "input 'text_input' already exists in request"),
        (
            json.dumps({"inputs": [TEXT], "id": "7", "outputs": [{"name": "x"}]}).encode(),
            400,
            "[request id: 7] unexpected inference output 'x' for model 'm'",
        ),
        (
            json.dumps({"inputs": [TEXT], "outputs": [{"name": "text_output"}] * 2}).encode(),
            400,
            ID + "output 'text_output' already exists in request",
        ),
        (
            json.dumps({"inputs": [TEXT], "outputs": [{"name": "x"}] * 2}).encode(),
            400,
            ID + "output 'x' already exists in request",
        ),
        (
            json.dumps(
                {"inputs": [TEXT], "outputs": [{"name": "text_output", "parameters": {"binary_data": 1}}]}
            ).encode(),
            500,
            "Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean",
        ),
        (
            json.dumps(
                {"inputs": [TEXT], "outputs": [{"name": "text_output", "parameters": {"classification": 1}}]}
            ).encode(),
            400,
            "'classification': Classes are not available for output 'text_output'.",
        ),
        (
            json.dumps({"inputs": [TEXT], "parameters": {"triton_x": 1}}).encode(),
            400,
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        (
            json.dumps({"inputs": [TEXT], "parameters": {"sequence_id": -5}}).encode(),
            500,
            "Unable to parse 'sequence_id': attempt to access JSON non-string as string",
        ),
        (
            json.dumps({"inputs": [TEXT], "parameters": {"sequence_end": 1}}).encode(),
            500,
            "Unable to parse 'sequence_end': attempt to access JSON non-boolean as boolean",
        ),
        (
            json.dumps({"inputs": [TEXT], "parameters": {"x": None}}).encode(),
            400,
            "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_triton_infer_refuses_wrong_body(body, status, message):
    assert refusal(body) == (status, message)


@pytest.mark.parametrize(
    ("data", "size", "message"),
    [
        (b"", 0, "unexpected size for input 'text_input', expecting 4 additional bytes for model 'm'"),
        (
            pack_texts("Hi")[:-1],
            5,
            "unexpected size for input 'text_input', expecting 1 additional bytes for model 'm'",
        ),
        (
            pack_texts("Hi")[:-1],
            6,
            "unexpected size for input 'text_input', expecting 1 additional bytes for model 'm'",
        ),
        (pack_texts("Hi", "x"), 11, "unexpected size for input 'text_input', 5 bytes too many for model 'm'"),
        (pack_texts("Hi", "x"), 6, "unexpected additional input data for model 'm'"),
        (
            b"\xff\xff\xff\xffHi",
            6,
            "unexpected size for input 'text_input', expecting 4294967293 additional bytes for model 'm'",
        ),
        (b"\x01\x00\x00\x00\xff", 5, "input 'text_input' is not UTF-8 text (at byte 0)"),
    ],
    ids=str,
)
def test_triton_infer_refuses_wrong_size_of_binary_text(data, size, message):
    document = body_with_input(data=None, parameters={"binary_data_size": size})
    assert refusal(document + data, make_context(len(document))) == (400, message)


def test_triton_infer_refuses_wrong_size_of_binary_numbers():
    for size, message in ((3, "expecting 1 additional bytes"), (5, "1 bytes too many")):
        body, context = binary_body(
            [("text_input", "BYTES", [1], pack_texts("Hi")), ("max_tokens", "INT32", [1], b"\x05" * size)]
        )
        assert refusal(body, context) == (400, f"unexpected size for input 'max_tokens', {message} for model 'm'")


@pytest.mark.parametrize("value", [b"x", b"", b"1.5", b"--1", b"9" * 19, "²".encode("latin-1")])
def test_triton_infer_refuses_unreadable_header_length(value):
    assert refusal(body_with_input(), make_context(value))[1].startswith(
        "Unable to parse Inference-Header-Content-Length, got: '"
    )


def test_triton_infer_refuses_header_length_out_of_range():
    for value in (-1, 10_000):
        message = f"inference header size should be in range (0, {len(body_with_input())}), got: {value}"
        assert refusal(body_with_input(), make_context(value)) == (400, message)


def test_triton_infer_refuses_raw_body_that_is_not_utf8():
    assert refusal(b"\xff", make_context(0)) == (400, "input 'text_input' is not UTF-8 text (at byte 0)")


# -- elements


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]),
        ("UINT8", [0, 255]),
        ("UINT16", [0, 65535]),
        ("UINT32", [0, 2**32 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("INT8", [-128, 127]),
        ("INT16", [-(2**15), 2**15 - 1]),
        ("INT32", [-(2**31), 2**31 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("FP16", [0.5, -65504.0]),
        ("FP32", [0.5, -1e30]),
        ("FP64", [0.1, -1e300]),
        ("BYTES", ["", "é", "a\x00b"]),
    ],
)
def test_triton_tensor_elements_round_trip(datatype, values):
    tensor_ = tensors.TritonTensor("t", datatype, [len(values)], values)
    decoded = tensors.elements_from_bytes("t", datatype, len(values), memoryview(tensors.tensor_to_bytes(tensor_)), "m")
    assert decoded == pytest.approx(values) if datatype == "FP32" else decoded == values
    if datatype != "FP16":
        assert tensors.elements_from_json("t", datatype, tensors.tensor_to_json(tensor_)) == decoded
