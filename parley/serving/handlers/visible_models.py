"""The models and endpoints that a client's key may use."""

from __future__ import annotations

from collections.abc import Mapping

from parley.dialects.facts import Endpoint
from parley.dialects.route import Route
from parley.serving.keys.scopes import check_key_name, may_use_model
from parley.serving.model_registry import ModelRegistry
from parley.serving.served_model import ServedModel
from parley.types import Tenant


def allowed_model(registry: ModelRegistry, route: Route, tenant: Tenant) -> ServedModel:
    """Return the model for a route's requests that name none. Raises Forbidden if the key may not use it."""
    model = registry.implied_model(route, tenant)
    if not may_use_model(tenant, model):
        check_key_name(tenant, model, model.name)
    return model


def visible_endpoints(
    registry: ModelRegistry, tenant: Tenant, endpoints: Mapping[str, Endpoint]
) -> Mapping[str, Endpoint]:
    """Return the endpoints whose models the client's key may all use."""
    if not tenant.models:
        return endpoints
    visible_names = set(registry.visible_names(tenant))
    return {
        name: endpoint
        for name, endpoint in endpoints.items()
        if visible_names.issuperset(share.model for share in endpoint.shares)
    }
