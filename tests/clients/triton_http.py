"""All operations of tritonclient.http, run by an interpreter that has it. Arguments: HOST:PORT MODEL."""

import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

address, model = sys.argv[1:]


def text(name, value, *, binary=True, shape=(1,)):
    tensor = triton.InferInput(name, list(shape), "BYTES")
    tensor.set_data_from_numpy(np.array([value], dtype=object).reshape(shape), binary_data=binary)
    return tensor


def scalar(name, value, dtype, datatype, *, binary=True, shape=(1,)):
    tensor = triton.InferInput(name, list(shape), datatype)
    tensor.set_data_from_numpy(np.array([value], dtype=dtype).reshape(shape), binary_data=binary)
    return tensor


def expect_error(call, *parts):
    try:
        call()
    except InferenceServerException as error:
        assert all(part in str(error) for part in parts), error
    else:
        raise AssertionError("it was not refused")


with triton.InferenceServerClient(address) as client:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(model) and client.is_model_ready(model, "1")
    assert not client.is_model_ready("other")

    assert client.get_server_metadata()["name"] == "triton"
    metadata = client.get_model_metadata(model)
    assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    config = client.get_model_config(model, "1")
    assert config["model_transaction_policy"]["decoupled"] and config["max_batch_size"] == 0
    expect_error(lambda: client.get_model_metadata("other"), "[404]", "Request for unknown model: 'other' is not found")

    assert client.get_model_repository_index() == [{"name": model, "version": "1", "state": "READY"}]
    client.load_model(model)
    expect_error(lambda: client.load_model("other"), "[400]", "failed to load 'other'")
    expect_error(lambda: client.unload_model(model), "[503]", "not allowed")
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.get_log_settings()["log_verbose_level"] == 0
    expect_error(lambda: client.update_log_settings({"log_verbose_level": 1}), "[400]", "log_verbose_level")
    assert client.get_system_shared_memory_status() == client.get_cuda_shared_memory_status() == []
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    expect_error(lambda: client.register_system_shared_memory("r", "/x", 8), "[501]", "hared memory")

    text_inputs = [text("text_input", "a b c"), scalar("exclude_input_in_output", True, bool, "BOOL")]
    before = client.get_inference_statistics(model)["model_stats"][0]["inference_count"]
    greedy = {"max_tokens": 4, "temperature": 0.0}
    result = client.infer(model, text_inputs, request_id="7", parameters=greedy)
    assert result.get_response()["id"] == "7" and result.get_response()["model_version"] == "1"
    output = result.as_numpy("text_output")[0]  # text if it came as JSON, else bytes
    assert output, "the model said nothing"

    # the same request in every form that it can be sent and received in
    for binary in (True, False):
        for shape in ((1,), (1, 1)):
            inputs = [
                text("text_input", "a b c", binary=binary, shape=shape),
                scalar("max_tokens", 4, np.int32, "INT32", binary=binary, shape=shape),
                scalar("temperature", 0.0, np.float32, "FP32", binary=binary, shape=shape),
                scalar("random_seed", 7, np.uint64, "UINT64", binary=binary, shape=shape),
                scalar("exclude_input_in_output", True, bool, "BOOL", binary=binary, shape=shape),
                text("stop_words", "", binary=binary, shape=shape),
                text("bad_words", "", binary=binary, shape=shape),
            ]
            outputs = [
                triton.InferRequestedOutput("text_output", binary_data=binary),
                triton.InferRequestedOutput("cumulative_logprob", binary_data=binary),
                triton.InferRequestedOutput("num_input_tokens", binary_data=not binary),
            ]
            for coding in (None, "gzip", "deflate"):
                result = client.infer(
                    model,
                    inputs,
                    outputs=outputs,
                    request_compression_algorithm=coding,
                    response_compression_algorithm=coding,
                )
                assert result.as_numpy("text_output")[0] == (output if binary else output.decode())
                assert result.as_numpy("cumulative_logprob").dtype == np.float32
                assert result.as_numpy("num_input_tokens") > 0
                assert result.as_numpy("finish_reason") is None

    assert client.async_infer(model, text_inputs, parameters=greedy).get_result().as_numpy("text_output")[0]
    expect_error(lambda: client.infer(model, []), "[400]", "missing required input(s) ['text_input']")
    expect_error(lambda: client.infer("other", text_inputs), "[404]")
    expect_error(lambda: client.infer(model, text_inputs, model_version="2"), "[404]", "version 2 is not found")
    expect_error(
        lambda: client.infer(model, [*text_inputs, text("nobody_knows", "x")]),
        "unexpected inference input 'nobody_knows'",
    )
    expect_error(lambda: client.infer(model, text_inputs, parameters={"temperature": -1.0}), "[400]", "'temperature'")

    counts = client.get_inference_statistics(model)["model_stats"][0]
    assert counts["inference_stats"]["success"]["count"] == counts["inference_count"] == before + 14
print("good")
