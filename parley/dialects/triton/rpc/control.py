"""Server information and control over gRPC: each method forwards to the HTTP dialect's answer to the same call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from parley.dialects.dialect import Answer, Head
from parley.dialects.facts import Facts
from parley.dialects.triton import control
from parley.dialects.triton.rpc.messages import HEALTH, INFERENCE, Message, filled, told, values
from parley.errors import NotFound, UnknownModel

Ask = Callable[[Message, Head, Facts], Message]
LISTS = ("trace_level",)  # settings that are lists even with one value

SERVICE = "inference.GRPCInferenceService"
QUESTION = HEALTH("HealthCheckRequest")
STATE = HEALTH("HealthCheckResponse")


def _put(ask: control.Ask, head: Head, facts: Facts, body: dict[str, Any] | None = None, **path: str) -> Any:
    """Return the HTTP dialect's answer, decoded. Empty parts of the path count as absent, except the model's name."""
    place = {part: value for part, value in path.items() if value or part == "model"}
    answer: Answer = ask(msgspec.json.encode(body) if body else b"", replace(head, path=place), facts)
    return told(answer)


# -- health


def live(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``ServerLive``."""
    return filled("ServerLiveResponse", {"live": True})


def ready(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``ServerReady``."""
    return filled("ServerReadyResponse", {"ready": facts.ready})


def check(message: Message, head: Head, facts: Facts) -> Message:
    """Answer gRPC's health check. Raises NotFound for another service."""
    if message.service not in ("", SERVICE):
        raise NotFound("There is no such service.")
    return STATE(status="SERVING" if facts.ready else "NOT_SERVING")


# -- the server and the model


def server(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``ServerMetadata``."""
    return filled("ServerMetadataResponse", _put(control.server, head, facts))


def model_ready(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``ModelReady``; an unknown model is not ready."""
    try:
        _put(control.metadata, head, facts, model=message.name, version=message.version)
    except UnknownModel:
        return filled("ModelReadyResponse", {"ready": False})
    ready = any(card.name == message.name and card.phase == "ready" for card in facts.cards)
    return filled("ModelReadyResponse", {"ready": ready})


def metadata(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``ModelMetadata``. Raises UnknownModel."""
    answer = _put(control.metadata, head, facts, model=message.name, version=message.version)
    return filled("ModelMetadataResponse", answer)


def config(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``ModelConfig``. Raises UnknownModel."""
    answer = _put(control.config, head, facts, model=message.name, version=message.version)
    told = {name: value for name, value in answer.items() if value not in ("", [], {})}  # empty is absent in protobuf
    return filled("ModelConfigResponse", {"config": told})


def statistics(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``ModelStatistics``."""
    path = {"model": message.name, "version": message.version} if message.name else {}
    return filled("ModelStatisticsResponse", _put(control.statistics, head, facts, **path))


# -- the repository


def index(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``RepositoryIndex``."""
    answer = _put(control.index, head, facts, {"ready": message.ready}, repo=message.repository_name)
    return filled("RepositoryIndexResponse", {"models": answer})


def load(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``RepositoryModelLoad``. Raises ParleyError if refused."""
    _repository(control.load, message, head, facts)
    return filled("RepositoryModelLoadResponse", {})


def unload(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``RepositoryModelUnload``. Raises ParleyError if refused."""
    _repository(control.unload, message, head, facts)
    return filled("RepositoryModelUnloadResponse", {})


def _repository(ask: control.Ask, message: Message, head: Head, facts: Facts) -> None:
    parameters = values(message.parameters)
    _put(ask, head, facts, {"parameters": parameters}, repo=message.repository_name, model=message.model_name)


# -- settings


def trace(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``TraceSetting``. Raises ParleyError if a change is refused."""
    wish: dict[str, Any] = {}
    for name, setting in message.settings.items():
        given = list(setting.value)
        wish[name] = None if not given else given if name in LISTS or len(given) > 1 else given[0]
    path = {"model": message.model_name} if message.model_name else {}
    answer = _put(control.trace, head, facts, wish, **path)
    settings = {name: {"value": value if isinstance(value, list) else [value]} for name, value in answer.items()}
    return filled("TraceSettingResponse", {"settings": settings})


def log(message: Message, head: Head, facts: Facts) -> Message:
    """Answer ``LogSettings``. Raises ParleyError if a change is refused."""
    answer = _put(control.log, head, facts, values(message.settings))
    kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
    settings = {name: {kinds[type(value)]: value} for name, value in answer.items()}
    return filled("LogSettingsResponse", {"settings": settings})


# -- shared memory


def _shared(kind: str) -> dict[str, Ask]:
    """Return the methods for one kind of shared memory; none of it can be registered."""

    def status(message: Message, head: Head, facts: Facts) -> Message:
        _put(control.regions, head, facts, region=message.name)
        return filled(f"{kind}SharedMemoryStatusResponse", {})

    def register(message: Message, head: Head, facts: Facts) -> Message:
        return _put(control.register, head, facts)  # raises

    def unregister(message: Message, head: Head, facts: Facts) -> Message:
        _put(control.unregister, head, facts, region=message.name)
        return filled(f"{kind}SharedMemoryUnregisterResponse", {})

    calls = {"Status": status, "Register": register, "Unregister": unregister}
    return {f"{kind}SharedMemory{name}": call for name, call in calls.items()}


CALLS: dict[str, Ask] = {
    "ServerLive": live,
    "ServerReady": ready,
    "ServerMetadata": server,
    "ModelReady": model_ready,
    "ModelMetadata": metadata,
    "ModelConfig": config,
    "ModelStatistics": statistics,
    "RepositoryIndex": index,
    "RepositoryModelLoad": load,
    "RepositoryModelUnload": unload,
    "TraceSetting": trace,
    "LogSettings": log,
    **_shared("System"),
    **_shared("Cuda"),
}

_QUESTIONS = {method.name: method.input_type.name for method in INFERENCE.service("GRPCInferenceService")[1]}


def question(method: str) -> Any:
    """Return the class of a method's request message."""
    return INFERENCE(_QUESTIONS[method])
