"""Server information and control over gRPC: each method forwards to the HTTP dialect's answer to the same call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from parley.dialects.facts import ServerFacts
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.triton import control
from parley.dialects.triton.rpc.messages import (
    HEALTH_SCHEMA,
    INFERENCE_SCHEMA,
    ProtoMessage,
    decode_http_answer,
    fill_message,
    parameter_values,
)
from parley.errors import NotFound, UnknownModel

GrpcHandler = Callable[[ProtoMessage, RequestContext, ServerFacts], ProtoMessage]
LIST_SETTINGS = ("trace_level",)  # settings that are lists even with one value

SERVICE_NAME = "inference.GRPCInferenceService"
HEALTH_REQUEST = HEALTH_SCHEMA("HealthCheckRequest")
HEALTH_RESPONSE = HEALTH_SCHEMA("HealthCheckResponse")


def _forward_to_http(
    handler: control.InfoHandler,
    context: RequestContext,
    facts: ServerFacts,
    body: dict[str, Any] | None = None,
    **path: str,
) -> Any:
    """Return the HTTP dialect's answer, decoded. Empty parts of the path count as absent, except the model's name."""
    path_parts = {part: value for part, value in path.items() if value or part == "model"}
    answer: Answer = handler(msgspec.json.encode(body) if body else b"", replace(context, path_parts=path_parts), facts)
    return decode_http_answer(answer)


# -- health


def server_live(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``ServerLive``."""
    return fill_message("ServerLiveResponse", {"live": True})


def server_ready(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``ServerReady``."""
    return fill_message("ServerReadyResponse", {"ready": facts.ready})


def answer_health_check(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer gRPC's health check. Raises NotFound for another service."""
    if message.service not in ("", SERVICE_NAME):
        raise NotFound("There is no such service.")
    return HEALTH_RESPONSE(status="SERVING" if facts.ready else "NOT_SERVING")


# -- the server and the model


def grpc_server_metadata(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``ServerMetadata``."""
    return fill_message("ServerMetadataResponse", _forward_to_http(control.server_metadata, context, facts))


def model_ready(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``ModelReady``; an unknown model is not ready."""
    try:
        _forward_to_http(control.model_metadata_answer, context, facts, model=message.name, version=message.version)
    except UnknownModel:
        return fill_message("ModelReadyResponse", {"ready": False})
    ready = any(card.name == message.name and card.phase == "ready" for card in facts.cards)
    return fill_message("ModelReadyResponse", {"ready": ready})


def grpc_model_metadata(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``ModelMetadata``. Raises UnknownModel."""
    answer = _forward_to_http(
        control.model_metadata_answer, context, facts, model=message.name, version=message.version
    )
    return fill_message("ModelMetadataResponse", answer)


def grpc_model_config(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``ModelConfig``. Raises UnknownModel."""
    answer = _forward_to_http(control.model_config_answer, context, facts, model=message.name, version=message.version)
    # Empty is absent in protobuf.
    present = {name: value for name, value in answer.items() if value not in ("", [], {})}
    return fill_message("ModelConfigResponse", {"config": present})


def grpc_statistics(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``ModelStatistics``."""
    path = {"model": message.name, "version": message.version} if message.name else {}
    return fill_message("ModelStatisticsResponse", _forward_to_http(control.model_statistics, context, facts, **path))


# -- the repository


def grpc_repository_index(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``RepositoryIndex``."""
    answer = _forward_to_http(
        control.repository_index, context, facts, {"ready": message.ready}, repo=message.repository_name
    )
    return fill_message("RepositoryIndexResponse", {"models": answer})


def grpc_load_model(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``RepositoryModelLoad``. Raises ParleyError if refused."""
    _forward_repository_call(control.load_model_answer, message, context, facts)
    return fill_message("RepositoryModelLoadResponse", {})


def grpc_unload_model(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``RepositoryModelUnload``. Raises ParleyError if refused."""
    _forward_repository_call(control.unload_model_answer, message, context, facts)
    return fill_message("RepositoryModelUnloadResponse", {})


def _forward_repository_call(
    handler: control.InfoHandler, message: ProtoMessage, context: RequestContext, facts: ServerFacts
) -> None:
    parameters = parameter_values(message.parameters)
    _forward_to_http(
        handler, context, facts, {"parameters": parameters}, repo=message.repository_name, model=message.model_name
    )


# -- settings


def grpc_trace_settings(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``TraceSetting``. Raises ParleyError if a change is refused."""
    changes: dict[str, Any] = {}
    for name, setting in message.settings.items():
        setting_values = list(setting.value)
        changes[name] = (
            None
            if not setting_values
            else setting_values
            if name in LIST_SETTINGS or len(setting_values) > 1
            else setting_values[0]
        )
    path = {"model": message.model_name} if message.model_name else {}
    answer = _forward_to_http(control.trace_settings, context, facts, changes, **path)
    settings = {name: {"value": value if isinstance(value, list) else [value]} for name, value in answer.items()}
    return fill_message("TraceSettingResponse", {"settings": settings})


def grpc_log_settings(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
    """Answer ``LogSettings``. Raises ParleyError if a change is refused."""
    answer = _forward_to_http(control.log_settings, context, facts, parameter_values(message.settings))
    kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    settings = {name: {kinds[type(value)]: value} for name, value in answer.items()}
    return fill_message("LogSettingsResponse", {"settings": settings})


# -- shared memory


def _shared_memory_methods(kind: str) -> dict[str, GrpcHandler]:
    """Return the methods for one kind of shared memory; none of it can be registered."""

    def status(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
        _forward_to_http(control.shared_memory_status, context, facts, region=message.name)
        return fill_message(f"{kind}SharedMemoryStatusResponse", {})

    def register(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
        return _forward_to_http(control.refuse_shared_memory, context, facts)  # raises

    def unregister(message: ProtoMessage, context: RequestContext, facts: ServerFacts) -> ProtoMessage:
        _forward_to_http(control.unregister_shared_memory, context, facts, region=message.name)
        return fill_message(f"{kind}SharedMemoryUnregisterResponse", {})

    calls = {"Status": status, "Register": register, "Unregister": unregister}
    return {f"{kind}SharedMemory{name}": call for name, call in calls.items()}


GRPC_METHODS: dict[str, GrpcHandler] = {
    "ServerLive": server_live,
    "ServerReady": server_ready,
    "ServerMetadata": grpc_server_metadata,
    "ModelReady": model_ready,
    "ModelMetadata": grpc_model_metadata,
    "ModelConfig": grpc_model_config,
    "ModelStatistics": grpc_statistics,
    "RepositoryIndex": grpc_repository_index,
    "RepositoryModelLoad": grpc_load_model,
    "RepositoryModelUnload": grpc_unload_model,
    "TraceSetting": grpc_trace_settings,
    "LogSettings": grpc_log_settings,
    **_shared_memory_methods("System"),
    **_shared_memory_methods("Cuda"),
}

_REQUEST_TYPES = {
    method.name: method.input_type.name for method in INFERENCE_SCHEMA.find_service("GRPCInferenceService")[1]
}


def request_class(method: str) -> Any:
    """Return the class of a method's request message."""
    return INFERENCE_SCHEMA(_REQUEST_TYPES[method])
