"""Triton's gRPC messages: their wire form, agreement with HTTP, and refusals."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.request_context import RequestContext
from parley.dialects.triton import error_answers, message_peek
from parley.dialects.triton import infer as http
from parley.dialects.triton.model import INPUTS, OUTPUTS
from parley.dialects.triton.rpc import control, frames, infer, schema
from parley.dialects.triton.rpc.messages import HEALTH_SCHEMA, INFERENCE_SCHEMA
from parley.dialects.triton.sampling import KNOWN_PARAMETERS
from parley.dialects.triton.tensors import STRUCT_FORMATS
from parley.errors import ParleyError
from parley.metrics.request_totals import RequestTotals
from parley.types import ChoiceDelta, ChoiceDone, PromptAccepted, Usage

TOTALS = RequestTotals(
    succeeded=2,
    failed=1,
    cancelled=1,
    last_end=1.5,
    total_seconds=2.5,
    prepare_seconds=0.25,
    queue_seconds=0.5,
    compute_seconds=1.75,
)
FACTS = ServerFacts(
    "1.2", [ModelCard("m", 5, 64, "m", "ready", TOTALS), ModelCard("alias", 5, 64, "m", "ready", TOTALS)], True
)
LOADING = ServerFacts("1.2", [ModelCard("m", 5, None, "m", "loading")], False)


def make_context(**path: str) -> RequestContext:
    return RequestContext("0f", 1, "fp", path_parts=path)


def infer_request(*inputs: dict[str, Any], raw: tuple[bytes, ...] = (), **members: Any) -> Any:
    message = infer.INFER_REQUEST(model_name="m", **members)
    for members in inputs:
        message.inputs.add(**members)
    message.raw_input_contents.extend(raw)
    return message


def typed_tensor(
    name: str, datatype: str, member: str, *elements: Any, shape: tuple[int, ...] = (1,)
) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "contents": {member: elements}}


def pack_texts(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


TEXT = typed_tensor("text_input", "BYTES", "bytes_contents", b"hi")


def read(message: Any, *, whole: bool = True) -> infer.GrpcInference:
    return infer.read_grpc_infer(message, make_context(**infer.path_parts_of(message)), whole=whole)


def refusal(message: Any) -> tuple[int, str]:
    with pytest.raises(ParleyError) as caught:
        read(message)
    status, data, _ = error_answers.triton_error_answer(caught.value)
    return status, json.loads(data)["error"]


# -- the schema


def test_triton_grpc_decodes_request_of_any_client():
    """The bytes are written by hand, independently of the schema under test."""
    wire = b"\x0a\x01m\x1a\x017" + b"\x22\x10" + b"\x0a\x0amax_tokens" + b"\x12\x02\x10\x04"
    tensor = b"\x0a\x0atext_input\x12\x05BYTES\x1a\x01\x01"
    wire += b"\x2a" + bytes([len(tensor)]) + tensor + b"\x3a\x06" + pack_texts(b"hi")
    message = infer.INFER_REQUEST.FromString(wire)
    assert message.SerializeToString(deterministic=True) == wire
    decoded = read(message).request
    assert (decoded.prompts[0].text, decoded.stop_conditions.max_tokens, decoded.model) == ("hi", 4, "m")


def test_proto_schema_resolves_types_in_any_order(tmp_path, monkeypatch):
    source = (
        'syntax = "proto3"; package a.b; // why\nmessage M { N n = 1; repeated O.P p = 2; map<string, N> some_of = 3;'
    )
    source += " oneof which { bool x = 4; E e = 5; } } message N {} message O { message P { bytes q = 15; } }"
    source += " enum E { ZERO = 0; ONE = 1; } service S { rpc Do(stream M) returns (N); }"
    (tmp_path / "x.proto").write_text(source)
    monkeypatch.setattr(schema, "__file__", str(tmp_path / "schema.py"))
    schema_ = schema.ProtoSchema("x.proto")
    message = schema_("M")(p=[{"q": b"1"}], e="ONE", some_of={"k": {}})
    assert message.SerializeToString() == b"\x12\x03\x7a\x011\x1a\x05\x0a\x01k\x12\x00\x28\x01"
    assert message.WhichOneof("which") == "e"
    name, (method,) = schema_.find_service("S")
    assert (name, method.name, method.client_streaming, method.server_streaming) == ("a.b.S", "Do", True, False)


def test_triton_grpc_handles_every_method():
    _, methods = INFERENCE_SCHEMA.find_service("GRPCInferenceService")
    assert {method.name for method in methods} == {*control.GRPC_METHODS, "ModelInfer", "ModelStreamInfer"}
    assert all(method.input_type.full_name == f"inference.{method.name}Request" for method in methods[:-1]
               if method.name != "ModelStreamInfer")  # fmt: skip
    assert HEALTH_SCHEMA.find_service("Health")[0] == "grpc.health.v1.Health"


# -- requests


@pytest.mark.parametrize("datatype", [*STRUCT_FORMATS, "BYTES"])
def test_triton_grpc_typed_and_raw_tensors_are_equal(datatype):
    """Sampling parameters cover the numeric types; text_input covers BYTES and stream covers BOOL."""
    member = infer.CONTENTS_FIELDS.get(datatype)
    if datatype == "BYTES":
        typed_inputs, raw = (TEXT,), (pack_texts(b"hi"),)
    elif datatype == "BOOL":
        typed_inputs, raw = (TEXT, typed_tensor("stream", "BOOL", member, True)), (pack_texts(b"hi"), b"\x01")
    else:
        value = 2.0 if datatype.startswith(("FP", "BF")) else 2
        packed = b"\x00\x40" if datatype == "BF16" else struct.pack(f"<{STRUCT_FORMATS[datatype]}", value)
        name = "temperature" if isinstance(value, float) else "top_k"
        typed_inputs = (TEXT, typed_tensor(name, datatype, member or "fp32_contents", value))
        raw = (pack_texts(b"hi"), packed)
    untyped_inputs = [{name: value for name, value in tensor.items() if name != "contents"} for tensor in typed_inputs]
    from_raw = read(infer_request(*untyped_inputs, raw=raw), whole=False)
    if member is None:
        assert "belong in raw_input_contents" in refusal(infer_request(*typed_inputs))[1]
    else:
        assert read(infer_request(*typed_inputs), whole=False).request == from_raw.request
    if datatype not in ("BYTES", "BOOL"):
        assert getattr(from_raw.request.sampling, name) == 2


def test_triton_grpc_parameters_match_http():
    message = infer_request(TEXT, id="7")
    for name, kind, value in (("temperature", "double_param", 0.5), ("max_tokens", "int64_param", 9),
                              ("ignore_eos", "bool_param", True), ("seed", "uint64_param", 2**64 - 1),
                              ("stop", "string_param", "x"), ("unheard_of", "int64_param", 1)):  # fmt: skip
        setattr(message.parameters[name], kind, value)
    document = {
        "id": "7",
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}],
        "parameters": {"temperature": 0.5, "max_tokens": 9, "ignore_eos": True, "seed": 2**64 - 1, "stop": "x"},
    }
    assert (
        read(message).request == http.read_triton_infer(json.dumps(document).encode(), make_context(model="m")).request
    )


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (infer_request(), "missing required input(s) ['text_input']"),
        (
            infer_request(TEXT, raw=(pack_texts(b"hi"),)),
            "contents field must not be specified when using raw_input_contents for 'text_input' for model 'm'",
        ),
        (
            infer_request(
                {"name": "text_input", "datatype": "BYTES", "shape": [1]},
                {"name": "stream", "datatype": "BOOL"},
                raw=(pack_texts(b"hi"),),
            ),
            "raw_input_contents has no entry for input 'stream' for model 'm'",
        ),
        (
            infer_request({"name": "text_input", "datatype": "BYTES", "shape": [1]}, raw=(pack_texts(b"hi"), b"")),
            "unexpected additional input data for model 'm'",
        ),
        (
            infer_request({"name": "text_input", "datatype": "BYTES", "shape": [1]}, raw=(pack_texts(b"hi")[:-1],)),
            "unexpected size for input 'text_input', expecting 1 additional bytes for model 'm'",
        ),
        (
            infer_request(typed_tensor("text_input", "BYTES", "int_contents", 7)),
            "datatype 'BYTES' belong in bytes_contents",
        ),
        (
            infer_request(typed_tensor("text_input", "BYTES", "bytes_contents", b"\xff")),
            "input 'text_input' is not UTF-8 text",
        ),
        (infer_request(typed_tensor("text_input", "BYTES", "bytes_contents", b"a", b"b")), "does not match true shape"),
        (
            infer_request(typed_tensor("text_input", "BYTES", "bytes_contents", b"a", shape=(-1,))),
            "must not be negative",
        ),
        (
            infer_request(typed_tensor("text_input", "FP8", "fp32_contents", 1)),
            "data-type is 'FP8', but model 'm' expects 'BYTES'",
        ),
        (infer_request(TEXT, TEXT), "[request id: <id_unknown>] input 'text_input' already exists in request"),
        (infer_request(TEXT, parameters={"triton_x": {"bool_param": True}}), "reserved for Triton usage"),
        (infer_request(TEXT, parameters={infer.EMPTY_FINAL_PARAMETER: {"int64_param": 1}}), "must be a bool_param"),
        (infer_request(TEXT, parameters={"x": {}}), "parameter 'x' has invalid type"),
        (infer_request(TEXT, parameters={"temperature": {"double_param": -1}}), "'temperature'"),
        (
            infer_request(TEXT, outputs=[{"name": "text_output"}] * 2),
            "[request id: <id_unknown>] output 'text_output' already exists in request",
        ),
        (infer_request(TEXT, outputs=[{"name": "nothing"}]), "unexpected inference output 'nothing' for model 'm'"),
        (
            infer_request(
                {
                    "name": "text_input",
                    "datatype": "BYTES",
                    "shape": [1],
                    "parameters": {"shared_memory_region": {"string_param": "r"}},
                }
            ),
            "Shared memory is not available",
        ),
    ],
)
def test_triton_grpc_refuses_wrong_request(message, error):
    status, sentence = refusal(message)
    assert status == 400 and error in sentence


def test_triton_grpc_refuses_unknown_model_version():
    assert read(infer_request(TEXT, model_version="1"))
    assert refusal(infer_request(TEXT, model_version="2")) == (
        404,
        "Request for unknown model: 'm' version 2 is not found",
    )


# -- answers


def done(index: int = 0, tokens: int = 2) -> ChoiceDone:
    return ChoiceDone(index, "length", Usage(3, tokens))


def test_triton_grpc_answers_in_requested_order():
    inference = read(infer_request(TEXT, id="7", outputs=[{"name": "num_input_tokens"}, {"name": "text_output"}]))
    assert inference.make_response([PromptAccepted(0, [1, 2, 3]), ChoiceDelta(0, " a")]) is None
    answer = inference.make_response([ChoiceDelta(0, "b"), done()])
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "7")
    assert [(o.name, o.datatype, list(o.shape)) for o in answer.outputs] == [
        ("num_input_tokens", "UINT32", []),
        ("text_output", "BYTES", [1]),
    ]
    assert list(answer.raw_output_contents) == [b"\x03\x00\x00\x00", pack_texts(b"hi ab")]


def test_triton_grpc_stream_marks_last_answer():
    inference = read(infer_request(TEXT, typed_tensor("stream", "BOOL", "bool_contents", True)), whole=False)
    first = infer.stream_response(
        inference.make_response([PromptAccepted(0, [1]), ChoiceDelta(0, "a")]), final=inference.all_ended
    )
    assert first.infer_response.raw_output_contents[0] == pack_texts(b"a")
    assert inference.make_response([]) is None
    last = infer.stream_response(inference.make_response([ChoiceDelta(0, "b"), done()]), final=inference.all_ended)
    flags = [answer.infer_response.parameters[infer.FINAL_PARAMETER].bool_param for answer in (first, last)]
    assert flags == [False, True] and not last.error_message
    assert last.infer_response.raw_output_contents[0] == pack_texts(b"b")


def test_triton_grpc_sends_one_answer_without_stream_input():
    for whole in (True, False):
        inference = read(infer_request(TEXT), whole=whole)
        assert inference.make_response([PromptAccepted(0, [1]), ChoiceDelta(0, "a")]) is None
        assert inference.make_response([done()]).raw_output_contents[0] == pack_texts(b"hia")


def test_triton_grpc_failure_names_its_request():
    failure = infer.stream_error(infer_request(TEXT, id="7"), "It broke.")
    assert (failure.error_message, failure.infer_response.id, failure.infer_response.model_name) == (
        "It broke.",
        "7",
        "m",
    )
    assert failure.infer_response.parameters[infer.FINAL_PARAMETER].bool_param


# -- health, metadata, statistics and settings


def ask(name: str, facts: ServerFacts = FACTS, /, **members: Any) -> Any:
    answer = control.GRPC_METHODS[name](INFERENCE_SCHEMA(f"{name}Request")(**members), make_context(), facts)
    assert answer.DESCRIPTOR.full_name == f"inference.{name}Response"
    return answer


def ask_refusal(name: str, facts: ServerFacts = FACTS, /, **members: Any) -> tuple[int, str]:
    with pytest.raises(ParleyError) as caught:
        ask(name, facts, **members)
    status, data, _ = error_answers.triton_error_answer(caught.value)
    return status, json.loads(data)["error"]


def test_triton_grpc_reports_health():
    assert ask("ServerLive").live and ask("ServerLive", LOADING).live
    assert ask("ServerReady").ready and not ask("ServerReady", LOADING).ready
    assert ask("ModelReady", name="m").ready and ask("ModelReady", name="alias", version="1").ready
    assert not ask("ModelReady", LOADING, name="m").ready
    assert not ask("ModelReady", name="x").ready and not ask("ModelReady", name="m", version="2").ready
    assert ask_refusal("ModelReady", name="m", version="x")[0] == 404
    for service in ("", "inference.GRPCInferenceService"):
        question = control.HEALTH_REQUEST(service=service)
        assert control.answer_health_check(question, make_context(), FACTS).status == 1
        assert control.answer_health_check(question, make_context(), LOADING).status == 2
    with pytest.raises(ParleyError):
        control.answer_health_check(control.HEALTH_REQUEST(service="other"), make_context(), FACTS)


def test_triton_grpc_writes_metadata_and_config():
    server = ask("ServerMetadata")
    assert (server.name, server.version, server.extensions[0]) == ("triton", "1.2", "model_repository")
    model = ask("ModelMetadata", name="m")
    assert [tensor.name for tensor in model.inputs] == list(INPUTS) and list(model.versions) == ["1"]
    assert [tensor.name for tensor in model.outputs] == list(OUTPUTS) and list(model.outputs[0].shape) == [-1]
    config = ask("ModelConfig", name="m", version="1").config
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 0 and config.backend == "vllm"
    assert config.input[0].data_type == 13 and not config.input[0].optional and config.input[1].optional
    assert config.version_policy.latest.num_versions == 1 and config.optimization.input_pinned_memory.enable
    for name in ("ModelMetadata", "ModelConfig"):
        assert ask_refusal(name, name="x")[0] == ask_refusal(name, name="m", version="2")[0] == 404
        assert ask_refusal(name) == (404, "Request for unknown model: '' is not found")


def test_triton_grpc_writes_statistics():
    (one,) = ask("ModelStatistics", name="m").model_stats
    assert (one.name, one.inference_count, one.last_inference) == ("m", 2, 1500)
    assert (one.inference_stats.success.count, one.inference_stats.success.ns) == (2, 2_500_000_000)
    assert len(ask("ModelStatistics").model_stats) == 2
    assert ask_refusal("ModelStatistics", name="x") == (400, "requested model 'x' is not available")


def test_triton_grpc_lists_repository():
    (one, _) = ask("RepositoryIndex").models
    assert (one.name, one.version, one.state, one.reason) == ("m", "1", "READY", "")
    assert not ask("RepositoryIndex", LOADING, ready=True).models
    assert ask_refusal("RepositoryIndex", repository_name="r")[0] == 501
    ask("RepositoryModelLoad", model_name="m")
    assert (
        ask_refusal("RepositoryModelLoad", model_name="m", parameters={"file:1/x": {"bytes_param": b"\xff"}})[0] == 400
    )
    assert (
        ask_refusal("RepositoryModelLoad", model_name="x")[1]
        == "failed to load 'x', failed to poll from model repository"
    )
    assert ask_refusal("RepositoryModelUnload", model_name="m")[0] == 503


def test_triton_grpc_settings_are_read_only():
    assert ask("TraceSetting").settings["trace_level"].value == ["OFF"]
    assert ask("TraceSetting", model_name="m", settings={"trace_rate": {"value": ["1000"]}, "trace_level": {}})
    assert ask_refusal("TraceSetting", model_name="x")[0] == 404
    assert ask_refusal("TraceSetting", settings={"trace_level": {"value": ["TIMESTAMPS"]}})[0] == 400
    log_settings = ask("LogSettings", settings={"log_info": {"bool_param": True}}).settings
    assert log_settings["log_info"].bool_param and log_settings["log_format"].string_param == "default"
    assert log_settings["log_verbose_level"].WhichOneof("parameter_choice") == "uint32_param"
    assert "log_verbose_level" in ask_refusal("LogSettings", settings={"log_verbose_level": {"uint32_param": 1}})[1]


@pytest.mark.parametrize("kind", ["System", "Cuda"])
def test_triton_grpc_refuses_shared_memory(kind):
    assert not ask(f"{kind}SharedMemoryStatus").regions
    assert ask_refusal(f"{kind}SharedMemoryStatus", name="r") == (404, "Unable to find shared memory region: 'r'")
    assert ask_refusal(f"{kind}SharedMemoryRegister", name="r", byte_size=8)[0] == 501
    ask(f"{kind}SharedMemoryUnregister", name="r")


# -- arbitrary requests

scalar = st.one_of(
    st.fixed_dictionaries({"bool_param": st.booleans()}),
    st.fixed_dictionaries({"int64_param": st.integers(-(2**63), 2**63 - 1)}),
    st.fixed_dictionaries({"uint64_param": st.integers(0, 2**64 - 1)}),
    st.fixed_dictionaries({"double_param": st.floats()}),
    st.fixed_dictionaries({"string_param": st.text(max_size=8)}),
    st.just({}),
)
names = st.sampled_from(sorted({*KNOWN_PARAMETERS, *INPUTS})) | st.text(max_size=4)
parameters = st.dictionaries(
    names | st.sampled_from([infer.EMPTY_FINAL_PARAMETER, "shared_memory_region"]), scalar, max_size=3
)
contents = st.fixed_dictionaries(
    {},
    optional={
        "bool_contents": st.lists(st.booleans(), max_size=2),
        "int_contents": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=2),
        "uint64_contents": st.lists(st.integers(0, 2**64 - 1), max_size=2),
        "fp32_contents": st.lists(st.floats(width=32), max_size=2),
        "bytes_contents": st.lists(st.binary(max_size=6), max_size=2),
    },
)
tensors = st.fixed_dictionaries(
    {"name": names, "datatype": st.sampled_from([*STRUCT_FORMATS, "BYTES", "", "X"])},
    optional={
        "shape": st.lists(st.sampled_from([1, 1, 0, 2, -1, 2**62]), max_size=4),
        "contents": contents,
        "parameters": parameters,
    },
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(tensors | st.just(TEXT), max_size=3),
    st.lists(st.binary(max_size=9), max_size=2),
    parameters,
    st.lists(st.fixed_dictionaries({"name": st.sampled_from(sorted(OUTPUTS)) | names}), max_size=2),
    st.text(max_size=3),
)
def test_triton_grpc_answers_or_refuses_any_request(inputs, raw, parameters, outputs, request_id):
    """Guards against exceptions other than refusals, and against object addresses in error messages."""
    message = infer_request(*inputs, raw=tuple(raw), parameters=parameters, outputs=outputs, id=request_id)
    try:
        inference = read(message, whole=False)
    except ParleyError as error:
        assert error_answers.triton_error_answer(error).status in (400, 404, 500)
        assert error.message and "0x" not in error.message
        return
    events = [PromptAccepted(0, [1]), *(done(index) for index in range(inference.request.n))]
    assert inference.make_response(events).id == request_id and inference.all_ended


# -- glance: reading the model and prompt without decoding the whole message


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=9), st.text(max_size=300), st.text(max_size=9), parameters, st.booleans(), st.integers(0, 2))
def test_routing_scan_finds_model_and_prompt_in_message(model, text, request_id, parameters, raw, place):
    other = typed_tensor("stream", "BOOL", "bool_contents", True)
    prompt = typed_tensor("text_input", "BYTES", "bytes_contents", text.encode())
    tensors = [other, other]
    tensors.insert(place, {name: value for name, value in prompt.items() if not raw or name != "contents"})
    raw_contents = [b"\1", b"\1"]
    raw_contents.insert(place, pack_texts(text.encode()))
    message = infer_request(*tensors, raw=tuple(raw_contents) if raw else (), parameters=parameters, id=request_id)
    message.model_name = model
    data = message.SerializeToString()
    assert (message_peek.peek_model(data), message_peek.peek_prompt(data)) == (model, text.encode())


def test_routing_scan_gives_up_after_4096_fields():
    """Guards the coordinator against stalling: scanning many small fields takes a second per megabyte."""
    message = infer_request()
    message.model_name = "m"
    data = message.SerializeToString()
    assert message_peek.peek_model(b"\x10\x01" * 4000 + data) == "m"
    assert message_peek.peek_model(b"\x10\x01" * 4096 + data) == ""


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_routing_scan_accepts_any_bytes(data):
    """Guards the coordinator against exceptions on malformed messages."""
    message_peek.peek_model(data)
    message_peek.peek_prompt(data)


@given(st.lists(st.binary(max_size=20), max_size=5), st.data())
def test_triton_grpc_frames_may_be_cut_anywhere(messages, data):
    stream = b"".join(map(frames.message_frame, messages)) + frames.grpc_failure_frame(404, "It is not there.")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader = frames.FrameSplitter()
    decoded = [message for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True) for message in
             reader.split_frames(stream[start:end])]  # fmt: skip
    assert decoded == [*messages, frames.StreamFailure(404, "It is not there.")]
