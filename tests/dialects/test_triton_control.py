"""Triton's health, metadata, statistics, repository and settings routes: exact bytes and refusals."""

import json
from typing import Any

import pytest

from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.triton import DIALECT, STRICT, control, error_answers
from parley.dialects.triton.model import INPUTS, OUTPUTS
from parley.errors import ParleyError
from parley.metrics.request_totals import RequestTotals

TOTALS = RequestTotals(
    succeeded=2,
    failed=1,
    cancelled=1,
    last_end=1.5,
    total_seconds=2.5,
    failed_seconds=0.5,
    prepare_seconds=0.25,
    queue_seconds=0.5,
    compute_seconds=1.75,
)
FACTS = ServerFacts(
    "1.2", [ModelCard("m", 5, 64, "m", "ready", TOTALS), ModelCard("alias", 5, 64, "m", "ready", TOTALS)], True
)
LOADING = ServerFacts("1.2", [ModelCard("m", 5, None, "m", "loading")], False)


def ask(read: control.InfoHandler, facts: ServerFacts = FACTS, body: Any = b"", **path: str) -> Answer:
    return read(
        body if isinstance(body, bytes) else json.dumps(body).encode(),
        RequestContext("0f", 1, "fp", path_parts=path),
        facts,
    )


def refusal(read: control.InfoHandler, body: Any = b"", **path: str) -> tuple[int, str]:
    with pytest.raises(ParleyError) as caught:
        ask(read, FACTS, body, **path)
    status, data, _ = error_answers.triton_error_answer(caught.value)
    return status, json.loads(data)["error"]


@pytest.mark.parametrize("member", ["live", "ready"])
@pytest.mark.parametrize("good", [True, False])
def test_triton_health_has_body_unless_strict(member, good):
    status, body = (200, b'{"%s":true}') if good else (400, b'{"%s":false}')
    for dialect, answer in ((DIALECT, Answer(status, body % member.encode())), (STRICT, Answer(status, b"", b""))):
        (route,) = [route for route in dialect.routes if route.path == f"/v2/health/{member}"]
        assert route.writer(good) == answer


def test_triton_ready_model_has_empty_body():
    assert ask(control.model_ready_answer, model="m") == Answer(200, b"", b"")
    assert ask(control.model_ready_answer, LOADING, model="m") == Answer(400, b'{"error":"Model version not ready"}')


def test_triton_writes_server_metadata():
    assert ask(control.server_metadata).body == (
        b'{"name":"triton","version":"1.2","extensions":["model_repository","model_configuration","binary_tensor_data",'
        b'"parameters","statistics","trace","logging"]}'
    )


def test_triton_writes_model_metadata():
    body = ask(control.model_metadata_answer, model="m").body
    assert body.startswith(
        b'{"name":"m","versions":["1"],"platform":"vllm","inputs":[{"name":"text_input","datatype":"BYTES","shape":[1]},'
        b'{"name":"stream","datatype":"BOOL","shape":[1]},'
    )
    assert body.endswith(
        b'"outputs":[{"name":"text_output","datatype":"BYTES","shape":[-1]},'
        b'{"name":"finish_reason","datatype":"BYTES","shape":[-1]},{"name":"stop_reason","datatype":"BYTES","shape":[-1]},'
        b'{"name":"cumulative_logprob","datatype":"FP32","shape":[-1]},'
        b'{"name":"logprobs","datatype":"BYTES","shape":[-1]},{"name":"num_input_tokens","datatype":"UINT32","shape":[1]},'
        b'{"name":"num_output_tokens","datatype":"UINT32","shape":[-1]},'
        b'{"name":"cum_log_probs","datatype":"FP32","shape":[-1]},'
        b'{"name":"output_log_probs","datatype":"FP32","shape":[-1,-1]}]}'
    )


def test_triton_writes_model_config():
    config = json.loads(ask(control.model_config_answer, model="alias").body)
    assert config["name"] == "alias" and config["max_batch_size"] == 0
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["input"][0] == {
        "name": "text_input",
        "data_type": "TYPE_STRING",
        "format": "FORMAT_NONE",
        "dims": [1],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
        "is_non_linear_format_io": False,
    }
    assert [entry["name"] for entry in config["input"] if not entry["optional"]] == ["text_input"]
    assert config["output"][3]["data_type"] == "TYPE_FP32"
    assert (len(config["input"]), len(config["output"])) == (len(INPUTS), len(OUTPUTS))


ENTRY = (
    b'{"name":"%b","version":"1","last_inference":1500,"inference_count":2,"execution_count":2,"inference_stats":{'
    b'"success":{"count":2,"ns":2500000000},"fail":{"count":2,"ns":500000000},"queue":{"count":2,"ns":500000000},'
    b'"compute_input":{"count":2,"ns":250000000},"compute_infer":{"count":2,"ns":1750000000},'
    b'"compute_output":{"count":2,"ns":0},"cache_hit":{"count":0,"ns":0},"cache_miss":{"count":0,"ns":0}},'
    b'"response_stats":{},"batch_stats":[{"batch_size":1,"compute_input":{"count":2,"ns":250000000},"compute_infer":'
    b'{"count":2,"ns":1750000000},"compute_output":{"count":2,"ns":0}}],"memory_usage":[]}'
)


def test_triton_writes_statistics():
    one = b'{"model_stats":[' + ENTRY % b"m" + b"]}"
    assert (
        ask(control.model_statistics, model="m").body
        == ask(control.model_statistics, model="m", version="1").body
        == one
    )
    assert ask(control.model_statistics).body == b'{"model_stats":[' + ENTRY % b"m" + b"," + ENTRY % b"alias" + b"]}"
    assert refusal(control.model_statistics, model="x") == (400, "requested model 'x' is not available")
    assert refusal(control.model_statistics, model="m", version="2") == (
        400,
        "requested model version is not available for model 'm'",
    )


def test_triton_lists_repository():
    entries = b'{"name":"m","version":"1","state":"READY"},{"name":"alias","version":"1","state":"READY"}'
    for body in (b"", {}, {"ready": True}):
        assert ask(control.repository_index, body=body).body == b"[" + entries + b"]"
    assert ask(control.repository_index, LOADING).body == b'[{"name":"m","version":"1","state":"LOADING"}]'
    assert ask(control.repository_index, LOADING, {"ready": True}).body == b"[]"
    assert refusal(control.repository_index, {"ready": 1})[0] == 500
    assert refusal(control.repository_index, b"{")[0] == 500


def test_triton_load_accepts_only_loaded_model():
    for body in (b"", {}, {"parameters": {}}):
        assert ask(control.load_model_answer, body=body, model="m") == Answer()
    assert refusal(control.load_model_answer, model="x") == (
        400,
        "failed to load 'x', failed to poll from model repository",
    )
    for name in ("config", "file:1/model.onnx"):
        status, message = refusal(control.load_model_answer, {"parameters": {name: "{}"}}, model="m")
        assert status == 400 and message.startswith(f"'{name}': ")
    assert refusal(control.load_model_answer, {"parameters": 5}, model="m")[0] == 500


def test_triton_refuses_unload():
    answer = ask(control.unload_model_answer, body={"parameters": {"unload_dependents": False}}, model="m")
    assert answer == Answer(503, b'{"error":"explicit model load / unload is not allowed if polling is enabled"}')


@pytest.mark.parametrize("read", [control.repository_index, control.load_model_answer, control.unload_model_answer])
def test_triton_refuses_repository_name(read):
    assert refusal(read, model="m", repo="r") == (501, "'repository_name' specification is not supported")


def test_triton_settings_are_read_only():
    trace = (
        b'{"trace_level":["OFF"],"trace_rate":"1000","trace_count":"-1","log_frequency":"0","trace_file":"",'
        b'"trace_mode":"triton"}'
    )
    log = (
        b'{"log_file":"","log_info":true,"log_warning":true,"log_error":true,"log_verbose_level":0,'
        b'"log_format":"default"}'
    )
    assert ask(control.trace_settings).body == ask(control.trace_settings, model="m").body == trace
    assert ask(control.trace_settings, body={"trace_level": ["OFF"], "trace_rate": None}).body == trace
    assert ask(control.trace_settings, body={"trace_level": "OFF"}).body == trace
    assert ask(control.log_settings).body == ask(control.log_settings, body={"log_info": True}).body == log
    assert refusal(control.trace_settings, {"trace_level": ["TIMESTAMPS"]}) == (
        400,
        "'trace_level' cannot be changed on this server.",
    )
    assert refusal(control.log_settings, {"log_verbose_level": 1}) == (
        400,
        "'log_verbose_level' cannot be changed on this server.",
    )
    assert refusal(control.log_settings, {"x": 1}) == (400, "unknown setting 'x'")
    assert refusal(control.log_settings, b"[]")[0] == 500
    assert refusal(control.trace_settings, model="x") == (404, "Request for unknown model: 'x' is not found")


def test_triton_refuses_shared_memory():
    assert ask(control.shared_memory_status).body == b"[]"
    assert ask(control.shared_memory_status, region="r") == Answer(
        404, b'{"error":"Unable to find shared memory region: \'r\'"}'
    )
    assert ask(control.refuse_shared_memory, body={"key": "/x", "byte_size": 5}, region="r").status == 501
    assert ask(control.unregister_shared_memory).status == 200


@pytest.mark.parametrize(
    "read", [control.model_metadata_answer, control.model_config_answer, control.model_ready_answer]
)
def test_triton_unknown_model_or_version_is_not_found(read):
    assert refusal(read, model="x") == (404, "Request for unknown model: 'x' is not found")
    assert refusal(read, model="m", version="7") == (404, "Request for unknown model: 'm' version 7 is not found")
    assert refusal(read, model="m", version="x") == (404, "Not Found")
    assert ask(read, model="alias", version="1").status == 200


def test_triton_strict_refuses_load():
    assert [route.reader for route in STRICT.routes if route.path.endswith("/load")] == [
        control.unload_model_answer
    ] * 2


def test_triton_route_table_has_no_duplicates():
    keys = [(route.method, route.path) for route in DIALECT.routes]
    keys.remove(("GET", "/v2/"))  # Triton knows no path with a trailing slash
    keys.remove(("GET", "/v2/models"))  # KServe's
    assert keys == [(route.method, route.path) for route in STRICT.routes]
    assert len(keys) == len(set(keys)) == 40
