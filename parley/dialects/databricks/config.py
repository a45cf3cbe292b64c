"""The configuration of an endpoint in a body: the served models, their names, and their shares of the traffic.

Older clients write ``served_models`` and ``served_model_name``, newer ones ``served_entities`` and
``served_entity_name``; both are read. Members about the size of a machine are stored and returned without effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from parley.dialects.facts import EndpointShare
from parley.dialects.fields import Fields
from parley.dialects.openai.common_members import MAX_TOKENS
from parley.errors import Unsupported

SYSTEM_CATALOGUE = "system.ai."  # the original's model catalogue, which its users prefix to names
MAX_SERVED = 10
MAX_NAME = 255
INVALID_VALUE = "INVALID_PARAMETER_VALUE"
PERCENTAGE = re.compile(r"100|\d{1,2}", re.ASCII)

SIZE_STRINGS = ("workload_size", "workload_type", "instance_profile_arn")
SIZE_NUMBERS = (
    "min_provisioned_throughput",
    "max_provisioned_throughput",
    "min_provisioned_concurrency",
    "max_provisioned_concurrency",
    "provisioned_model_units",
)
SIZE_SWITCHES = ("scale_to_zero_enabled", "burst_scaling_enabled")


def refuse_members(body: Fields, *names: str) -> None:
    """Refuse members that would need an action, rather than store them without effect. Raises Unsupported."""
    for name in names:
        if body.raw_value(name):
            raise Unsupported(
                f'parameter "{body.member_path(name)}" is not available on this server', field=name, code=INVALID_VALUE
            )


def read_entities(config: Fields, models: Sequence[str]) -> tuple[dict[str, str], dict[str, dict[str, Any]]] | None:
    """Return the models, and the stored members, by served name; None if the body names none. Raises BadRequest."""
    member = "served_entities" if config.has_value("served_entities") else "served_models"
    if not config.has_value(member):
        return None
    model_by_name: dict[str, str] = {}
    stored: dict[str, dict[str, Any]] = {}
    for item in config.objects(member, cap=MAX_SERVED):
        name, model, description = _read_entity(item, models)
        if name in model_by_name:
            raise item.member_error("name", f'"{name}" is already the name of another served entity')
        model_by_name[name], stored[name] = model, description
    if not model_by_name:
        raise config.empty_member(member, "array")
    return model_by_name, stored


def _read_entity(item: Fields, models: Sequence[str]) -> tuple[str, str, dict[str, Any]]:
    refuse_members(item, "external_model", "environment_vars")
    prefix = "entity" if item.has_value("entity_name") or not item.has_value("model_name") else "model"
    entity = item.string(f"{prefix}_name", None, cap=MAX_NAME)
    if entity is None:
        raise item.missing_member("entity_name")
    version = item.string(f"{prefix}_version", "1", cap=MAX_NAME)
    model = next(
        (candidate for candidate in (entity, entity.removeprefix(SYSTEM_CATALOGUE)) if candidate in models), None
    )
    if model is None:
        raise item.member_error(
            f"{prefix}_name", f'"{entity}" is not a model of this server, which has {", ".join(models)}'
        )
    name = item.string("name", f"{entity.replace('.', '-')}-{version}", cap=MAX_NAME)
    if not name or not name.isascii() or not name.isprintable():
        raise item.member_error("name", "must be printable ASCII characters")
    return name, model, {"entity_name": entity, "entity_version": version} | dict(_machine_sizes(item))


def _machine_sizes(item: Fields) -> Iterator[tuple[str, Any]]:
    """Yield the given members about the size of a machine."""
    for name in SIZE_STRINGS:
        if (text := item.string(name, None, cap=MAX_NAME)) is not None:
            yield name, text
    for name in SIZE_NUMBERS:
        if (number := item.integer(name, None, 0, MAX_TOKENS)) is not None:
            yield name, number
    for name in SIZE_SWITCHES:
        if (switch := item.boolean(name, None)) is not None:
            yield name, switch


def read_traffic_shares(config: Fields, model_by_name: dict[str, str]) -> list[EndpointShare]:
    """Return how the models share the requests; a single model gets all of them. Raises BadRequest."""
    traffic = config.object("traffic_config")
    if traffic is None or not traffic.has_value("routes"):
        if len(model_by_name) > 1:
            raise config.missing_member("traffic_config") if traffic is None else traffic.missing_member("routes")
        return [EndpointShare(name, model, 100) for name, model in model_by_name.items()]
    parts: dict[str, int] = {}
    for route in traffic.objects("routes", cap=MAX_SERVED):
        member = "served_entity_name" if route.has_value("served_entity_name") else "served_model_name"
        name = route.string(member, None, cap=MAX_NAME)
        if name is None:
            raise route.missing_member("served_model_name")
        if name not in model_by_name:
            raise route.member_error(member, f'"{name}" is not one of the served entities: {", ".join(model_by_name)}')
        if name in parts:
            raise route.member_error(member, f'"{name}" already has a route')
        parts[name] = _read_percentage(route)
    if sum(parts.values()) != 100:
        raise traffic.member_error(
            "routes", f"must have percentages that add up to 100, but they sum to {sum(parts.values())}"
        )
    return [EndpointShare(name, model, parts.get(name, 0)) for name, model in model_by_name.items()]


def _read_percentage(route: Fields) -> int:
    """Read an integer, or one as text, which the original's own examples use. Raises BadRequest."""
    value = route.raw_value("traffic_percentage")
    if isinstance(value, str) and PERCENTAGE.fullmatch(value):
        return int(value)
    percentage = route.integer("traffic_percentage", None, 0, 100)
    if percentage is None:
        raise route.missing_member("traffic_percentage")
    return percentage


def read_tags(body: Fields, name: str) -> list[dict[str, str]]:
    """Read a list of keys with optional values. Raises BadRequest."""
    tag_by_key: dict[str, dict[str, str]] = {}
    for item in body.objects(name, cap=64):
        key = item.string("key", None, cap=MAX_NAME)
        if not key:
            raise item.missing_member("key")
        value = item.string("value", None, cap=MAX_NAME)
        tag_by_key[key] = {"key": key} | ({} if value is None else {"value": value})
    return list(tag_by_key.values())
