"""Management of endpoints below ``/api/2.0``: list, get, create, update, delete, and other calls that the SDK makes.

Each call is a pure function: it receives all created endpoints and returns an answer, and possibly a change to make.
Every model of the server is also an endpoint of its own name, which cannot be created, changed or deleted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from parley.dialects.databricks import config
from parley.dialects.databricks.shared import SYSTEM, Words, encode
from parley.dialects.dialect import Answer, Head
from parley.dialects.facts import Card, Endpoint, Facts, Share
from parley.dialects.fields import Fields, decode
from parley.dialects.wishes import Change
from parley.errors import Conflict, Forbidden, NotFound, UnknownModel, Unsupported

WORDS = Words("Endpoint", config.CODE)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
RESERVED = ("chat", "completions", "embeddings", "responses", "v1", "pt", "anthropic")  # used in other paths
CREATOR = "parley"
TASKS = {"chat": "llm/v1/chat", "text": "llm/v1/completions", "vectors": "llm/v1/embeddings"}
LEVELS = {
    "CAN_MANAGE": "Can do everything with the endpoint",
    "CAN_QUERY": "Can query the endpoint",
    "CAN_VIEW": "Can see the endpoint",
}

Endpoints = Mapping[str, Endpoint]


def list_(body: bytes, head: Head, facts: Facts, made: Endpoints) -> Answer:
    """List all endpoints."""
    system = [_system(card) for card in facts.cards if card.name not in made]
    return _json({"endpoints": [_summary(each, facts) for each in (*made.values(), *system)]})


def get(body: bytes, head: Head, facts: Facts, made: Endpoints) -> Answer:
    """Return one endpoint. Raises UnknownModel."""
    return _json(_detail(_find(head, facts, made), facts))


def create(body: bytes, head: Head, facts: Facts, made: Endpoints) -> Change:
    """Create an endpoint. Raises BadRequest, Conflict."""
    fields = decode(body, WORDS)
    name = fields.string("name", None, cap=config.MAX_NAME)
    if name is None:
        raise fields.missing("name")
    if not NAME.fullmatch(name) or name in RESERVED:
        reason = "must be up to 63 letters, digits, dashes and underscores, and none of " + ", ".join(RESERVED)
        raise fields.fail("name", reason)
    if name in made or name in _models(facts):
        raise Conflict(f"Endpoint with name '{name}' already exists.", code="RESOURCE_ALREADY_EXISTS")
    config.unavailable(fields, "ai_gateway", "rate_limits", "email_notifications", "telemetry_config")
    about = {
        "id": head.id,
        "creation_timestamp": head.created * 1000,
        "description": fields.string("description", "", cap=4096),
        "tags": config.tags(fields, "tags"),
        "route_optimized": fields.boolean("route_optimized", False),
        "budget_policy_id": fields.string("budget_policy_id", None, cap=config.MAX_NAME),
    }
    given = fields.object("config")
    if given is None:
        raise fields.missing("config")
    return _configured(Endpoint(name, [], about), given, head, facts)


def update(body: bytes, head: Head, facts: Facts, made: Endpoints) -> Change:
    """Replace the configuration; entities or traffic that the body leaves out stay. Raises UnknownModel, BadRequest."""
    return _configured(_own(head, facts, made), decode(body, WORDS), head, facts)


def delete(body: bytes, head: Head, facts: Facts, made: Endpoints) -> Change:
    """Delete an endpoint. Raises UnknownModel, Forbidden."""
    return Change(_json({}), drop=_own(head, facts, made).name)


def tag(body: bytes, head: Head, facts: Facts, made: Endpoints) -> Change:
    """Add and delete tags. Raises UnknownModel, Forbidden, BadRequest."""
    endpoint, fields = _own(head, facts, made), decode(body, WORDS)
    tags = {each["key"]: each for each in _about(endpoint)["tags"]}
    for key in fields.strings("delete_tags", cap=64, total=1 << 16):
        tags.pop(key, None)
    tags |= {each["key"]: each for each in config.tags(fields, "add_tags")}
    return _changed(endpoint, {"tags": list(tags.values())}, {"tags": list(tags.values())})


def describe(body: bytes, head: Head, facts: Facts, made: Endpoints) -> Answer:
    """Return the endpoint's OpenAPI document, with the one path that queries it. Raises UnknownModel."""
    endpoint = _find(head, facts, made)
    schema = {"type": "object", "description": "messages, prompt or input, and how to answer them"}
    answer = {"description": "The answer", "content": {"application/json": {"schema": {"type": "object"}}}}
    post = {
        "requestBody": {"content": {"application/json": {"schema": schema}}},
        "responses": {"200": answer},
    }
    paths = {f"/serving-endpoints/{endpoint.name}/invocations": {"post": post}}
    return _json({"openapi": "3.1.0", "info": {"title": endpoint.name, "version": "1"}, "paths": paths})


def logs(body: bytes, head: Head, facts: Facts, made: Endpoints) -> Answer:
    """Return empty logs: models are not built here, and the server has one log. Raises UnknownModel, NotFound."""
    endpoint = _find(head, facts, made)
    served = head.path["served"]
    if served not in (share.name for share in endpoint.shares):
        raise NotFound(
            f"Endpoint '{endpoint.name}' has no served entity '{served[:100]}'.", code="RESOURCE_DOES_NOT_EXIST"
        )
    return _json({"logs": ""})


def permissions(body: bytes, head: Head, facts: Facts, made: Endpoints) -> Answer:
    """Return an empty access list: every client with a key may do everything. Raises UnknownModel."""
    id = _by_id(head, facts, made)["id"]
    told = {"object_id": f"/serving-endpoints/{id}", "object_type": "serving-endpoint", "access_control_list": []}
    return _json(told)


def levels(body: bytes, head: Head, facts: Facts, made: Endpoints) -> Answer:
    """Return the levels of permission and their descriptions. Raises UnknownModel."""
    _by_id(head, facts, made)
    told = [{"permission_level": level, "description": text} for level, text in LEVELS.items()]
    return _json({"permission_levels": told})


def unavailable(what: str, body: bytes, head: Head, facts: Facts) -> Answer:
    """Refuse a call that is not implemented. Raises Unsupported."""
    raise Unsupported(f"{what} not available on this server.", code=config.CODE)


# -- finding endpoints


def _models(facts: Facts) -> list[str]:
    return [card.name for card in facts.cards]


def _system(card: Card) -> Endpoint:
    """Return the endpoint that a model is by itself."""
    about = {
        "creation_timestamp": card.created * 1000,
        "last_updated_timestamp": card.created * 1000,
        "entities": {card.name: {"entity_name": SYSTEM + card.name, "entity_version": "1"}},
    }
    return Endpoint(card.name, [Share(card.name, card.name, 100)], about)


def _find(head: Head, facts: Facts, made: Endpoints) -> Endpoint:
    """Return the endpoint that the path names. Raises UnknownModel."""
    name = head.path["endpoint"]
    if name in made:
        return made[name]
    card = next((card for card in facts.cards if card.name == name), None)
    if card is None:
        raise UnknownModel(f"Endpoint with name '{name[:100]}' does not exist.", name=name)
    return _system(card)


def _about(endpoint: Endpoint) -> dict[str, Any]:
    """Return the stored description, with defaults for members that a hand-written file omits."""
    entities = {share.name: {"entity_name": share.model, "entity_version": "1"} for share in endpoint.shares}
    return {
        "id": hashlib.sha256(endpoint.name.encode()).hexdigest()[:32],
        "creation_timestamp": 0,
        "last_updated_timestamp": 0,
        "config_version": 1,
        "tags": [],
        "route_optimized": False,
        **endpoint.about,
        "entities": entities | endpoint.about.get("entities", {}),
    }


def _own(head: Head, facts: Facts, made: Endpoints) -> Endpoint:
    """Return the endpoint that the path names, if it can be changed. Raises UnknownModel, Forbidden."""
    endpoint = _find(head, facts, made)
    if endpoint.name not in made:
        raise Forbidden(f"Endpoint '{endpoint.name}' is a model of the server itself: it cannot be changed or deleted.")
    return endpoint


def _by_id(head: Head, facts: Facts, made: Endpoints) -> dict[str, Any]:
    """Return the description of the endpoint with the path's id. Raises UnknownModel."""
    every = (*made.values(), *(_system(card) for card in facts.cards))
    found = next((about for about in map(_about, every) if about["id"] == head.path["id"]), None)
    if found is None:
        raise UnknownModel("There is no endpoint with this id.", name=head.path["id"])
    return found


# -- changing endpoints


def _configured(endpoint: Endpoint, given: Fields, head: Head, facts: Facts) -> Change:
    """Return the change to an endpoint with the body's configuration. Raises BadRequest."""
    config.unavailable(given, "auto_capture_config")
    named = config.entities(given, _models(facts))
    if named is None and not endpoint.shares:
        raise given.missing("served_entities")
    if named is None and not given.has("traffic_config"):
        raise given.missing("served_entities")
    served, kept = named or ({share.name: share.model for share in endpoint.shares}, _about(endpoint)["entities"])
    shares = config.shares(given, served)
    if len(tasks := _tasks(shares, facts)) > 1:
        raise given.fail("served_entities", f"must all be for the same task, but they are for {', '.join(tasks)}")
    about = endpoint.about | {
        "entities": kept,
        "config_version": _about(endpoint)["config_version"] + 1 if endpoint.shares else 1,
        "last_updated_timestamp": head.created * 1000,
    }
    changed = Endpoint(endpoint.name, shares, about)
    return Change(_json(_detail(changed, facts)), put=changed)


def _changed(endpoint: Endpoint, about: dict[str, Any], told: Any) -> Change:
    return Change(_json(told), put=msgspec.structs.replace(endpoint, about=endpoint.about | about))


# -- describing endpoints


def _state(endpoint: Endpoint, facts: Facts) -> dict[str, str]:
    """Return the state. Changes are complete when they are answered, so none is ever in progress."""
    ready = all(_serves(share, facts) for share in endpoint.shares if share.percent)
    return {"ready": "READY" if ready else "NOT_READY", "config_update": "NOT_UPDATING"}


def _serves(share: Share, facts: Facts) -> bool:
    return any(card.name == share.model and card.phase == "ready" for card in facts.cards)


def _tasks(shares: Sequence[Share], facts: Facts) -> list[str]:
    """Return the tasks of the models; models that no longer exist do not count."""
    purposes = {card.name: card.purpose for card in facts.cards}
    return sorted({TASKS[purposes[share.model]] for share in shares if share.model in purposes})


def _entity(share: Share, endpoint: Endpoint, facts: Facts) -> dict[str, Any]:
    about, there = _about(endpoint), share.model in _models(facts)
    deployment = "READY" if _serves(share, facts) else "CREATING" if there else "FAILED"
    return {
        "name": share.name,
        **about["entities"][share.name],
        "foundation_model": {"name": share.model, "display_name": share.model, "docs": "", "description": ""},
        "creator": CREATOR,
        "creation_timestamp": about["creation_timestamp"],
        "state": {
            "deployment": f"DEPLOYMENT_{deployment}",
            "deployment_state_message": "" if there else f"This server has no model {share.model}.",
        },
    }


def _model(entity: dict[str, Any]) -> dict[str, Any]:
    """Return a served entity under the member names that older clients read."""
    names = {"entity_name": "model_name", "entity_version": "model_version"}
    return {names.get(name, name): value for name, value in entity.items() if name != "foundation_model"}


def _common(endpoint: Endpoint, facts: Facts) -> dict[str, Any]:
    about = _about(endpoint)
    told = {
        "name": endpoint.name,
        "id": about["id"],
        "creator": CREATOR,
        "creation_timestamp": about["creation_timestamp"],
        "last_updated_timestamp": about["last_updated_timestamp"],
        "state": _state(endpoint, facts),
        "tags": about["tags"],
        "task": next(iter(_tasks(endpoint.shares, facts)), TASKS["chat"]),
        "permission_level": "CAN_MANAGE",
        "route_optimized": about["route_optimized"],
    }
    return told | {name: about[name] for name in ("description", "budget_policy_id") if about.get(name)}


def _summary(endpoint: Endpoint, facts: Facts) -> dict[str, Any]:
    """Return an endpoint as the list shows it, with only the served entities of its configuration."""
    named = ("name", "entity_name", "entity_version", "foundation_model")
    entities = [_entity(share, endpoint, facts) for share in endpoint.shares]
    served = [{name: entity[name] for name in named} for entity in entities]
    return _common(endpoint, facts) | {"config": {"served_entities": served}}


def _detail(endpoint: Endpoint, facts: Facts) -> dict[str, Any]:
    entities = [_entity(share, endpoint, facts) for share in endpoint.shares]
    routes = [
        {"served_model_name": share.name, "served_entity_name": share.name, "traffic_percentage": share.percent}
        for share in endpoint.shares
    ]
    return _common(endpoint, facts) | {
        "config": {
            "served_entities": entities,
            "served_models": list(map(_model, entities)),
            "traffic_config": {"routes": routes},
            "config_version": _about(endpoint)["config_version"],
        }
    }


def _json(value: Any) -> Answer:
    return Answer(body=encode(value))
