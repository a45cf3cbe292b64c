"""The configuration of an endpoint in a body: the served models, their names, and their shares of the traffic.

Older clients write ``served_models`` and ``served_model_name``, newer ones ``served_entities`` and
``served_entity_name``; both are read. Members about the size of a machine are stored and returned without effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from parley.dialects.databricks.shared import SYSTEM
from parley.dialects.facts import Share
from parley.dialects.fields import Fields
from parley.dialects.openai.shared import MAX_TOKENS
from parley.errors import Unsupported

MAX_SERVED = 10
MAX_NAME = 255
CODE = "INVALID_PARAMETER_VALUE"
PERCENTAGE = re.compile(r"100|\d{1,2}", re.ASCII)

STRINGS = ("workload_size", "workload_type", "instance_profile_arn")
NUMBERS = (
    "min_provisioned_throughput",
    "max_provisioned_throughput",
    "min_provisioned_concurrency",
    "max_provisioned_concurrency",
    "provisioned_model_units",
)
SWITCHES = ("scale_to_zero_enabled", "burst_scaling_enabled")


def unavailable(body: Fields, *names: str) -> None:
    """Refuse members that would need an action, rather than store them without effect. Raises Unsupported."""
    for name in names:
        if body.raw(name):
            raise Unsupported(f'parameter "{body.path(name)}" is not available on this server', field=name, code=CODE)


def entities(config: Fields, models: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, Any]]] | None:
    """Return the models, and the stored members, by served name; None if the body names none. Raises BadRequest."""
    member = "served_entities" if config.has("served_entities") else "served_models"
    if not config.has(member):
        return None
    served: dict[str, str] = {}
    kept: dict[str, dict[str, Any]] = {}
    for item in config.objects(member, cap=MAX_SERVED):
        name, model, about = _entity(item, models)
        if name in served:
            raise item.fail("name", f'"{name}" is already the name of another served entity')
        served[name], kept[name] = model, about
    if not served:
        raise config.empty(member, "array")
    return served, kept


def _entity(item: Fields, models: Sequence[str]) -> tuple[str, str, dict[str, Any]]:
    unavailable(item, "external_model", "environment_vars")
    prefix = "entity" if item.has("entity_name") or not item.has("model_name") else "model"
    entity = item.string(f"{prefix}_name", None, cap=MAX_NAME)
    if entity is None:
        raise item.missing("entity_name")
    version = item.string(f"{prefix}_version", "1", cap=MAX_NAME)
    model = next((known for known in (entity, entity.removeprefix(SYSTEM)) if known in models), None)
    if model is None:
        raise item.fail(f"{prefix}_name", f'"{entity}" is not a model of this server, which has {", ".join(models)}')
    name = item.string("name", f"{entity.replace('.', '-')}-{version}", cap=MAX_NAME)
    if not name or not name.isascii() or not name.isprintable():
        raise item.fail("name", "must be printable ASCII characters")
    return name, model, {"entity_name": entity, "entity_version": version} | dict(_sizes(item))


def _sizes(item: Fields) -> Iterator[tuple[str, Any]]:
    """Yield the given members about the size of a machine."""
    for name in STRINGS:
        if (text := item.string(name, None, cap=MAX_NAME)) is not None:
            yield name, text
    for name in NUMBERS:
        if (number := item.integer(name, None, 0, MAX_TOKENS)) is not None:
            yield name, number
    for name in SWITCHES:
        if (wish := item.boolean(name, None)) is not None:
            yield name, wish


def shares(config: Fields, served: dict[str, str]) -> list[Share]:
    """Return how the models share the requests; a single model gets all of them. Raises BadRequest."""
    traffic = config.object("traffic_config")
    if traffic is None or not traffic.has("routes"):
        if len(served) > 1:
            raise config.missing("traffic_config") if traffic is None else traffic.missing("routes")
        return [Share(name, model, 100) for name, model in served.items()]
    parts: dict[str, int] = {}
    for route in traffic.objects("routes", cap=MAX_SERVED):
        member = "served_entity_name" if route.has("served_entity_name") else "served_model_name"
        name = route.string(member, None, cap=MAX_NAME)
        if name is None:
            raise route.missing("served_model_name")
        if name not in served:
            raise route.fail(member, f'"{name}" is not one of the served entities: {", ".join(served)}')
        if name in parts:
            raise route.fail(member, f'"{name}" already has a route')
        parts[name] = _percentage(route)
    if sum(parts.values()) != 100:
        raise traffic.fail("routes", f"must have percentages that add up to 100, but they sum to {sum(parts.values())}")
    return [Share(name, model, parts.get(name, 0)) for name, model in served.items()]


def _percentage(route: Fields) -> int:
    """Read an integer, or one as text, which the original's own examples use. Raises BadRequest."""
    value = route.raw("traffic_percentage")
    if isinstance(value, str) and PERCENTAGE.fullmatch(value):
        return int(value)
    percentage = route.integer("traffic_percentage", None, 0, 100)
    if percentage is None:
        raise route.missing("traffic_percentage")
    return percentage


def tags(body: Fields, name: str) -> list[dict[str, str]]:
    """Read a list of keys with optional values. Raises BadRequest."""
    made: dict[str, dict[str, str]] = {}
    for item in body.objects(name, cap=64):
        key = item.string("key", None, cap=MAX_NAME)
        if not key:
            raise item.missing("key")
        value = item.string("value", None, cap=MAX_NAME)
        made[key] = {"key": key} | ({} if value is None else {"value": value})
    return list(made.values())
