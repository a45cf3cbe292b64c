"""A client of Triton's gRPC port, and helpers that read its answers."""

import struct
from typing import Any

import grpc
import pytest
from support.http_client import RunningServer

from parley.dialects.triton.rpc import infer
from parley.dialects.triton.rpc.messages import HEALTH_SCHEMA, INFERENCE_SCHEMA
from parley.serving.grpc.grpc_port import TritonGrpcPort

BROKEN_MESSAGE = b"\xff\xff\xff"  # not a valid message


class GrpcClient:
    """A server with its gRPC port, and a channel to it."""

    def __init__(self, server: RunningServer, port: TritonGrpcPort, address: str):
        self.server, self.port, self.address = server, port, address
        self.channel = grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])

    def call(self, name: str, /, timeout: float = 120, metadata: Any = (), **members: Any) -> Any:
        return self.send(name, INFERENCE_SCHEMA(f"{name}Request")(**members).SerializeToString(), timeout, metadata)

    def send(self, name: str, data: bytes, /, timeout: float = 120, metadata: Any = ()) -> Any:
        answer = INFERENCE_SCHEMA(f"{name}Response").FromString
        method = self.channel.unary_unary(f"/inference.GRPCInferenceService/{name}", response_deserializer=answer)
        return method(data, timeout=timeout, metadata=metadata)

    def infer(self, *, timeout: float = 120, metadata: Any = (), **members: Any) -> Any:
        return self.send("ModelInfer", build_infer_request(**members).SerializeToString(), timeout, metadata)

    def stream(self, **options: Any) -> Any:
        path = "/inference.GRPCInferenceService/ModelStreamInfer"
        return self.channel.stream_stream(path, response_deserializer=infer.STREAM_RESPONSE.FromString)(**options)

    def check(self, service: str = "") -> Any:
        answer = HEALTH_SCHEMA("HealthCheckResponse").FromString
        method = self.channel.unary_unary("/grpc.health.v1.Health/Check", response_deserializer=answer)
        return method(HEALTH_SCHEMA("HealthCheckRequest")(service=service).SerializeToString())


def build_infer_request(
    text: str = "a b c", model: str = "tiny", request_id: str = "", stream: bool = False, **parameters: Any
) -> Any:
    message = infer.INFER_REQUEST(model_name=model, id=request_id)
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1], contents={"bytes_contents": [text.encode()]})
    message.inputs.add(name="stream", datatype="BOOL", shape=[1], contents={"bool_contents": [stream]})
    message.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1], contents={"bool_contents": [True]})
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, setting in parameters.items():
        setattr(message.parameters[name], kinds[type(setting)], setting)
    return message


def answer_text(answer: Any) -> str:
    """The text of an answer."""
    (content,) = answer.raw_output_contents
    assert struct.unpack_from("<I", content) == (len(content) - 4,)
    return content[4:].decode()


def is_final(answer: Any) -> bool:
    return answer.infer_response.parameters[infer.FINAL_PARAMETER].bool_param


async def grpc_error(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details()
