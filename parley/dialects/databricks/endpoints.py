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

from parley.dialects.admin_requests import EndpointChange
from parley.dialects.databricks import config, limits
from parley.dialects.databricks.config import SYSTEM_CATALOGUE
from parley.dialects.databricks.refusal_wording import DatabricksErrorWording
from parley.dialects.facts import Endpoint, EndpointShare, GrantLevel, ModelCard, ServerFacts
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import json_answer
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.errors import Forbidden, NotFound, ObjectConflict, UnknownModel, Unsupported
from parley.types import Tenant

ENDPOINT_WORDING = DatabricksErrorWording("Endpoint", config.INVALID_VALUE)
ENDPOINT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
RESERVED_NAMES = ("chat", "completions", "embeddings", "responses", "v1", "pt", "anthropic")  # used in other paths
CREATOR = "parley"
UPDATES = ("on_update_success", "on_update_failure")
TASKS = {"chat": "llm/v1/chat", "text": "llm/v1/completions", "vectors": "llm/v1/embeddings"}
LEVEL_NAMES: dict[GrantLevel, str] = {"manage": "CAN_MANAGE", "query": "CAN_QUERY", "view": "CAN_VIEW"}

EndpointsByName = Mapping[str, Endpoint]


def host_metadata(body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Return the answer to Databricks' SDK when it starts: no account, and no server that issues OAuth tokens."""
    return json_answer({"oidc_endpoint": ""})


def list_endpoints(body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName) -> Answer:
    """List all endpoints that the client may see."""
    visible_endpoints = [
        endpoint for endpoint in _all_endpoints(facts, created) if endpoint.client_level(context.client) is not None
    ]
    return json_answer(
        {"endpoints": [_endpoint_summary(endpoint, facts, context.client) for endpoint in visible_endpoints]}
    )


def get_endpoint(body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName) -> Answer:
    """Return one endpoint. Raises UnknownModel, Forbidden."""
    return json_answer(_endpoint_detail(_find_visible(context, facts, created), facts, context.client))


def create_endpoint(
    body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName
) -> EndpointChange:
    """Create an endpoint. Raises BadRequest, ObjectConflict."""
    fields = decode_fields(body, ENDPOINT_WORDING)
    name = fields.string("name", None, cap=config.MAX_NAME)
    if name is None:
        raise fields.missing_member("name")
    if not ENDPOINT_NAME.fullmatch(name) or name in RESERVED_NAMES:
        reason = "must be up to 63 letters, digits, dashes and underscores, and none of " + ", ".join(RESERVED_NAMES)
        raise fields.member_error("name", reason)
    if name in created or name in _model_names(facts):
        raise ObjectConflict(f"Endpoint with name '{name}' already exists.", code="RESOURCE_ALREADY_EXISTS")
    notifications = fields.object("email_notifications")
    recipients = (
        [notifications.strings(name, cap=64, total=1 << 16) for name in UPDATES] if notifications is not None else []
    )
    if any(recipients):
        config.refuse_members(fields, "email_notifications")
    config.refuse_members(fields, "telemetry_config")
    gateway = fields.object("ai_gateway")
    endpoint_limits = limits.read_limits(fields) + (limits.read_gateway(gateway) if gateway is not None else [])
    description = {
        "creation_timestamp": context.created * 1000,
        "description": fields.string("description", "", cap=4096),
        "tags": config.read_tags(fields, "tags"),
        "route_optimized": fields.boolean("route_optimized", False),
        "budget_policy_id": fields.string("budget_policy_id", None, cap=config.MAX_NAME),
    }
    table = None
    if gateway is not None:
        table = limits.read_table(gateway, "inference_table_config", name, facts, by_default=False)
    config_object = fields.object("config")
    if config_object is None:
        raise fields.missing_member("config")
    endpoint = Endpoint(name, [], description, endpoint_limits, table=table)
    return _configure_endpoint(endpoint, config_object, context, facts)


def update_endpoint(
    body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName
) -> EndpointChange:
    """Replace the configuration; entities or traffic that the body leaves out stay. Raises UnknownModel, BadRequest."""
    return _configure_endpoint(
        _find_created(context, facts, created), decode_fields(body, ENDPOINT_WORDING), context, facts
    )


def update_provisioned_endpoint(
    body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName
) -> EndpointChange:
    """Replace the configuration, which is in ``config`` in this call only. Raises UnknownModel, BadRequest."""
    endpoint, fields = _find_created(context, facts, created), decode_fields(body, ENDPOINT_WORDING)
    config_object = fields.object("config")
    if config_object is None:
        raise fields.missing_member("config")
    return _configure_endpoint(endpoint, config_object, context, facts)


def delete_endpoint(
    body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName
) -> EndpointChange:
    """Delete an endpoint. Raises UnknownModel, Forbidden."""
    return EndpointChange(json_answer({}), remove_endpoint=_find_created(context, facts, created).name)


def change_tags(body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName) -> EndpointChange:
    """Add and delete tags. Raises UnknownModel, Forbidden, BadRequest."""
    endpoint, fields = _find_created(context, facts, created), decode_fields(body, ENDPOINT_WORDING)
    tags = {tag["key"]: tag for tag in _endpoint_description(endpoint)["tags"]}
    for key in fields.strings("delete_tags", cap=64, total=1 << 16):
        tags.pop(key, None)
    tags |= {tag["key"]: tag for tag in config.read_tags(fields, "add_tags")}
    return _change_description(endpoint, {"tags": list(tags.values())}, {"tags": list(tags.values())})


def change_rate_limits(
    body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName
) -> EndpointChange:
    """Replace the rate limits. Raises UnknownModel, Forbidden, BadRequest."""
    endpoint = _find_created(context, facts, created)
    new_limits = limits.read_limits(decode_fields(body, ENDPOINT_WORDING))
    answer = json_answer({"rate_limits": limits.write_limits(new_limits)})
    return EndpointChange(answer, put_endpoint=limits.with_endpoint_limits(endpoint, new_limits))


def change_gateway(
    body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName
) -> EndpointChange:
    """Replace the gateway: rate limits and the inference table. Raises UnknownModel, Forbidden, BadRequest."""
    endpoint = _find_created(context, facts, created)
    fields = decode_fields(body, ENDPOINT_WORDING)
    table = limits.read_table(fields, "inference_table_config", endpoint.name, facts, by_default=False)
    changed = msgspec.structs.replace(endpoint, limits=limits.read_gateway(fields), table=table)
    return EndpointChange(json_answer({"rate_limits": []} | limits.write_gateway(changed)), put_endpoint=changed)


def endpoint_openapi(body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName) -> Answer:
    """Return the endpoint's OpenAPI document, with the one path that queries it. Raises UnknownModel, Forbidden."""
    endpoint = _find_visible(context, facts, created)
    schema = {"type": "object", "description": "messages, prompt or input, and how to answer them"}
    answer = {"description": "The answer", "content": {"application/json": {"schema": {"type": "object"}}}}
    post = {
        "requestBody": {"content": {"application/json": {"schema": schema}}},
        "responses": {"200": answer},
    }
    paths = {f"/serving-endpoints/{endpoint.name}/invocations": {"post": post}}
    return json_answer({"openapi": "3.1.0", "info": {"title": endpoint.name, "version": "1"}, "paths": paths})


def empty_logs(body: bytes, context: RequestContext, facts: ServerFacts, created: EndpointsByName) -> Answer:
    """Return empty logs: models are not built here, and the server has one log. Raises UnknownModel, NotFound,
    Forbidden."""
    endpoint = _find_visible(context, facts, created)
    served_name = context.path_parts["served"]
    if served_name not in (share.name for share in endpoint.shares):
        raise NotFound(
            f"Endpoint '{endpoint.name}' has no served entity '{served_name[:100]}'.",
            code="RESOURCE_DOES_NOT_EXIST",
        )
    return json_answer({"logs": ""})


def refuse_endpoint_call(subject: str, body: bytes, context: RequestContext, facts: ServerFacts) -> Answer:
    """Refuse a call that is not implemented. Raises Unsupported."""
    raise Unsupported(f"{subject} not available on this server.", code=config.INVALID_VALUE)


# -- finding endpoints


def _model_names(facts: ServerFacts) -> list[str]:
    return [card.name for card in facts.cards]


def _model_endpoint(card: ModelCard, created: EndpointsByName) -> Endpoint:
    """Return the endpoint that a model is by itself. Its permissions are stored under its name."""
    description = {
        "creation_timestamp": card.created * 1000,
        "last_updated_timestamp": card.created * 1000,
        "entities": {card.name: {"entity_name": SYSTEM_CATALOGUE + card.name, "entity_version": "1"}},
    }
    grants = created[card.name].grants if card.name in created else []
    return Endpoint(card.name, [EndpointShare(card.name, card.name, 100)], description, grants=grants)


def _all_endpoints(facts: ServerFacts, created: EndpointsByName) -> list[Endpoint]:
    """Return the created endpoints, and then those that models are by themselves."""
    models = _model_names(facts)
    created_endpoints = [endpoint for endpoint in created.values() if endpoint.name not in models]
    return created_endpoints + [_model_endpoint(card, created) for card in facts.cards]


def _find_endpoint(context: RequestContext, facts: ServerFacts, created: EndpointsByName) -> Endpoint:
    """Return the endpoint that the path names. Raises UnknownModel."""
    name = context.path_parts["endpoint"]
    endpoint = next((listed for listed in _all_endpoints(facts, created) if listed.name == name), None)
    if endpoint is None:
        raise UnknownModel(f"Endpoint with name '{name[:100]}' does not exist.", name=name)
    return endpoint


def _find_visible(context: RequestContext, facts: ServerFacts, created: EndpointsByName) -> Endpoint:
    """Return the endpoint that the path names, if the client may see it. Raises UnknownModel, Forbidden."""
    endpoint = _find_endpoint(context, facts, created)
    endpoint.check_client(context.client, "view")
    return endpoint


def endpoint_id(endpoint: Endpoint) -> str:
    """Return the id of an endpoint: the same on all instances of a cluster, each of which creates the endpoint."""
    return str(_endpoint_description(endpoint)["id"])


def _endpoint_description(endpoint: Endpoint) -> dict[str, Any]:
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


def _find_created(context: RequestContext, facts: ServerFacts, created: EndpointsByName) -> Endpoint:
    """Return the endpoint that the path names, if it can be changed. Raises UnknownModel, Forbidden."""
    endpoint = _find_endpoint(context, facts, created)
    if endpoint.name in _model_names(facts):
        raise Forbidden(f"Endpoint '{endpoint.name}' is a model of the server itself: it cannot be changed or deleted.")
    return endpoint


def find_by_id(context: RequestContext, facts: ServerFacts, created: EndpointsByName) -> Endpoint:
    """Return the endpoint with the path's id. Raises NotFound."""
    path_id = context.path_parts["id"]
    endpoint = next((listed for listed in _all_endpoints(facts, created) if endpoint_id(listed) == path_id), None)
    if endpoint is None:
        raise NotFound(f"Endpoint with id '{path_id[:100]}' does not exist.", code="RESOURCE_DOES_NOT_EXIST")
    return endpoint


# -- changing endpoints


def _configure_endpoint(
    endpoint: Endpoint, config_object: Fields, context: RequestContext, facts: ServerFacts
) -> EndpointChange:
    """Return the change to an endpoint with the body's configuration. Raises BadRequest."""
    table = endpoint.table
    if config_object.has_value("auto_capture_config"):
        table = limits.read_table(config_object, "auto_capture_config", endpoint.name, facts, by_default=True)
    entities = config.read_entities(config_object, _model_names(facts))
    if entities is None and not endpoint.shares:
        raise config_object.missing_member("served_entities")
    if entities is None and not config_object.has_value("traffic_config"):
        raise config_object.missing_member("served_entities")
    model_by_name, entity_descriptions = entities or (
        {share.name: share.model for share in endpoint.shares},
        _endpoint_description(endpoint)["entities"],
    )
    shares = config.read_traffic_shares(config_object, model_by_name)
    if len(tasks := _tasks_of_shares(shares, facts)) > 1:
        raise config_object.member_error(
            "served_entities", f"must all be for the same task, but they are for {', '.join(tasks)}"
        )
    description = endpoint.about | {
        "entities": entity_descriptions,
        "config_version": _endpoint_description(endpoint)["config_version"] + 1 if endpoint.shares else 1,
        "last_updated_timestamp": context.created * 1000,
    }
    changed_endpoint = msgspec.structs.replace(endpoint, shares=shares, about=description, table=table)
    answer = json_answer(_endpoint_detail(changed_endpoint, facts, context.client))
    return EndpointChange(answer, put_endpoint=changed_endpoint)


def _change_description(endpoint: Endpoint, changes: dict[str, Any], answer_object: Any) -> EndpointChange:
    return EndpointChange(
        json_answer(answer_object), put_endpoint=msgspec.structs.replace(endpoint, about=endpoint.about | changes)
    )


# -- describing endpoints


def _endpoint_state(endpoint: Endpoint, facts: ServerFacts) -> dict[str, str]:
    """Return the state. Changes are complete when they are answered, so none is ever in progress."""
    ready = all(_is_served(share, facts) for share in endpoint.shares if share.percent)
    return {"ready": "READY" if ready else "NOT_READY", "config_update": "NOT_UPDATING"}


def _is_served(share: EndpointShare, facts: ServerFacts) -> bool:
    return any(card.name == share.model and card.phase == "ready" for card in facts.cards)


def _tasks_of_shares(shares: Sequence[EndpointShare], facts: ServerFacts) -> list[str]:
    """Return the tasks of the models; models that no longer exist do not count."""
    purposes = {card.name: card.purpose for card in facts.cards}
    return sorted({TASKS[purposes[share.model]] for share in shares if share.model in purposes})


def _served_entity(share: EndpointShare, endpoint: Endpoint, facts: ServerFacts) -> dict[str, Any]:
    description, exists = _endpoint_description(endpoint), share.model in _model_names(facts)
    deployment = "READY" if _is_served(share, facts) else "CREATING" if exists else "FAILED"
    return {
        "name": share.name,
        **description["entities"][share.name],
        "foundation_model": {"name": share.model, "display_name": share.model, "docs": "", "description": ""},
        "creator": CREATOR,
        "creation_timestamp": description["creation_timestamp"],
        "state": {
            "deployment": f"DEPLOYMENT_{deployment}",
            "deployment_state_message": "" if exists else f"This server has no model {share.model}.",
        },
    }


def _served_model(entity: dict[str, Any]) -> dict[str, Any]:
    """Return a served entity under the member names that older clients read."""
    names = {"entity_name": "model_name", "entity_version": "model_version"}
    return {names.get(name, name): value for name, value in entity.items() if name != "foundation_model"}


def _common_members(endpoint: Endpoint, facts: ServerFacts, client: Tenant) -> dict[str, Any]:
    description = _endpoint_description(endpoint)
    endpoint_object = {
        "name": endpoint.name,
        "id": description["id"],
        "creator": CREATOR,
        "creation_timestamp": description["creation_timestamp"],
        "last_updated_timestamp": description["last_updated_timestamp"],
        "state": _endpoint_state(endpoint, facts),
        "tags": description["tags"],
        "task": next(iter(_tasks_of_shares(endpoint.shares, facts)), TASKS["chat"]),
        "permission_level": LEVEL_NAMES[endpoint.client_level(client) or "view"],
        "route_optimized": description["route_optimized"],
    }
    if gateway := limits.write_gateway(endpoint):
        endpoint_object["ai_gateway"] = gateway
    return endpoint_object | {
        name: description[name] for name in ("description", "budget_policy_id") if description.get(name)
    }


def _endpoint_summary(endpoint: Endpoint, facts: ServerFacts, client: Tenant) -> dict[str, Any]:
    """Return an endpoint as the list shows it, with only the served entities of its configuration."""
    listed_members = ("name", "entity_name", "entity_version", "foundation_model")
    entities = [_served_entity(share, endpoint, facts) for share in endpoint.shares]
    entity_objects = [{name: entity[name] for name in listed_members} for entity in entities]
    return _common_members(endpoint, facts, client) | {"config": {"served_entities": entity_objects}}


def _endpoint_detail(endpoint: Endpoint, facts: ServerFacts, client: Tenant) -> dict[str, Any]:
    entities = [_served_entity(share, endpoint, facts) for share in endpoint.shares]
    routes = [
        {"served_model_name": share.name, "served_entity_name": share.name, "traffic_percentage": share.percent}
        for share in endpoint.shares
    ]
    return _common_members(endpoint, facts, client) | {
        "config": {
            "served_entities": entities,
            "served_models": list(map(_served_model, entities)),
            "traffic_config": {"routes": routes},
            "config_version": _endpoint_description(endpoint)["config_version"],
        }
    }
