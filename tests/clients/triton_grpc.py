"""All operations of tritonclient.grpc, run by an interpreter that has it. Arguments: HOST:PORT MODEL."""

import asyncio
import importlib.util
import queue
import sys
from pathlib import Path

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import aio, model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

address, model = sys.argv[1:]
PACKAGE = Path(__file__).parent.parent.parent / "parley" / "dialects" / "triton" / "rpc"


def tensor(name, value, datatype, shape=(1,)):
    infer_input = triton.InferInput(name, list(shape), datatype)
    infer_input.set_data_from_numpy(np.array([value], dtype=triton.triton_to_np_dtype(datatype)).reshape(shape))
    return infer_input


def make_inputs(text, *, stream=False, shape=(1,), **more):
    inputs = [tensor("text_input", text.encode(), "BYTES", shape), tensor("stream", stream, "BOOL", shape)]
    inputs.append(tensor("exclude_input_in_output", True, "BOOL", shape))
    kinds = {int: "INT32", float: "FP32", str: "BYTES"}
    return inputs + [tensor(name, value, kinds[type(value)], shape) for name, value in more.items()]


def expect_error(call, status, *parts):
    try:
        call()
    except InferenceServerException as error:
        assert error.status() == f"StatusCode.{status}", error
        assert all(part in error.message() for part in parts), error
    else:
        raise AssertionError("it was not refused")


def compare_messages(ours, theirs):
    """Compares field numbers and types of our messages with Triton's; members that we never send may be missing."""
    for field in ours.fields:
        other = theirs.fields_by_name[field.name]
        assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated), (
            field.name
        )
        one, two = field.containing_oneof, other.containing_oneof
        assert (one and one.name) == (two and two.name), field.name
        if field.message_type:
            compare_messages(field.message_type, other.message_type)
        if field.enum_type:
            numbers = [(value.name, value.number) for value in field.enum_type.values]
            assert numbers == [(value.name, value.number) for value in other.enum_type.values]


def check_schema():
    spec = importlib.util.spec_from_file_location("schema", PACKAGE / "schema.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    schema = module.ProtoSchema("inference.proto")
    for name in schema.message_names:
        other = getattr(service_pb2, name, None) or getattr(model_config_pb2, name)
        compare_messages(schema(name).DESCRIPTOR, other.DESCRIPTOR)
    assert set(service_pb2.DESCRIPTOR.message_types_by_name) <= set(schema.message_names)
    methods = {method.name: method for method in schema.find_service("GRPCInferenceService")[1]}
    others = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    assert set(methods) == {method.name for method in others}
    for other in others:
        ours = methods[other.name]
        assert ours.input_type.full_name == other.input_type.full_name
        assert ours.output_type.full_name == other.output_type.full_name
        assert (ours.client_streaming, ours.server_streaming) == (other.client_streaming, other.server_streaming)


class Stream:
    """The client's stream; collects results by request id."""

    def __init__(self, client, **options):
        self.client, self.queue = client, queue.Queue()
        client.start_stream(callback=lambda result, error: self.queue.put((result, error)), **options)

    def send(self, text, request_id, name=model, **more):
        parameters = {"max_tokens": 8} | more.pop("parameters", {})
        self.client.async_stream_infer(
            name,
            make_inputs(text, **more),
            request_id=request_id,
            parameters=parameters,
            enable_empty_final_response=True,
        )

    def read_results(self, count):
        """Reads until this number of requests has ended; returns their texts and the errors."""
        texts, errors = {}, []
        while count:
            result, error = self.queue.get(timeout=30)
            if error:
                errors.append(error)
                count -= 1
                continue
            response = result.get_response()
            texts.setdefault(response.id, []).append(result.as_numpy("text_output")[0].decode())
            final = response.parameters["triton_final_response"].bool_param
            is_final = result.get_response(as_json=True)["parameters"]["triton_final_response"]
            assert is_final == {"bool_param": final}, is_final  # LangChain's client reads it there
            count -= final
        return texts, errors


def check_control(client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(model) and client.is_model_ready(model, "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata().name == "triton"
    assert client.get_server_metadata(as_json=True)["extensions"]
    metadata = client.get_model_metadata(model, as_json=True)
    assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": ["1"]}
    config = client.get_model_config(model, "1").config
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 0
    expect_error(
        lambda: client.get_model_metadata("other"), "NOT_FOUND", "Request for unknown model: 'other' is not found"
    )
    assert [entry.name for entry in client.get_model_repository_index().models] == [model]
    client.load_model(model)
    expect_error(lambda: client.load_model("other"), "INVALID_ARGUMENT", "failed to load 'other'")
    expect_error(lambda: client.unload_model(model), "UNAVAILABLE", "not allowed")
    assert client.get_trace_settings().settings["trace_level"].value == ["OFF"]
    assert client.get_log_settings().settings["log_verbose_level"].uint32_param == 0
    expect_error(lambda: client.update_log_settings({"log_verbose_level": 1}), "INVALID_ARGUMENT", "log_verbose_level")
    expect_error(lambda: client.update_trace_settings(model, {"trace_rate": "1"}), "INVALID_ARGUMENT", "trace_rate")
    assert not client.get_system_shared_memory_status().regions and not client.get_cuda_shared_memory_status().regions
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    expect_error(lambda: client.register_system_shared_memory("r", "/x", 8), "UNIMPLEMENTED", "hared memory")


def check_infer(client):
    result = client.infer(model, make_inputs("a b c"), request_id="7", parameters={"max_tokens": 6, "temperature": 0.0})
    assert (result.get_response().id, result.get_response().model_version) == ("7", "1")
    text = result.as_numpy("text_output")[0].decode()
    assert text, "the model said nothing"
    for shape in ((1,), (1, 1)):  # as TensorRT-LLM's clients send it
        inputs = make_inputs(
            "a b c", shape=shape, max_tokens=6, temperature=0.0, beam_width=1, bad_words="", stop_words=""
        )
        inputs.append(tensor("random_seed", 7, "UINT64", shape))
        outputs = [triton.InferRequestedOutput(name) for name in ("num_input_tokens", "text_output", "cum_log_probs")]
        for coding in (None, "gzip", "deflate"):
            result = client.infer(model, inputs, outputs=outputs, compression_algorithm=coding)
            assert result.as_numpy("text_output")[0].decode() == text
            assert result.as_numpy("num_input_tokens") > 0 and result.as_numpy("cum_log_probs").dtype == np.float32
            assert result.as_numpy("finish_reason") is None
    results = queue.Queue()
    client.async_infer(model, make_inputs("a"), callback=lambda result, error: results.put((result, error)))
    assert results.get(timeout=30)[1] is None
    expect_error(lambda: client.infer(model, []), "INVALID_ARGUMENT", "missing required input(s) ['text_input']")
    expect_error(lambda: client.infer("other", make_inputs("a")), "NOT_FOUND")
    expect_error(
        lambda: client.infer(model, make_inputs("a"), model_version="2"), "NOT_FOUND", "version 2 is not found"
    )
    expect_error(
        lambda: client.infer(model, make_inputs("a"), parameters={"temperature": -1.0}),
        "INVALID_ARGUMENT",
        "temperature",
    )
    expect_error(lambda: client.infer(model, make_inputs("a"), client_timeout=1e-6), "DEADLINE_EXCEEDED")
    before = client.get_inference_statistics(model).model_stats[0].inference_count
    call = client.async_infer(model, make_inputs("a"), callback=lambda result, error: results.put((result, error)),
                              parameters={"max_tokens": 1000, "ignore_eos": True})  # fmt: skip
    call.cancel()
    assert results.get(timeout=30)[1].status() == "StatusCode.CANCELLED"
    assert client.get_inference_statistics(model).model_stats[0].inference_count == before
    return text


def check_streams(client, text):
    stream = Stream(client)
    for request_id in "123":
        stream.send("a b c", request_id, stream=True, parameters={"max_tokens": 6, "temperature": 0.0})
    stream.send("a b c", "whole", parameters={"max_tokens": 6, "temperature": 0.0})
    stream.send("a b c", "lost", name="other")
    stream.send("a b c", "hot", parameters={"temperature": -1.0})
    texts, errors = stream.read_results(6)
    assert {request_id: "".join(parts) for request_id, parts in texts.items()} == dict.fromkeys(
        ("1", "2", "3", "whole"), text
    )
    assert len(texts["whole"]) == 1  # the others may also be whole: pending tokens are sent together
    messages = sorted(error.message() for error in errors)
    assert "'temperature'" in messages[0] and messages[1] == "Request for unknown model: 'other' is not found"
    client.stop_stream()

    stream = Stream(client)
    stream.send("a b c", "long", stream=True, parameters={"max_tokens": 4000, "ignore_eos": True})
    result, error = stream.queue.get(timeout=30)
    assert error is None and not result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream(cancel_requests=True)

    stream = Stream(client, headers={"triton_grpc_error": "true"})
    stream.send("a b c", "lost", name="other")
    assert stream.read_results(1)[1][0].status() == "StatusCode.NOT_FOUND"
    client.stop_stream()


async def check_async_stream(answer_text):
    async with aio.InferenceServerClient(address) as client:
        assert await client.is_server_ready()

        async def requests():
            for request_id in "12":
                yield {"model_name": model, "inputs": make_inputs("a b c", stream=True), "request_id": request_id,
                       "parameters": {"max_tokens": 6, "temperature": 0.0}}  # fmt: skip

        texts = {}
        async for result, error in client.stream_infer(requests()):
            assert error is None, error
            text = result.as_numpy("text_output")[0].decode()
            texts[result.get_response().id] = texts.get(result.get_response().id, "") + text
        assert texts == {"1": answer_text, "2": answer_text}


with triton.InferenceServerClient(address) as client:
    check_schema()
    check_control(client)
    said = check_infer(client)
    check_streams(client, said)
    asyncio.run(check_async_stream(said))
    counts = client.get_inference_statistics(model).model_stats[0]
    assert counts.inference_stats.success.count == counts.inference_count >= 10
    with grpc.insecure_channel(address) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"
print("good")
