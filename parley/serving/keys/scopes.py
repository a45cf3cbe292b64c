"""The models and APIs that an API key may use."""

from __future__ import annotations

from collections.abc import Collection

from parley.errors import Forbidden
from parley.serving.served_model import ServedModel
from parley.types import Tenant


def check_key_models(tenant: Tenant, names: Collection[str]) -> None:
    """Check that a key may use the model, or the adapter, with these names. Raises Forbidden."""
    if tenant.models and not any(name in tenant.models for name in names):
        raise Forbidden(
            f"This API key may not use the model {next(iter(names))}. It may use: {', '.join(tenant.models)}.",
            field="model",
        )


def may_use_model(tenant: Tenant, model: ServedModel) -> bool:
    """Whether a key may use a model, or one of its adapters."""
    return not tenant.models or any(name in tenant.models for name in (*model.names, *model.adapters))


def check_key_name(tenant: Tenant, model: ServedModel, name: str) -> None:
    """Check that a key may use a model under this name, which may be that of an adapter. Raises Forbidden."""
    answer_name = model.answer_name(name)
    check_key_models(tenant, (answer_name,) if answer_name in model.adapters else model.names)


def check_key_api(tenant: Tenant, api: str) -> None:
    """Check that a key may use an API. Raises Forbidden."""
    if tenant.apis and api not in tenant.apis:
        raise Forbidden(f"This API key may not use the API {api}. It may use: {', '.join(tenant.apis)}.")
