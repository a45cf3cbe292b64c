"""The models and APIs that an API key may use."""

from __future__ import annotations

from collections.abc import Collection

from parley.errors import Forbidden
from parley.types import Tenant


def check_key_models(tenant: Tenant, names: Collection[str]) -> None:
    """Check that a key may use the model, or the adapter, with these names. Raises Forbidden."""
    if tenant.models and not any(name in tenant.models for name in names):
        raise Forbidden(
            f"This API key may not use the model {next(iter(names))}. It may use: {', '.join(tenant.models)}.",
            field="model",
        )


def check_key_api(tenant: Tenant, api: str) -> None:
    """Check that a key may use an API. Raises Forbidden."""
    if tenant.apis and api not in tenant.apis:
        raise Forbidden(f"This API key may not use the API {api}. It may use: {', '.join(tenant.apis)}.")
