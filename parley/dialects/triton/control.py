"""Health, metadata, statistics, the repository, and trace and log settings of a server.

Each model has one version and stays loaded while the server runs. A call that would change this, or a setting, is
refused; a call that asks for the present state succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parley.dialects.dialect import Answer, Head
from parley.dialects.facts import Card, Facts
from parley.dialects.triton import model, versions
from parley.dialects.triton.document import parse
from parley.dialects.triton.errors import body as told
from parley.dialects.triton.errors import encode, mistaken, quoted
from parley.errors import Invalid, UnknownModel, Unsupported
from parley.metrics.totals import Totals

EXTENSIONS = ("model_repository", "model_configuration", "binary_tensor_data", "parameters", "statistics", "trace",
              "logging")  # fmt: skip
STATES = {"ready": "READY", "loading": "LOADING", "restarting": "LOADING", "draining": "UNLOADING"}
TRACE = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
LOG = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}

Ask = Callable[[bytes, Head, Facts], Answer]


def health(good: bool) -> Answer:
    """Return the original's health answer: a status without a body."""
    return Answer(status=200 if good else 400, type=b"")


def healthy(member: str, good: bool) -> Answer:
    """Return a health answer with a body, which KServe's own client reads."""
    return Answer(200 if good else 400, encode({member: good}))


def server(body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the server's metadata."""
    return _json({"name": "triton", "version": facts.version, "extensions": EXTENSIONS})


# -- the model


def metadata(body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the metadata of the path's model. Raises UnknownModel."""
    return _json(model.metadata(_card(head, facts).name))


def config(body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the configuration of the path's model. Raises UnknownModel."""
    return _json(model.config(_card(head, facts).name))


def ready(body: bytes, head: Head, facts: Facts) -> Answer:
    """Return 200 if the path's model is ready, else 400. Raises UnknownModel."""
    if _card(head, facts).phase != "ready":
        return Answer(400, told("Model version not ready"))
    return Answer(type=b"")


def statistics(body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the statistics of the path's model, or of all models. Unlike elsewhere, an unknown model is a 400."""
    name = head.path.get("model")
    cards = [card for card in facts.cards if name in (None, card.name)]
    if not cards:
        raise Invalid(f"requested model {quoted(name or '')} is not available")
    try:
        versions.check(head.path)
    except UnknownModel:
        raise Invalid(f"requested model version is not available for model '{name}'") from None
    return _json({"model_stats": [_counts(card.name, card.totals) for card in cards]})


def _counts(name: str, totals: Totals) -> dict[str, Any]:
    def spent(seconds: float, count: int = totals.succeeded) -> dict[str, int]:
        return {"count": count, "ns": round(seconds * 1e9)}

    return {
        "name": name,
        "version": model.VERSION,
        "last_inference": round(totals.last * 1000),
        "inference_count": totals.succeeded,
        "execution_count": totals.succeeded,
        "inference_stats": {
            "success": spent(totals.whole),
            "fail": spent(totals.lost, totals.failed + totals.cancelled),
            "queue": spent(totals.queued),
            "compute_input": spent(totals.prepared),
            "compute_infer": spent(totals.computed),
            "compute_output": spent(0.0),
            "cache_hit": spent(0.0, 0),
            "cache_miss": spent(0.0, 0),
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": 1,
                "compute_input": spent(totals.prepared),
                "compute_infer": spent(totals.computed),
                "compute_output": spent(0.0),
            }
        ]
        if totals.succeeded
        else [],
        "memory_usage": [],
    }


# -- the repository


def index(body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the list of models with their states, optionally only the ready ones. Raises BadRequest."""
    wish = parse(body) if body else {}
    only = wish.get("ready", False)
    if not isinstance(only, bool):
        raise mistaken("boolean", "'ready'")
    if "repo" in head.path:
        raise _repository()
    cards = [card for card in facts.cards if card.phase == "ready" or not only]
    return _json([{"name": card.name, "version": model.VERSION, "state": _state(card)} for card in cards])


def _state(card: Card) -> str:
    return STATES.get(card.phase, "UNAVAILABLE")


def load(body: bytes, head: Head, facts: Facts) -> Answer:
    """Accept a model that is served. Any other model, or another configuration, is refused. Raises BadRequest."""
    if "repo" in head.path:
        raise _repository()
    parameters = _parameters(body)
    name = head.path["model"]
    if all(card.name != name for card in facts.cards):
        raise Invalid(f"failed to load {quoted(name)}, failed to poll from model repository")
    if parameters:
        raise Unsupported(f"{quoted(next(iter(parameters)))}: A model is not loaded with another configuration here.")
    return Answer()


def unload(body: bytes, head: Head, facts: Facts) -> Answer:
    """Refuse like the original without explicit model control. Under strict rules this also answers loading."""
    if "repo" in head.path:
        raise _repository()
    _parameters(body)
    return Answer(503, told("explicit model load / unload is not allowed if polling is enabled"))


def _parameters(body: bytes) -> dict[str, Any]:
    parameters = parse(body).get("parameters", {}) if body else {}
    if not isinstance(parameters, dict):
        raise mistaken("object", "'parameters'")
    return parameters


def _repository() -> Unsupported:
    error = Unsupported("'repository_name' specification is not supported")
    error.status = 501
    return error


# -- settings


def trace(body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the trace settings; a change is refused. Raises BadRequest, UnknownModel."""
    if "model" in head.path:
        _card(head, facts)
    return _settings(body, TRACE)


def log(body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the log settings; a change is refused. Raises BadRequest."""
    return _settings(body, LOG)


def _settings(body: bytes, current: dict[str, Any]) -> Answer:
    """Return the settings; they cannot be changed. Null asks for the default, which is the present value."""
    for name, value in (parse(body) if body else {}).items():
        if name not in current:
            raise Invalid(f"unknown setting {quoted(name)}", field=name)
        if value is not None and value != current[name]:
            raise Unsupported(f"'{name}' cannot be changed on this server.", field=name)
    return _json(current)


def regions(body: bytes, head: Head, facts: Facts) -> Answer:
    """Return the status of shared memory: no region is ever registered."""
    if region := head.path.get("region"):
        return Answer(404, told(f"Unable to find shared memory region: {quoted(region)}"))
    return _json([])


def register(body: bytes, head: Head, facts: Facts) -> Answer:
    """Refuse to register shared memory, which is not supported."""
    return Answer(501, told("Shared memory is not available on this server."))


def unregister(body: bytes, head: Head, facts: Facts) -> Answer:
    """Succeed without doing anything, since no region can be registered."""
    return Answer()


# -- shared


def _card(head: Head, facts: Facts) -> Card:
    name = head.path["model"]
    versions.check(head.path)
    for card in facts.cards:
        if card.name == name:
            return card
    raise UnknownModel(f"Request for unknown model: {quoted(name)} is not found", name=name)


def _json(value: Any) -> Answer:
    return Answer(200, encode(value))
