"""Reads a generating request: finds the model that it is for, and lets the route's dialect read its body.

Knows neither the field names of an API nor the later steps of a request.
"""

from __future__ import annotations

from uuid import UUID

from parley.dialects.records import INLINED_RECORDS, NO_RECORDS, TenantRecords
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.route import Route
from parley.disagg.wire.headers import FORWARDED_HEADER, RECORDS_HEADER
from parley.errors import UnknownModel, excerpt
from parley.serving import model_facts
from parley.serving.keys.scopes import check_key_name, may_use_model
from parley.serving.model_registry import ModelRegistry
from parley.serving.request_stage import request_stage
from parley.serving.served_model import ServedModel
from parley.web.exchange import Exchange


def read_generation_body(
    registry: ModelRegistry, route: Route, exchange: Exchange, body: bytes
) -> tuple[ServedModel, Reply | Answer]:
    """Find the model that a body is for, and read the body. An unknown model is reported after all other errors.

    Raises ParleyError.
    """
    assert route.reader is not None
    if route.names_endpoint:
        return _read_endpoint_body(registry, route, exchange, body)
    tenant = exchange.tenant
    model_name, implied = _requested_name(route, exchange, "model", body), registry.implied_model(route, tenant)
    exchange.log_entry.note_model(model_name or implied.name)
    if route.resolve_model_first:
        registry.find_model(model_name, tenant, implied).require_ready()
    model = registry.get_model(model_name, implied)  # None: unknown
    if model is not None and not may_use_model(tenant, model):
        check_key_name(tenant, model, model_name)
    reply = route.reader(body, request_context(registry, model or implied, exchange))
    if isinstance(reply, Answer):
        return model or implied, reply
    exchange.adopt_reply(reply)  # so that this API words an unknown-model error
    if model is None or reply.request.model != model_name:  # the API may ignore the name in the body
        model = registry.find_model(reply.request.model, tenant, implied)
    return model, reply


def _requested_name(route: Route, exchange: Exchange, parameter: str, body: bytes) -> str:
    """Return the name of the model or endpoint that a request is for: that of this parameter of the path, else that in
    the body, "" if there is none."""
    name_in_path = exchange.path_params.get(parameter)
    return name_in_path or (route.model_reader(body) if route.model_reader is not None else "")


def _read_endpoint_body(
    registry: ModelRegistry, route: Route, exchange: Exchange, body: bytes
) -> tuple[ServedModel, Reply | Answer]:
    """Read a body for an endpoint whose models share the requests, and choose the model. Raises NotFound."""
    assert route.reader is not None
    tenant = exchange.tenant
    endpoint_name = _requested_name(route, exchange, "endpoint", body) or registry.implied_model(route, tenant).name
    registry.endpoint_store.check_query(endpoint_name, tenant)
    # Derived from the request's id: every instance draws the same.
    random_fraction = int(exchange.request_uuid[:13], 16) / 16**13
    share = registry.endpoint_store.choose_share(
        endpoint_name, exchange.path_params.get("served", ""), lambda: random_fraction
    )
    if share.model not in registry.served_names:  # names that stand for any model are not valid here
        raise UnknownModel(
            f"There is no model {excerpt(share.model)}.", name=endpoint_name, served=registry.visible_names(tenant)
        )
    _begin_table_row(registry, exchange, endpoint_name, share.name, body)
    model = registry.find_model(share.model, tenant)
    reply = route.reader(body, request_context(registry, model, exchange))
    if isinstance(reply, Reply):
        reply.request.model, reply.served_model, reply.endpoint_name = share.model, share.name, endpoint_name
    return model, reply


def _begin_table_row(
    registry: ModelRegistry, exchange: Exchange, endpoint_name: str, served_name: str, body: bytes
) -> None:
    """Record the request and its answer if its endpoint has an inference table.

    A separated request is recorded once: by the instance that continues it, which answers.
    """
    endpoint, tables = registry.endpoint_store.by_name.get(endpoint_name), registry.inference_tables
    stage = request_stage(exchange)
    if endpoint is None or endpoint.table is None or tables is None:
        return
    if stage is not None and stage.prior_outputs is None:
        return
    requester = exchange.tenant.owner.name or exchange.log_entry.key
    request_id = str(UUID(exchange.request_uuid))
    exchange.recorder = tables.begin_row(endpoint.table, request_id, served_name, requester, body)


def request_context(registry: ModelRegistry, model: ServedModel, exchange: Exchange) -> RequestContext:
    """Return the server state that a dialect needs to read this request."""
    return model_facts.model_request_context(
        model,
        exchange.request_uuid,
        exchange.path_params,
        exchange.headers,
        query_string=exchange.scope.get("query_string", b""),
        created=exchange.created_at,
        tenant_id=exchange.tenant.id,
        reasoning_seal=registry.reasoning_seal,
        records=_tenant_records(registry, exchange),
    )


def _tenant_records(registry: ModelRegistry, exchange: Exchange) -> TenantRecords:
    """Return the records of the client's tenant. Instances keep none, because the next request may come to another
    instance; their coordinator keeps them, if any."""
    if RECORDS_HEADER in exchange.headers:
        return INLINED_RECORDS
    if exchange.stage is not None or FORWARDED_HEADER in exchange.headers:
        return NO_RECORDS
    return registry.tenant_records(exchange.tenant)
