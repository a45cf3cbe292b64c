"""Health, metadata, statistics, the repository, and trace and log settings of a server.

Each model has one version and stays loaded while the server runs. A call that would change this, or a setting, is
refused; a call that asks for the present state succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parley.dialects.facts import ModelCard, ServerFacts
from parley.dialects.json_answer import encode_json, json_answer
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.triton import model, versions
from parley.dialects.triton.document import parse_document
from parley.dialects.triton.error_answers import quote_name, triton_error_body, wrong_type_error
from parley.errors import InvalidValue, UnknownModel, Unsupported
from parley.metrics.request_totals import RequestTotals

EXTENSIONS = ("model_repository", "model_configuration", "binary_tensor_data", "parameters", "statistics", "trace",
              "logging")  # fmt: skip
REPOSITORY_STATES = {"ready": "READY", "loading": "LOADING", "restarting": "LOADING", "draining": "UNLOADING"}
TRACE_SETTINGS = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
LOG_SETTINGS = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}

InfoHandler = Callable[[bytes, RequestContext, ServerFacts], Answer]


def strict_health(good: bool) -> Answer:
    """Return the original's health answer: a status without a body."""
    return Answer(status=200 if good else 400, content_type=b"")


def kserve_health(member: str, good: bool) -> Answer:
    """Return a health answer with a body, which KServe's own client reads."""
    return Answer(200 if good else 400, encode_json({member: good}))


def server_metadata(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the server's metadata."""
    return json_answer({"name": "triton", "version": facts.version, "extensions": EXTENSIONS})


# -- the model


def model_metadata_answer(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the metadata of the path's model. Raises UnknownModel."""
    return json_answer(model.describe_bridge_model(_card_of_path(context, facts).name))


def model_config_answer(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the configuration of the path's model. Raises UnknownModel."""
    return json_answer(model.model_configuration(_card_of_path(context, facts).name))


def model_ready_answer(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return 200 if the path's model is ready, else 400. Raises UnknownModel."""
    if _card_of_path(context, facts).phase != "ready":
        return Answer(400, triton_error_body("Model version not ready"))
    return Answer(content_type=b"")


def model_statistics(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the statistics of the path's model, or of all models. Unlike elsewhere, an unknown model is a 400."""
    name = context.path_parts.get("model")
    cards = [card for card in facts.cards if name in (None, card.name)]
    if not cards:
        raise InvalidValue(f"requested model {quote_name(name or '')} is not available")
    try:
        versions.check_model_version(context.path_parts)
    except UnknownModel:
        raise InvalidValue(f"requested model version is not available for model '{name}'") from None
    return json_answer({"model_stats": [_statistics_object(card.name, card.totals) for card in cards]})


def _statistics_object(name: str, totals: RequestTotals) -> dict[str, Any]:
    def duration_stat(seconds: float, count: int = totals.succeeded) -> dict[str, int]:
        return {"count": count, "ns": round(seconds * 1e9)}

    return {
        "name": name,
        "version": model.MODEL_VERSION,
        "last_inference": round(totals.last_end * 1000),
        "inference_count": totals.succeeded,
        "execution_count": totals.succeeded,
        "inference_stats": {
            "success": duration_stat(totals.total_seconds),
            "fail": duration_stat(totals.failed_seconds, totals.failed + totals.cancelled),
            "queue": duration_stat(totals.queue_seconds),
            "compute_input": duration_stat(totals.prepare_seconds),
            "compute_infer": duration_stat(totals.compute_seconds),
            "compute_output": duration_stat(0.0),
            "cache_hit": duration_stat(0.0, 0),
            "cache_miss": duration_stat(0.0, 0),
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": 1,
                "compute_input": duration_stat(totals.prepare_seconds),
                "compute_infer": duration_stat(totals.compute_seconds),
                "compute_output": duration_stat(0.0),
            }
        ]
        if totals.succeeded
        else [],
        "memory_usage": [],
    }


# -- the repository


def repository_index(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the list of models with their states, optionally only the ready ones. Raises BadRequest."""
    members = parse_document(body) if body else {}
    only_ready = members.get("ready", False)
    if not isinstance(only_ready, bool):
        raise wrong_type_error("boolean", "'ready'")
    if "repo" in context.path_parts:
        raise _no_repositories()
    cards = [card for card in facts.cards if card.phase == "ready" or not only_ready]
    return json_answer(
        [{"name": card.name, "version": model.MODEL_VERSION, "state": _repository_state(card)} for card in cards]
    )


def model_names_answer(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the names of all models, as KServe's servers do."""
    return json_answer({"models": [card.name for card in facts.cards]})


def _repository_state(card: ModelCard) -> str:
    return REPOSITORY_STATES.get(card.phase, "UNAVAILABLE")


def load_model_answer(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Accept a model that is served. Any other model, or another configuration, is refused. Raises BadRequest."""
    if "repo" in context.path_parts:
        raise _no_repositories()
    parameters = _read_load_parameters(body)
    name = context.path_parts["model"]
    if all(card.name != name for card in facts.cards):
        raise InvalidValue(f"failed to load {quote_name(name)}, failed to poll from model repository")
    if parameters:
        raise Unsupported(
            f"{quote_name(next(iter(parameters)))}: A model is not loaded with another configuration here."
        )
    return Answer()


def unload_model_answer(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Refuse like the original without explicit model control. Under strict rules this also answers loading."""
    if "repo" in context.path_parts:
        raise _no_repositories()
    _read_load_parameters(body)
    return Answer(503, triton_error_body("explicit model load / unload is not allowed if polling is enabled"))


def _read_load_parameters(body: bytes) -> dict[str, Any]:
    parameters = parse_document(body).get("parameters", {}) if body else {}
    if not isinstance(parameters, dict):
        raise wrong_type_error("object", "'parameters'")
    return parameters


def _no_repositories() -> Unsupported:
    error = Unsupported("'repository_name' specification is not supported")
    error.status = 501
    return error


# -- settings


def trace_settings(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the trace settings; a change is refused. Raises BadRequest, UnknownModel."""
    if "model" in context.path_parts:
        _card_of_path(context, facts)
    return _unchangeable_settings(body, TRACE_SETTINGS)


def log_settings(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the log settings; a change is refused. Raises BadRequest."""
    return _unchangeable_settings(body, LOG_SETTINGS)


def _unchangeable_settings(body: bytes, current: dict[str, Any]) -> Answer:
    """Return the settings; they cannot be changed. Null asks for the default, which is the present value."""
    for name, value in (parse_document(body) if body else {}).items():
        if name not in current:
            raise InvalidValue(f"unknown setting {quote_name(name)}", field=name)
        present = current[name]
        # A setting with several values may be given as one text.
        same = value == present or (isinstance(value, str) and [value] == present)
        if value is not None and not same:
            raise Unsupported(f"'{name}' cannot be changed on this server.", field=name)
    return json_answer(current)


def shared_memory_status(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the status of shared memory: no region is ever registered."""
    if region := context.path_parts.get("region"):
        return Answer(404, triton_error_body(f"Unable to find shared memory region: {quote_name(region)}"))
    return json_answer([])


def refuse_shared_memory(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Refuse to register shared memory, which is not supported."""
    return Answer(501, triton_error_body("Shared memory is not available on this server."))


def unregister_shared_memory(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Succeed without doing anything, since no region can be registered."""
    return Answer()


# -- shared


def _card_of_path(context: RequestContext, facts: ServerFacts) -> ModelCard:
    name = context.path_parts["model"]
    versions.check_model_version(context.path_parts)
    for card in facts.cards:
        if card.name == name:
            return card
    raise UnknownModel(f"Request for unknown model: {quote_name(name)} is not found", name=name)
